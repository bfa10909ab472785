"""Where text comes from: documents out of the package, a file or the Hugging Face hub, and their split."""

import gzip
import json
import random
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import as_file, files
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any

from twofold.data.tokenizers import END_OF_TEXT
from twofold.spec import DataConfig, DataError, did_you_mean

# A WikiText title: " = Title = ". A section, " = = Title = = ", is not one.
_HEAD = re.compile(r"^ = (?!= ).*\S = ?$", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
_LINE_END = re.compile(r"\n")
_PIECE_CHARACTERS = 8_192
_TEXT_SUFFIXES = (".txt", ".txt.gz")
_JSONL_SUFFIXES = (".jsonl", ".jsonl.gz")


def read_documents(config: DataConfig) -> Iterator[str]:
    """Yields the documents of `config.source` in their order; documents of white space only are left out.

    - `wikipedia`: the 104 articles inside the package.
    - A `.txt` or `.txt.gz` file, UTF-8. Its documents are what lies between `<|endoftext|>` markers if it has any;
      else the articles if it has WikiText titles (lines ` = Title = `; what precedes the first is a document too);
      else pieces cut at the first blank line (or line end, in a text without blank lines) beyond 8,192 characters,
      or beyond a twentieth of a text shorter than twenty such pieces. No character is lost at titles and cuts.
    - A `.jsonl` or `.jsonl.gz` file: one row a document, its text in `config.text_field`.
    - `hf:NAME` or `hf:NAME:CONFIG`: the split `train` of a hub data set, one row a document. Rows that are the lines
      of WikiText (the first one is a title) are joined to articles.

    Raises:
        DataError: while iterating, for a source that is unknown, missing, empty, binary or malformed.
    """
    source = config.source
    if source == "wikipedia":
        with as_file(files("twofold.data") / "assets" / "enwiki_104_articles.txt.gz") as path:
            documents: Iterator[str] = iter(_documents_of_text(_read_text(path)))
    elif source.startswith("hf:"):
        documents = _hub_documents(source, config.text_field)
    elif source.endswith(_TEXT_SUFFIXES):
        documents = iter(_documents_of_text(_read_text(Path(source).expanduser())))
    elif source.endswith(_JSONL_SUFFIXES):
        documents = _jsonl_documents(Path(source).expanduser(), config.text_field)
    else:
        raise DataError(
            f"data source '{source}' is none of: wikipedia, hf:NAME, a file ending in "
            f"{', '.join(_TEXT_SUFFIXES + _JSONL_SUFFIXES)}{did_you_mean(source, ['wikipedia'])}"
        )
    found = False
    for document in documents:
        if document.strip():
            found = True
            yield document
    if not found:
        raise DataError(f"data source '{source}' is empty: it holds no text")


def split_documents(documents: Sequence[str], validation_fraction: float, seed: int) -> tuple[list[str], list[str]]:
    """Splits whole documents into training and validation, so that no text is in both.

    The documents are visited in an order drawn from the seed and held out where they fit, until the held-out
    characters are within a twentieth of the fraction; where none fits, the one that comes nearest may follow. Equal
    documents stay together.

    Returns:
        Training and validation documents, each with at least one, each in the order given.

    Raises:
        DataError: for fewer than two different documents.
    """
    count_of = Counter(documents)
    texts = list(count_of)
    if len(texts) < 2:
        raise DataError(
            f"the text has {len(texts)} different document(s), and a split into training and validation needs at "
            f"least 2; give more text, or mark where documents end with {END_OF_TEXT} in a .txt file"
        )
    sizes = {text: len(text) * count for text, count in count_of.items()}
    target = validation_fraction * sum(sizes.values())
    order = list(texts)
    random.Random(seed).shuffle(order)
    held_out: set[str] = set()
    total = 0
    for text in order:
        if total < 0.95 * target and total + sizes[text] <= 1.05 * target and len(held_out) < len(texts) - 1:
            held_out.add(text)
            total += sizes[text]
    if total < 0.95 * target and len(held_out) < len(texts) - 1:
        nearest = min(
            (text for text in order if text not in held_out), key=lambda text: abs(total + sizes[text] - target)
        )
        if not held_out or abs(total + sizes[nearest] - target) < target - total:
            held_out.add(nearest)
    training = [document for document in documents if document not in held_out]
    return training, [document for document in documents if document in held_out]


def _documents_of_text(text: str) -> list[str]:
    if END_OF_TEXT in text:
        return text.split(END_OF_TEXT)
    heads = [match.start() for match in _HEAD.finditer(text)]
    cuts = heads if heads else _piece_cuts(text)
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def _piece_cuts(text: str) -> list[int]:
    size = min(_PIECE_CHARACTERS, len(text) // 20)
    boundary = _BLANK_LINES if _BLANK_LINES.search(text.strip()) else _LINE_END
    cuts: list[int] = []
    while match := boundary.search(text, (cuts[-1] if cuts else 0) + size):
        if match.end() == len(text):
            break
        cuts.append(match.end())
    return cuts


def _open(path: Path) -> TextIOWrapper:
    if not path.exists():
        raise DataError(f"data file {path} does not exist")
    if path.is_dir():
        raise DataError(f"data file {path} is a folder; give one file")
    if path.suffix == ".gz":
        return TextIOWrapper(gzip.GzipFile(path), encoding="utf-8-sig")
    return path.open(encoding="utf-8-sig")


def _lines(path: Path) -> Iterator[str]:
    """Lines of a UTF-8 file with their ends; what cannot be read as text raises `DataError`."""
    try:
        with _open(path) as file:
            yield from file
    except UnicodeDecodeError as error:
        raise DataError(f"data file {path} is not UTF-8 text ({error.reason}); is it a binary file?") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"data file {path} cannot be read: {error}") from None


def _read_text(path: Path) -> str:
    text = "".join(_lines(path))
    if "\0" in text:
        raise DataError(f"data file {path} is a binary file: it contains NUL bytes")
    return text


def _jsonl_documents(path: Path, text_field: str) -> Iterator[str]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not valid JSON ({getattr(error, 'msg', error)})") from None
        yield _field(row, text_field, f"{path}, line {number}")


def _hub_documents(source: str, text_field: str) -> Iterator[str]:
    name, _, subset = source.removeprefix("hf:").partition(":")
    if not name:
        raise DataError(f"data source '{source}' lacks a name; write hf:NAME or hf:NAME:CONFIG")
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"data source '{source}' needs the datasets package; install twofold with its extra 'hub'"
        ) from None
    try:
        rows = datasets.load_dataset(name, subset or None, split="train")
    except Exception as error:  # the hub client raises many types, none of which is this program's mistake
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise DataError(f"hub data set '{source}' cannot be loaded: {reason}") from error
    texts = (_field(row, text_field, f"{source}, row {number}") for number, row in enumerate(rows, start=1))
    first = next((text for text in texts if text.strip()), None)
    if first is None:
        return
    everything = chain([first], texts)
    yield from _articles_of_lines(everything) if _HEAD.fullmatch(first.rstrip("\n")) else everything


def _articles_of_lines(lines: Iterable[str]) -> Iterator[str]:
    article: list[str] = []
    for line in lines:
        if article and _HEAD.fullmatch(line.rstrip("\n")):
            yield "".join(article)
            article = []
        article.append(line if line.endswith("\n") else line + "\n")
    yield "".join(article)


def _field(row: Any, text_field: str, where: str) -> str:
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row must be an object with a field '{text_field}'; got {type(row).__name__}")
    if text_field not in row:
        hint = did_you_mean(text_field, row)
        raise DataError(f"{where}: no field '{text_field}'{hint} The row has: {', '.join(row) or 'nothing'}")
    text = row[text_field]
    if not isinstance(text, str):
        raise DataError(f"{where}: field '{text_field}' must hold text; got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{where}: field '{text_field}' holds half a surrogate pair, which is not text") from None
    return text

"""From text to token files: tokenised once, kept in a cache folder named by its content, memory-mapped by every run."""

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import tokenizers
from jaxtyping import Int64, UInt
from tokenizers import Tokenizer

from twofold.data.sources import read_documents, split_documents
from twofold.data.tokenizers import build_tokenizer, end_of_text, end_of_text_id, vocabulary_size
from twofold.spec import DataConfig, DataError, canonical_json

_FORMAT = 1  # a change of the files' layout or of what enters them must raise it
_INDEX = "index.json"
_TOKENIZER = "tokenizer.json"
_BATCH = 256  # documents tokenised at a time


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """One split as token ids on disk: documents one after another, each with its end-of-text token."""

    path: Path
    """Token ids, little-endian, without a header."""
    dtype: str
    """`uint16` or, for vocabularies beyond 65,536 tokens, `uint32`."""
    num_tokens: int
    """Tokens, one end-of-text token for each document included."""
    num_documents: int
    """Documents."""
    num_bytes: int
    """Length of the documents in UTF-8 bytes, the divisor of bits per byte; end-of-text counts nothing.

    A document's first token is no target and yet counted here: with short documents, bits per byte come out a bit low.
    """
    sha256: str
    """Hash of the token ids and of where documents start."""

    @property
    def starts_path(self) -> Path:
        """The file beside it that says where documents start."""
        return self.path.with_suffix(".starts.bin")

    def tokens(self) -> UInt[np.ndarray, " num_tokens"]:
        """The token ids as a read-only memory map."""
        return _map(self.path, self.dtype, self.num_tokens)

    def document_starts(self) -> Int64[np.ndarray, " num_documents"]:
        """The index of each document's first token, ascending from 0, as a read-only memory map."""
        return _map(self.starts_path, "int64", self.num_documents)


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Text that is ready for training: token files of two splits and their tokenizer."""

    train: TokenFile
    """The training split."""
    validation: TokenFile
    """The held-out split; it shares no document with training."""
    tokenizer: Tokenizer
    """What made the tokens."""
    data_sha256: str
    """Hash of both splits' tokens and document boundaries: what a run was trained on. Part of its run id."""
    folder: Path
    """The cache entry that holds all files."""

    @property
    def vocab_size(self) -> int:
        """Rows that the model's embedding needs at least."""
        return vocabulary_size(self.tokenizer)

    @property
    def end_of_text(self) -> str:
        """The token that ends each document."""
        return end_of_text(self.tokenizer)

    @property
    def end_of_text_id(self) -> int:
        """Its id."""
        return end_of_text_id(self.tokenizer)


def prepare_text(config: DataConfig, folder: Path) -> TextData:
    """Tokenises the text of a config, or opens what an earlier run tokenised.

    An entry of the cache is named by its documents, their split and the tokenizer, whatever the sequence length, so
    runs share it. Entries appear by an atomic rename: processes may prepare the same text at the same time.

    Args:
        config: Source, tokenizer and split.
        folder: The cache folder; made where it is missing.

    Raises:
        DataError: for text or a tokenizer that cannot be used, or a damaged cache entry.
    """
    training, validation = split_documents(list(read_documents(config)), config.validation_fraction, config.split_seed)
    # Training a BPE takes long and is deterministic, so its recipe names it; others are named by what they are.
    tokenizer = None if config.tokenizer == "bpe" else build_tokenizer(config, training)
    bpe_recipe = f"bpe {config.tokenizer_vocab_size} tokenizers {tokenizers.__version__}"
    recipe = tokenizer.to_str() if tokenizer else bpe_recipe
    entry = folder / f"text-{_content_key(recipe, training, validation)}"
    if not (entry / _INDEX).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".preparing-{uuid4().hex}"
        draft.mkdir()
        try:
            _write_entry(draft, tokenizer or build_tokenizer(config, training), training, validation)
            _publish(draft, entry)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return open_text(entry)


def open_text(entry: Path) -> TextData:
    """Opens a cache entry that `prepare_text` made; `DataError` where it is missing or its files are damaged."""
    try:
        index = json.loads((entry / _INDEX).read_text(encoding="utf-8"))
        train, validation = (TokenFile(path=entry / f"{name}.bin", **index[name]) for name in ("train", "validation"))
        tokenizer = Tokenizer.from_file(str(entry / _TOKENIZER))
        for file in (train, validation):
            file.tokens()
            file.document_starts()
    except Exception as error:  # the tokenizers library raises plain Exception
        raise DataError(f"cached text {entry} is missing or damaged ({error}); delete it and start again") from error
    return TextData(
        train=train, validation=validation, tokenizer=tokenizer, data_sha256=index["data_sha256"], folder=entry
    )


def _content_key(recipe: str, training: Sequence[str], validation: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in (str(_FORMAT), recipe, str(len(training)), *training, *validation):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:16]


def _write_entry(draft: Path, tokenizer: Tokenizer, training: Sequence[str], validation: Sequence[str]) -> None:
    tokenizer.save(str(draft / _TOKENIZER))
    index: dict[str, Any] = {}
    for name, documents in (("train", training), ("validation", validation)):
        index[name] = _write_split(draft / f"{name}.bin", tokenizer, documents)
    index["data_sha256"] = hashlib.sha256(
        canonical_json({name: index[name]["sha256"] for name in ("train", "validation")}).encode()
    ).hexdigest()
    (draft / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_split(path: Path, tokenizer: Tokenizer, documents: Sequence[str]) -> dict[str, Any]:
    dtype = "uint16" if vocabulary_size(tokenizer) <= 2**16 else "uint32"
    digest = hashlib.sha256(dtype.encode())
    lengths: list[int] = []
    with path.open("wb") as file:
        for ids in _encode(tokenizer, documents):
            data = np.array(ids, dtype=_little_endian(dtype)).tobytes()
            file.write(data)
            digest.update(data)
            lengths.append(len(ids))
    starts = np.concatenate(([0], np.cumsum(lengths[:-1], dtype=np.int64))).astype(_little_endian("int64"))
    digest.update(starts.tobytes())
    written = TokenFile(
        path=path,
        dtype=dtype,
        num_tokens=sum(lengths),
        num_documents=len(lengths),
        num_bytes=sum(len(document.encode()) for document in documents),
        sha256=digest.hexdigest(),
    )
    written.starts_path.write_bytes(starts.tobytes())
    return {name: value for name, value in asdict(written).items() if name != "path"}


def _encode(tokenizer: Tokenizer, documents: Sequence[str]) -> Iterator[list[int]]:
    """Token ids of each document with end-of-text after it."""
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.encode_special_tokens = True  # a marker that occurs in the text is text, and ends nothing
    end = end_of_text_id(tokenizer)
    remaining = iter(documents)
    while batch := list(islice(remaining, _BATCH)):
        for encoding in plain.encode_batch_fast(batch, add_special_tokens=False):
            yield [*encoding.ids, end]


def _publish(draft: Path, entry: Path) -> None:
    try:
        draft.rename(entry)
    except OSError:
        if not entry.exists():
            raise
        if not (entry / _INDEX).is_file():
            raise DataError(f"cached text {entry} is incomplete and in the way; delete it and start again") from None
        # Another process was first. Its entry has the same content.


def _map(path: Path, dtype: str, length: int) -> npt.NDArray[Any]:
    expected = length * np.dtype(dtype).itemsize
    if path.stat().st_size != expected:
        raise DataError(f"{path} has {path.stat().st_size} bytes instead of {expected}")
    return np.memmap(path, dtype=_little_endian(dtype), mode="r", shape=(length,))


def _little_endian(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<") if sys.byteorder == "big" else np.dtype(dtype)

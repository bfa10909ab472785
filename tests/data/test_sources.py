"""Documents out of text, rows and the hub; their split; and what is said about input that cannot be used."""

import gzip
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.data import read_documents, split_documents
from twofold.spec import DataConfig, DataError


def documents_of(path, **settings):
    return list(read_documents(DataConfig(source=str(path), **settings)))


def write(path, content):
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


ARTICLES = [
    " = First = \n\nOne .\n\n = = Section = = \n\nTwo .\n\n",
    " = Second ( x = y ) = \n\n = = = Deep = = = \n\nThree .\n",
]


def test_the_embedded_articles_are_whole():
    documents = documents_of("wikipedia")
    assert len(documents) == 104
    assert documents[0].startswith(" = Anarchism = \n\nAnarchism is a political philosophy")
    assert documents[3].startswith(" = A = \n"), "a title of one letter"
    assert all(document.startswith(" = ") for document in documents)
    assert sum(len(document.encode()) for document in documents) == 2_761_320


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_wikitext_is_cut_at_titles_but_not_at_sections(tmp_path, name):
    assert documents_of(write(tmp_path / name, "".join(ARTICLES))) == ARTICLES


def test_what_precedes_the_first_title_is_a_document_unless_it_is_blank(tmp_path):
    assert documents_of(write(tmp_path / "a.txt", "Preface\n" + ARTICLES[0])) == ["Preface\n", ARTICLES[0]]
    assert documents_of(write(tmp_path / "b.txt", " \n" + ARTICLES[0])) == [ARTICLES[0]]


def test_end_of_text_markers_come_before_titles(tmp_path):
    path = write(tmp_path / "a.txt", f"{ARTICLES[0]}<|endoftext|>{ARTICLES[1]}tail<|endoftext|>\n")
    assert documents_of(path) == [ARTICLES[0], ARTICLES[1] + "tail"]


def test_plain_text_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path):
    paragraphs = [f"Paragraph {number}: " + "word " * (number % 50) + "\n \n\n" for number in range(2_000)]
    documents = documents_of(write(tmp_path / "a.txt", "".join(paragraphs)))
    assert "".join(documents) == "".join(paragraphs)
    assert all(document.startswith("Paragraph") for document in documents)
    assert all(8_192 <= len(document) < 8_192 + 300 for document in documents[:-1])


def test_short_text_without_blank_lines_is_cut_at_line_ends(tmp_path):
    text = "".join(f"line {number}\n" for number in range(100))
    documents = documents_of(write(tmp_path / "a.txt", text))
    assert "".join(documents) == text
    assert 10 <= len(documents) <= 20
    assert all(document.endswith("\n") for document in documents)


def test_byte_order_mark_and_carriage_returns_are_not_text(tmp_path):
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbf" + "".join(ARTICLES).replace("\n", "\r\n").encode())
    assert documents_of(path) == ARTICLES


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_jsonl_rows_are_documents(tmp_path, name):
    rows = [{"body": "uno\n\n = x = \n"}, {"body": "  "}, {"body": "due\u2028", "text": 3}]
    path = write(tmp_path / name, "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")
    assert documents_of(path, text_field="body") == ["uno\n\n = x = \n", "due\u2028"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"", "is empty: it holds no text"),
        ("a.txt", b" \n\n", "is empty: it holds no text"),
        ("a.txt", b"abc\0def", "NUL"),
        ("a.txt", b"\x80\x81\xff", "not UTF-8"),
        ("a.jsonl", b"", "is empty: it holds no text"),
        ("a.jsonl", b"\x80\x81\xff", "not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y", "id": 1}\n', "line 2: no field 'text'; did you mean 'txt'?"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text": \n', "line 3: not valid JSON"),
        ("a.jsonl", b'["text"]\n', "line 1: a row must be an object"),
        ("a.jsonl", b'{"text": 5}\n', "line 1: field 'text' must hold text; got int"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1: field 'text' holds half a surrogate pair"),
    ],
)
def test_bad_files_are_named_in_one_line(tmp_path, name, content, says):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        documents_of(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_opened(tmp_path):
    (tmp_path / "broken.txt.gz").write_bytes(gzip.compress(b"some text " * 1_000)[:-20])
    (tmp_path / "plain.txt.gz").write_bytes(b"not compressed")
    (tmp_path / "folder.txt").mkdir()
    for name, says in [
        ("missing.txt", "does not exist"),
        ("broken.txt.gz", "cannot be read"),
        ("plain.txt.gz", "cannot be read"),
        ("folder.txt", "is a folder"),
    ]:
        with pytest.raises(DataError, match=says):
            documents_of(tmp_path / name)


def test_unknown_source_names_the_nearest():
    with pytest.raises(DataError, match="did you mean 'wikipedia'"):
        documents_of("wikipdia")
    with pytest.raises(DataError, match="none of: wikipedia"):
        documents_of("book.pdf")
    with pytest.raises(DataError, match="lacks a name"):
        documents_of("hf:")


def test_hub_without_the_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="install twofold with its extra 'hub'"):
        documents_of("hf:Salesforce/wikitext:wikitext-2-raw-v1")


class TestHub:
    """The hub's loader reads local folders of the same format, so that no network is needed."""

    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        datasets = pytest.importorskip("datasets", reason="needs the extra twofold[hub]")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
        (tmp_path / "set").mkdir()
        return tmp_path / "set"

    def test_rows_are_documents(self, folder):
        write(folder / "train.jsonl", "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in ARTICLES * 2))
        assert documents_of(f"hf:{folder}") == ARTICLES * 2
        with pytest.raises(DataError, match="row 1: no field 'content'"):
            documents_of(f"hf:{folder}", text_field="content")
        with pytest.raises(DataError, match="cannot be loaded"):
            documents_of(f"hf:{folder}:absent")

    def test_lines_of_wikitext_are_joined_to_articles(self, folder):
        lines = ["", *"".join(ARTICLES).splitlines(keepends=True)]
        write(folder / "train.jsonl", "".join(json.dumps({"text": line}) + "\n" for line in lines))
        assert documents_of(f"hf:{folder}") == ARTICLES


@given(
    documents=st.lists(st.text(min_size=1, max_size=20), min_size=2, max_size=30),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 5),
)
def test_a_split_loses_nothing_and_shares_nothing(documents, fraction, seed):
    if len(set(documents)) < 2:
        with pytest.raises(DataError, match="at least 2"):
            split_documents(documents, fraction, seed)
        return
    training, validation = split_documents(documents, fraction, seed)
    assert training
    assert validation
    assert not set(training) & set(validation)
    assert sorted(training + validation) == sorted(documents)
    assert training == [document for document in documents if document in set(training)]
    assert (training, validation) == split_documents(documents, fraction, seed)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.5])
def test_the_held_out_share_is_near_the_fraction(fraction, seed):
    documents = documents_of("wikipedia")
    _, validation = split_documents(documents, fraction, seed)
    share = sum(map(len, validation)) / sum(map(len, documents))
    assert share == pytest.approx(fraction, rel=0.1)


def test_the_seed_chooses_the_held_out_documents():
    documents = [f"document {number}" for number in range(50)]
    assert split_documents(documents, 0.2, 0) != split_documents(documents, 0.2, 1)


def test_one_document_cannot_be_split():
    with pytest.raises(DataError, match=r"1 different document\(s\)"):
        split_documents(["only"], 0.1, 0)

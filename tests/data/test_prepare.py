"""Token files: what they hold, what names them, and that runs share them, even when they start together."""

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace

import numpy as np
import pytest
from tokenizers import Tokenizer

from twofold.data import END_OF_TEXT, open_text, prepare_text, read_documents, split_documents
from twofold.spec import DataConfig, DataError

DOCUMENTS = [f"Document {number} says: {'la ' * (number % 7)}ü {number * 37}.\n" for number in range(40)]


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in DOCUMENTS), encoding="utf-8")
    return DataConfig(source=str(path), tokenizer="bytes", sequence_length=16)


def decoded(data, token_file):
    """The documents of a token file, with the end-of-text token taken off."""
    pieces = np.split(token_file.tokens(), token_file.document_starts()[1:])
    assert all(piece[-1] == data.end_of_text_id for piece in pieces)
    return [data.tokenizer.decode(piece[:-1].tolist(), skip_special_tokens=False) for piece in pieces]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_token_files_hold_the_split_documents(config, tmp_path, tokenizer):
    config = replace(config, tokenizer=tokenizer, tokenizer_vocab_size=300)
    data = prepare_text(config, tmp_path / "cache")
    training, validation = split_documents(DOCUMENTS, config.validation_fraction, config.split_seed)
    assert decoded(data, data.train) == training
    assert decoded(data, data.validation) == validation
    for token_file, documents in ((data.train, training), (data.validation, validation)):
        assert token_file.num_documents == len(documents)
        assert token_file.num_bytes == sum(len(document.encode()) for document in documents)
        assert token_file.num_tokens == token_file.tokens().size
        assert token_file.tokens().dtype == np.uint16
        assert np.count_nonzero(token_file.tokens() == data.end_of_text_id) == len(documents)
    if tokenizer == "bytes":
        assert data.train.num_tokens == data.train.num_bytes + len(training)


def test_bpe_sees_training_documents_only(tmp_path):
    documents = [f"{word} {word} {word} " * 20 for word in ("alpha", "beta", "gamma", "delta")]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    data = prepare_text(DataConfig(source=str(path), validation_fraction=0.2), tmp_path)
    held_out = decoded(data, data.validation)
    assert len(held_out) == 1
    for document in documents:
        word = document.split()[0]
        assert (len(data.tokenizer.encode(f" {word}").ids) == 1) == (document not in held_out)


def test_a_marker_in_the_text_ends_no_document(tmp_path):
    path = tmp_path / "text.jsonl"
    documents = [f"before{END_OF_TEXT}after", "another one"]
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    data = prepare_text(DataConfig(source=str(path), tokenizer="bytes"), tmp_path)
    assert sorted(decoded(data, data.train) + decoded(data, data.validation)) == sorted(documents)
    both = np.concatenate([data.train.tokens(), data.validation.tokens()])
    assert np.count_nonzero(both == 256) == 2


def test_large_vocabularies_use_four_bytes(config, tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    wide = prepare_text(config, tmp_path / "cache").tokenizer
    wide.add_tokens([f"word{number}" for number in range(70_000)])
    wide.save(str(folder / "tokenizer.json"))
    path = tmp_path / "wide.jsonl"
    path.write_text('{"text": "word1 word69999"}\n{"text": "x"}\n')
    data = prepare_text(replace(config, source=str(path), tokenizer=str(folder)), tmp_path / "cache")
    tokens = np.concatenate([data.train.tokens(), data.validation.tokens()])
    assert tokens.dtype == np.uint32
    assert tokens.max() == 257 + 69_999
    assert data.vocab_size == 257 + 70_000


def test_a_second_run_maps_the_same_files(config, tmp_path, monkeypatch):
    first = prepare_text(config, tmp_path / "cache")
    times = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    monkeypatch.setattr("twofold.data.prepare._write_entry", lambda *_: pytest.fail("tokenised again"))
    second = prepare_text(replace(config, sequence_length=8), tmp_path / "cache")
    assert second.folder == first.folder
    assert second.data_sha256 == first.data_sha256
    assert {path: path.stat().st_mtime_ns for path in first.folder.iterdir()} == times
    assert isinstance(second.train.tokens(), np.memmap)
    assert not second.train.tokens().flags.writeable
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.folder.name], "no drafts are left"


def test_the_hash_is_that_of_the_content_and_nothing_else(config, tmp_path):
    first = prepare_text(config, tmp_path / "one")
    elsewhere = tmp_path / "renamed.jsonl"
    elsewhere.write_bytes((tmp_path / "text.jsonl").read_bytes())
    again = prepare_text(replace(config, source=str(elsewhere)), tmp_path / "two")
    assert again.data_sha256 == first.data_sha256
    assert again.folder.name == first.folder.name
    assert {**asdict(again.train), "path": None} == {**asdict(first.train), "path": None}

    others = [replace(config, split_seed=1), replace(config, tokenizer="bpe"), replace(config, validation_fraction=0.3)]
    elsewhere.write_text(elsewhere.read_text().replace("Document 3 ", "Document 4 "))
    others.append(replace(config, source=str(elsewhere)))
    hashes = {first.data_sha256, *(prepare_text(other, tmp_path / "one").data_sha256 for other in others)}
    assert len(hashes) == 5


def test_document_boundaries_enter_the_hash(config, tmp_path):
    """Equal tokens that are cut differently are other data: attention and positions differ."""
    data = prepare_text(config, tmp_path)
    starts = data.train.document_starts()
    assert starts[0] == 0
    assert (np.diff(starts) > 1).all()
    joined = [DOCUMENTS[0], *DOCUMENTS[3:], DOCUMENTS[1] + DOCUMENTS[2]]
    path = tmp_path / "joined.jsonl"
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in joined), encoding="utf-8")
    assert prepare_text(replace(config, source=str(path)), tmp_path).data_sha256 != data.data_sha256


def test_processes_may_prepare_the_same_text_together(config, tmp_path):
    config = replace(config, tokenizer="bpe", tokenizer_vocab_size=290)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_hash_of, config, tmp_path / "cache") for _ in range(4)]
        hashes = {future.result(timeout=120) for future in futures}
    assert len(hashes) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_who_comes_second_takes_the_entry_of_the_first(config, tmp_path, monkeypatch):
    from twofold.data import prepare

    publish = prepare._publish

    def overtaken(draft, entry):
        monkeypatch.setattr(prepare, "_publish", publish)
        prepare_text(config, tmp_path / "cache")
        assert entry.is_dir()
        publish(draft, entry)

    monkeypatch.setattr(prepare, "_publish", overtaken)
    data = prepare_text(config, tmp_path / "cache")
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [data.folder.name]


def test_a_failure_leaves_nothing_behind(config, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("twofold.data.prepare._write_split", fail)
    with pytest.raises(OSError, match="disk full"):
        prepare_text(config, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("name", ["train.bin", "validation.starts.bin", "tokenizer.json", "index.json"])
def test_damage_is_noticed(config, tmp_path, name):
    data = prepare_text(config, tmp_path / "cache")
    damaged = data.folder / name
    damaged.write_bytes(damaged.read_bytes()[:-3])
    with pytest.raises(DataError, match="missing or damaged"):
        open_text(data.folder)


def test_an_incomplete_entry_in_the_way_is_named(config, tmp_path):
    data = prepare_text(config, tmp_path / "cache")
    (data.folder / "index.json").unlink()
    with pytest.raises(DataError, match="incomplete and in the way"):
        prepare_text(config, tmp_path / "cache")


def test_the_tokenizer_lies_beside_the_tokens(config, tmp_path):
    data = prepare_text(config, tmp_path)
    assert Tokenizer.from_file(str(data.folder / "tokenizer.json")).to_str() == data.tokenizer.to_str()
    assert data.vocab_size == 257


def test_the_embedded_text_is_enough_to_train_on(tmp_path):
    config = DataConfig()
    data = prepare_text(config, tmp_path)
    documents = list(read_documents(config))
    assert data.train.num_documents + data.validation.num_documents == len(documents)
    assert data.train.num_bytes + data.validation.num_bytes == sum(len(document.encode()) for document in documents)
    assert data.vocab_size == 2_048
    assert 0.28 < data.train.num_tokens / data.train.num_bytes < 0.38
    assert data.train.num_tokens > 750_000


def _hash_of(config, folder):
    return prepare_text(config, folder).data_sha256

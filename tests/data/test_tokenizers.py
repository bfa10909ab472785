"""Every tokenizer gives text back exactly, is reproducible, and ends documents with a token of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from twofold.data import END_OF_TEXT, build_tokenizer, end_of_text, end_of_text_id, vocabulary_size
from twofold.spec import DataConfig, DataError

GPT2 = Path(__file__).parents[2] / "../shared/data/registry/gpt2_tokenizer"
needs_gpt2 = pytest.mark.skipif(
    not (GPT2 / "vocab.json").is_file(), reason=f"GPT-2's vocab.json and merges.txt are not in {GPT2}"
)
DOCUMENTS = ["The cat sat on the mat.\n\nThe end, the cat said.", "Ein Satz über Öl – 漢字 🙂", "the the the cat cat"]


@pytest.fixture(scope="module")
def tokenizers_by_name():
    names = {"bytes": "bytes", "bpe": "bpe"} | ({"gpt2": str(GPT2)} if (GPT2 / "vocab.json").is_file() else {})
    return {
        name: build_tokenizer(DataConfig(tokenizer=given_name, tokenizer_vocab_size=280), DOCUMENTS)
        for name, given_name in names.items()
    }


def test_any_text_survives(tokenizers_by_name):
    @given(text=st.text() | st.lists(st.sampled_from([END_OF_TEXT, " ", "\n", "\0", "'s", "é"])).map("".join))
    def check(text):
        for name, tokenizer in tokenizers_by_name.items():
            ids = tokenizer.encode(text).ids
            assert tokenizer.decode(ids, skip_special_tokens=False) == text, name

    check()


def test_byte_tokens_are_the_bytes(tokenizers_by_name):
    tokenizer = tokenizers_by_name["bytes"]
    text = "Ab\n\0é漢🙂 ~\x7f\xad"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert [tokenizer.id_to_token(byte) is not None for byte in range(256)] == [True] * 256
    assert end_of_text_id(tokenizer) == 256
    assert vocabulary_size(tokenizer) == 257


def test_bpe_has_the_size_asked_for_and_merges_what_is_frequent(tokenizers_by_name):
    tokenizer = tokenizers_by_name["bpe"]
    assert 257 < vocabulary_size(tokenizer) <= 280
    assert len(tokenizer.encode(" the").ids) == 1
    assert tokenizer.encode(f"a{END_OF_TEXT}").ids[-1] == end_of_text_id(tokenizer)
    long = build_tokenizer(DataConfig(tokenizer_vocab_size=300), [" ".join(f"{n} {n}" for n in range(999))])
    assert vocabulary_size(long) == 300


def test_bpe_is_the_same_in_every_process():
    code = (
        "from twofold.data import build_tokenizer; from twofold.spec import DataConfig;"
        f"print(build_tokenizer(DataConfig(tokenizer_vocab_size=275), {DOCUMENTS!r}).to_str())"
    )
    here = build_tokenizer(DataConfig(tokenizer_vocab_size=275), DOCUMENTS).to_str()
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, encoding="utf-8")
    assert there.stdout.strip() == here


def test_transformers_reads_the_file_alike(tokenizers_by_name, tmp_path):
    transformers = pytest.importorskip("transformers")
    for name, tokenizer in tokenizers_by_name.items():
        tokenizer.save(str(tmp_path / f"{name}.json"))
        theirs = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(tmp_path / f"{name}.json"), eos_token=END_OF_TEXT
        )
        text = "Hello , world 's end .\n  Ünicode 🙂"
        assert theirs(text)["input_ids"] == tokenizer.encode(text).ids
        assert theirs.decode(tokenizer.encode(text).ids) == text
        assert theirs.eos_token_id == end_of_text_id(tokenizer)
        assert len(theirs) == vocabulary_size(tokenizer)


@needs_gpt2
def test_gpt2_has_its_published_ids():
    tokenizer = build_tokenizer(DataConfig(tokenizer=str(GPT2)), [])
    assert tokenizer.encode("Hello world").ids == [15496, 995]
    assert tokenizer.encode(" a\n\n\u00e9").ids == [257, 198, 198, 2634]
    assert end_of_text_id(tokenizer) == 50_256
    assert vocabulary_size(tokenizer) == 50_257


def test_a_folder_with_tokenizer_json_loads_without_its_padding_and_truncation(tokenizers_by_name, tmp_path):
    saved = Tokenizer.from_str(tokenizers_by_name["bpe"].to_str())
    saved.enable_truncation(3)
    saved.enable_padding(length=50)
    saved.save(str(tmp_path / "tokenizer.json"))
    loaded = build_tokenizer(DataConfig(tokenizer=str(tmp_path)), [])
    assert loaded.encode("the cat sat").ids == tokenizers_by_name["bpe"].encode("the cat sat").ids
    assert loaded.to_str() == tokenizers_by_name["bpe"].to_str()


@pytest.mark.parametrize("name", ["</s>", "<|end_of_text|>", "<eos>"])
def test_other_names_of_end_of_text_are_known(name):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, name: 1}, unk_token="a"))
    assert (end_of_text(tokenizer), end_of_text_id(tokenizer)) == (name, 1)


def test_ids_with_gaps_count_to_the_largest():
    assert vocabulary_size(Tokenizer(models.WordLevel({"a": 0, "b": 9}, unk_token="a"))) == 10


def test_bad_tokenizers_are_refused(tmp_path):
    empty, broken, endless = (tmp_path / name for name in ("empty", "broken", "endless"))
    for folder in (empty, broken, endless):
        folder.mkdir()
    (broken / "tokenizer.json").write_text("{}")
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(endless / "tokenizer.json"))
    for given_name, says in [
        ("byte", "did you mean 'bytes'"),
        (str(empty), "holds no tokenizer"),
        (str(broken), "cannot be read"),
        (str(endless), "no end-of-text token"),
    ]:
        with pytest.raises(DataError, match=says):
            build_tokenizer(DataConfig(tokenizer=given_name), DOCUMENTS)
    with pytest.raises(DataError, match="there are none"):
        build_tokenizer(DataConfig(tokenizer="bpe"), [])


def test_gpt2_without_a_network_says_what_to_give_instead(monkeypatch):
    class Offline:
        @staticmethod
        def from_pretrained(name):
            raise OSError(f"no route to {name}")

    monkeypatch.setattr("twofold.data.tokenizers.Tokenizer", Offline)
    with pytest.raises(DataError, match=r"vocab\.json and merges\.txt"):
        build_tokenizer(DataConfig(tokenizer="gpt2"), [])


@needs_gpt2
def test_both_files_of_gpt2_agree():
    vocabulary = json.loads((GPT2 / "vocab.json").read_text(encoding="utf-8"))
    tokenizer = build_tokenizer(DataConfig(tokenizer=str(GPT2)), [])
    assert tokenizer.get_vocab() == vocabulary

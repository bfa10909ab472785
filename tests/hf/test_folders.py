"""Model folders: written, read back, read by programs that never heard of us, and damaged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, BertConfig, pipeline

from tests.hf.small import END_OF_TEXT, VARIANTS, make_model, make_plain, make_tokenizer
from twofold.hf import TwofoldForCausalLM, load_model, save_model, to_hf, to_plain
from twofold.kernels import quantize_weights
from twofold.spec import ConfigError, RunFolderError, TwofoldError

SOURCE = Path(__file__).parents[2] / "src"
STOCK_SCRIPT = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
folder = sys.argv[1]
assert "twofold" not in sys.modules
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
assert AutoConfig.from_pretrained(folder, trust_remote_code=True).model_type == "twofold"
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
prompt = tokenizer("the cat", return_tensors="pt")
print(model.generate(**prompt, max_new_tokens=8, do_sample=False)[0].tolist())
model.save_pretrained(sys.argv[2])
"""


@pytest.fixture
def folder(tmp_path):
    save_model(make_plain(), tmp_path / "model", make_tokenizer(), END_OF_TEXT)
    return tmp_path / "model"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tied", [True, False])
def test_round_trip(variant, tied, tmp_path):
    plain = make_plain(variant, tie_word_embeddings=tied)
    save_model(plain, tmp_path, None)
    loaded, tokenizer = load_model(tmp_path)
    assert tokenizer is None
    assert not loaded.training
    assert loaded.config.spec == plain.config.with_changes(query_depth=1)  # folded for inference
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert stock.config.spec == plain.config
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(stock(ids).logits, plain(ids))
        torch.testing.assert_close(loaded(ids).logits, plain(ids))
        for model in (loaded, stock):
            assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
        base = AutoModel.from_pretrained(tmp_path)
        assert torch.equal(base(ids).last_hidden_state, plain.decoder(ids))


def test_dtype_is_kept(tmp_path):
    save_model(make_plain().to(torch.bfloat16), tmp_path)
    assert load_model(tmp_path)[0].dtype == torch.bfloat16


def test_int8_weights_are_refused_in_one_line_and_made_again_after_loading(folder, tmp_path):
    model, _ = load_model(folder)
    quantize_weights(model)
    for save in (model.save_pretrained, lambda path: save_model(to_plain(model), path)):
        with pytest.raises(TwofoldError, match="a model with int8 weights is not saved; save it before"):
            save(tmp_path / "int8")
    assert not (tmp_path / "int8").exists()
    again = quantize_weights(load_model(folder)[0])
    tokens = torch.arange(6)[None]
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert to_hf(to_plain(model)).config.dtype == torch.float32


def test_what_is_in_a_folder(folder):
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_twofold.py",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == generation["pad_token_id"] == 0


def test_tokenizer(folder):
    _, tokenizer = load_model(folder)
    assert tokenizer.eos_token == tokenizer.pad_token == END_OF_TEXT
    batch = tokenizer(["the cat sat", "a dog"], padding=True, return_tensors="pt")
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["attention_mask"][1, 0] == 0  # padded on the left
    text = "the cat sat on the mat"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer(text)["input_ids"] == make_tokenizer().encode(text).ids


def test_a_token_that_ends_texts_is_the_callers_to_name(tmp_path):
    save_model(make_plain(), tmp_path / "none", make_tokenizer())
    _, tokenizer = load_model(tmp_path / "none")
    assert tokenizer.eos_token is None
    with pytest.raises(ConfigError, match="the tokenizer has no token '</s>'"):
        save_model(make_plain(), tmp_path / "other", make_tokenizer(), "</s>")


def test_pipeline(folder):
    generate = pipeline("text-generation", model=str(folder), tokenizer=str(folder))
    texts = generate(["the cat", "a dog and a"], batch_size=2, max_new_tokens=6, do_sample=False)
    model, tokenizer = load_model(folder)
    for [text], prompt in zip(texts, ["the cat", "a dog and a"], strict=True):
        ids = tokenizer(prompt, return_tensors="pt")
        alone = model.generate(**ids, max_new_tokens=6, do_sample=False)
        assert text["generated_text"] == tokenizer.decode(alone[0], skip_special_tokens=True)


def test_stock_script_loads_it(folder, tmp_path):
    """A program that never imports twofold, and saves the model again."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "home"),
        "OMP_NUM_THREADS": "1",
    }
    again = tmp_path / "again"
    done = subprocess.run(
        [sys.executable, "-c", STOCK_SCRIPT, str(folder), str(again)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    model, tokenizer = load_model(folder)
    expected = model.generate(**tokenizer("the cat", return_tensors="pt"), max_new_tokens=8, do_sample=False)
    assert done.stdout.strip() == str(expected[0].tolist())
    assert sorted(path.name for path in again.glob("*.py")) == ["modeling_twofold.py"]
    assert torch.equal(load_model(again)[0].lm_head.weight, model.lm_head.weight)


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def garble(folder):
    (folder / "model.safetensors").write_bytes(b"not safetensors")


def remove_weights(folder):
    (folder / "model.safetensors").unlink()


def pickle_instead(folder):
    remove_weights(folder)
    torch.save({"weight": torch.ones(1)}, folder / "pytorch_model.bin")


def remove_config(folder):
    (folder / "config.json").unlink()


def garble_config(folder):
    (folder / "config.json").write_text("{")


def set_config(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def garble_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (truncate, RunFolderError, "cannot be read"),
        (garble, RunFolderError, "cannot be read"),
        (remove_weights, RunFolderError, "no safetensors file"),
        (pickle_instead, RunFolderError, "pytorch_model.bin is a pickle, which is never loaded"),
        (remove_config, RunFolderError, "has no config.json"),
        (garble_config, RunFolderError, "is not JSON"),
        (set_config(model_type="bert"), RunFolderError, "type 'bert', not a twofold model"),
        (set_config(num_hidden_layers=3), RunFolderError, "missing keys"),
        (set_config(num_hidden_layers=1), RunFolderError, "unexpected keys"),
        (set_config(intermediate_size=50), RunFolderError, "do not fit|cannot be read"),
        (set_config(num_key_value_heads=3), ConfigError, "config.json: .*num_key_value_heads 3"),
        (garble_tokenizer, RunFolderError, "tokenizer"),
    ],
)
def test_damage_is_told_in_one_line(folder, damage, kind, message):
    damage(folder)
    with pytest.raises(kind, match=message) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_folders_that_hold_no_model(tmp_path):
    with pytest.raises(RunFolderError, match="is not a folder"):
        load_model(tmp_path / "nothing")
    with pytest.raises(RunFolderError, match=r"no config\.json"):
        load_model(tmp_path)
    save_model(make_plain(), tmp_path / "model")
    with pytest.raises(RunFolderError, match="its model/ folder is one"):
        load_model(tmp_path)
    BertConfig().save_pretrained(tmp_path / "bert")
    with pytest.raises(RunFolderError, match="type 'bert'"):
        load_model(tmp_path / "bert")


def test_pickles_are_never_read(folder):
    with pytest.raises(TwofoldError, match="safetensors only"):
        TwofoldForCausalLM.from_pretrained(folder, use_safetensors=False)
    pickle_instead(folder)
    with pytest.raises(OSError, match="safetensors"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_tokenizer_goes_with_the_auto_class(folder):
    assert AutoTokenizer.from_pretrained(folder).model_max_length == make_model().config.max_position_embeddings

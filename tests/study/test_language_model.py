"""One language-model run from a local text to its result, and the evaluation of what it leaves."""

import json
import math
import shutil
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import twofold.hf  # noqa: F401 - registers the models
from tests.tiny_runs import make_documents, make_run, write_text
from twofold.cost import cache_bytes, count_parameters
from twofold.data import PackedSequences, build_tokenizer, prepare_text
from twofold.eval import measure_perplexity
from twofold.hf import load_model
from twofold.models import LanguageModel
from twofold.records import RunFolder, read_json, write_json_atomic
from twofold.spec import ConfigError, DataError, RunFolderError
from twofold.study import evaluate_language_model, model_folder, text_cache_folder, train_language_model
from twofold.study.language_model import measure_cache

# Somebody may commit to the checkout that these tests run in.
pytestmark = pytest.mark.filterwarnings("ignore:.*is resumed under another code or environment")

RESULT = {"run_id", "label", "finished_at", "parameters", "validation", "training", "cache", "sample"}


@pytest.fixture
def source(tmp_path):
    return write_text(tmp_path / "text.txt", make_documents())


def train(config, output, **options):
    return train_language_model(config, output, device="cpu", **options)


def without_times(result):
    training = {name: result["training"][name] for name in ("steps", "tokens")}
    return {**result, "training": training, "finished_at": None}


def write_jsonl(path, documents):
    path.write_text("".join(json.dumps({"body": text, "id": 1}) + "\n" for text in documents), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_run_from_text_to_result(kind, tmp_path):
    if kind == "txt":
        config = make_run(write_text(tmp_path / "text.txt", make_documents()), {"sharing": "tied-kv"}, precision="bf16")
    else:
        path = write_jsonl(tmp_path / "text.jsonl", make_documents())
        config = make_run(path, {"positions": "rope"}, {"text_field": "body"}, evaluate_every=2)
    rows = []
    result = train(config, tmp_path / "run", report=rows.append)

    folder = RunFolder.open(tmp_path / "run")
    assert result == folder.result()
    assert folder.config == config
    assert rows == folder.metrics()
    assert set(result) == RESULT
    assert result["run_id"] == folder.run_id
    assert result["label"] == config.model.label
    assert result["parameters"] == count_parameters(config.model).total
    assert set(result["validation"]) == {"loss", "perplexity", "bits_per_byte", "tokens", "bytes"}
    assert result["validation"]["loss"] == rows[-1]["validation_loss"]
    assert result["training"]["steps"] == 6
    assert set(result["training"]) == {"steps", "tokens", "seconds", "tokens_per_second"}
    assert result["sample"]["prompt"] == "The history of"
    assert isinstance(result["sample"]["continuation"], str)
    formula = cache_bytes(config.model, 1, "float32").total
    assert result["cache"] == {
        "dtype": "float32",
        "bytes_per_token": formula,
        "bytes_per_token_measured": float(formula),
    }

    model = AutoModelForCausalLM.from_pretrained(folder.model_path)
    tokenizer = AutoTokenizer.from_pretrained(folder.model_path)
    tokens = model.generate(**tokenizer("the cat", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert tokens.shape[1] <= len("the cat") + 3
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    evaluated = evaluate_language_model(tmp_path / "run", batch_size=config.train.batch_size, device="cpu")
    assert evaluated.to_dict() == result["validation"]


def test_the_token_that_ends_texts_of_a_foreign_tokenizer_is_kept(source, tmp_path):
    tokenizer = build_tokenizer(make_run(source).data, [])
    (tmp_path / "foreign").mkdir()
    text = tokenizer.to_str().replace("<|endoftext|>", "</s>")
    (tmp_path / "foreign" / "tokenizer.json").write_text(text, encoding="utf-8")
    config = make_run(source, data={"tokenizer": str(tmp_path / "foreign")}, steps=2)
    train(config, tmp_path / "run")
    model, tokenizer = load_model(RunFolder.open(tmp_path / "run").model_path)
    assert tokenizer.eos_token == tokenizer.pad_token == tokenizer.bos_token == "</s>"
    generation = model.generation_config
    assert generation.eos_token_id == generation.pad_token_id == generation.bos_token_id == 256
    prompts = tokenizer(["a cat", "the"], padding=True, return_tensors="pt")
    assert model.generate(**prompts, max_new_tokens=2).shape[1] <= len("a cat") + 2


def test_tied_key_and_value_halve_the_measured_cache(source, tmp_path):
    measured = {
        sharing: train(make_run(source, {"sharing": sharing}, steps=1), tmp_path / sharing)["cache"]
        for sharing in ("qkv", "tied-kv")
    }
    assert measured["tied-kv"]["bytes_per_token_measured"] == measured["qkv"]["bytes_per_token_measured"] / 2


@pytest.mark.parametrize(
    "model",
    [
        {"num_key_value_heads": 1},
        {"sharing": "tied-kv", "positions": "rope", "rope_mode": "unrotated"},
        {"sharing": "tied-kv", "positions": "rope", "rope_mode": "decoupled", "qk_rope_head_dim": 4},
        {"sharing": ["qkv", "tied-kv"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("number", [2, 24], ids=["short text", "text"])
def test_measured_cache_bytes_equal_the_formula(model, number, tmp_path):
    config = make_run(write_text(tmp_path / "text.txt", make_documents(number, longest=2)), model)
    text = prepare_text(config.data, tmp_path / "cache")
    if number == 2:
        assert text.validation.num_tokens < 64  # fewer than are cached where there are enough
    found = measure_cache(LanguageModel(config.model), text)
    assert (
        found["bytes_per_token"] == found["bytes_per_token_measured"] == cache_bytes(config.model, 1, "float32").total
    )


def test_a_finished_run_is_returned_without_training(source, tmp_path, monkeypatch):
    config = make_run(source)
    first = train(config, tmp_path / "run")
    environment = read_json(tmp_path / "run" / "environment.json")
    write_json_atomic(tmp_path / "run" / "environment.json", {**environment, "twofold": "0.0.1"})  # no warning
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}

    def never(*_, **__):
        pytest.fail("it was trained")

    monkeypatch.setattr("twofold.study.language_model.train", never)
    monkeypatch.setattr("twofold.study.language_model.LanguageModel", never)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(config, tmp_path / "run") == first
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert after == before


def test_an_interrupted_run_ends_as_one_that_was_not(source, tmp_path):
    settings = {"steps": 7, "checkpoint_every": 2, "log_every": 3, "gradient_accumulation": 2}
    config = make_run(source, {"hidden_dropout": 0.1}, **settings)
    expected = train(config, tmp_path / "unbroken")

    def stop(row):
        if row["step"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "broken", report=stop)
    broken = RunFolder.open(tmp_path / "broken")
    assert not broken.is_finished
    assert without_times(train(config, tmp_path / "broken")) == without_times(expected)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        ours, theirs = (tmp_path / run / "model" / name for run in ("broken", "unbroken"))
        assert ours.read_bytes() == theirs.read_bytes(), name


def test_nothing_in_a_run_folder_is_a_pickle(source, tmp_path):
    train(make_run(source, checkpoint_every=2), tmp_path / "run")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"state.safetensors", "model.safetensors", "result.json"} <= {path.name for path in files}
    assert {path.suffix for path in files} <= {".json", ".jsonl", ".safetensors", ".py", ".jinja", ""}  # .lock is empty
    for path in files:
        assert not path.read_bytes().startswith((b"PK", b"\x80")), path  # torch.save's archives, bare pickles


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": {"causal": False}}, ConfigError, "causal: false"),
        ({"model": {"vocab_size": 256}}, ConfigError, "set model.vocab_size=257"),
        ({"data": {"source": "missing.txt"}}, DataError, "missing.txt does not exist"),
        ({"data": {"tokenizer": "byts"}}, DataError, "did you mean 'bytes'"),
    ],
)
def test_what_cannot_be_trained_leaves_no_folder(changes, error, message, source, tmp_path):
    config = make_run(source, changes.get("model"), changes.get("data"))
    with pytest.raises(error, match=message):
        train(config, tmp_path / "runs" / "a")
    assert not (tmp_path / "runs").exists()


def test_a_text_shorter_than_a_sequence_is_refused(tmp_path):
    source = write_text(tmp_path / "text.txt", ["a", "b"])
    with pytest.raises(DataError, match="too few for one sequence of 16"):
        train(make_run(source), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_another_run_is_left_as_it_is(source, tmp_path):
    train(make_run(source, steps=1), tmp_path / "run")
    before = (tmp_path / "run" / "result.json").read_bytes()
    with pytest.raises(RunFolderError, match=r"holds another run .* differs in train.steps"):
        train(make_run(source, steps=2), tmp_path / "run")
    write_text(source, make_documents(seed=1))
    with pytest.raises(RunFolderError, match=r"holds another run .* its data differ"):
        train(make_run(source, steps=1), tmp_path / "run")
    assert (tmp_path / "run" / "result.json").read_bytes() == before


def test_a_model_with_few_positions_has_an_empty_sample(source, tmp_path):
    config = make_run(source, {"max_position_embeddings": 8}, {"sequence_length": 8}, steps=1)
    assert train(config, tmp_path / "run")["sample"]["continuation"] == ""


@pytest.mark.parametrize("place", ["LanguageModel", "measure_cache", "sample_text"])
def test_a_failure_before_or_after_training_is_recorded_too(place, source, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise MemoryError("no room")

    config = make_run(source)
    with monkeypatch.context() as patch:
        patch.setattr(f"twofold.study.language_model.{place}", fail)
        with pytest.raises(MemoryError):
            train(config, tmp_path / "run")
    folder = RunFolder.open(tmp_path / "run")
    assert folder.error()["type"] == "MemoryError"
    assert not folder.is_finished
    assert set(train(config, tmp_path / "run")) == RESULT
    assert folder.error() is None


@pytest.fixture
def trained(source, tmp_path):
    return train(make_run(source), tmp_path / "run"), tmp_path / "run"


def test_evaluation_takes_run_folders_and_model_folders(trained):
    result, path = trained
    assert model_folder(path) == path / "model"
    for folder in (path, path / "model"):
        assert evaluate_language_model(folder, batch_size=3, device="cpu").loss == pytest.approx(
            result["validation"]["loss"], rel=1e-6
        )


def test_evaluation_of_another_text_uses_the_models_tokenizer(trained, tmp_path):
    _, path = trained
    other = write_text(tmp_path / "other.txt", make_documents(seed=9))
    found = evaluate_language_model(path, source=str(other), device="cpu")
    model = LanguageModel(RunFolder.open(path).config.model)
    hf = AutoModelForCausalLM.from_pretrained(path / "model")
    model.decoder, model.lm_head = hf.model.decoder, hf.lm_head
    text = prepare_text(make_run(other).data, text_cache_folder())
    expected = measure_perplexity(model, PackedSequences(text.validation, 16, keep_partial=True), 8)
    assert found.to_dict() == pytest.approx(expected.to_dict())
    assert found.perplexity == pytest.approx(math.exp(found.loss))


def test_a_model_folder_alone_is_evaluated_on_a_text_that_is_named(trained, source, tmp_path):
    result, path = trained
    shutil.copytree(path / "model", tmp_path / "copy")
    found = evaluate_language_model(tmp_path / "copy", source=str(source), device="cpu")
    assert found.bytes > 0
    assert 0 < found.loss < 2 * result["validation"]["loss"]


def test_a_text_that_has_changed_since_the_run_is_not_evaluated(trained, source):
    _, path = trained
    write_text(source, make_documents(seed=5))
    with pytest.raises(DataError, match=r"is no longer what .*run was trained on; name a text with --source"):
        evaluate_language_model(path, device="cpu")
    evaluate_language_model(path, source=str(source), device="cpu")


def test_a_model_without_a_tokenizer_is_not_evaluated(trained):
    _, path = trained
    (path / "model" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="has no tokenizer"):
        evaluate_language_model(path, device="cpu")

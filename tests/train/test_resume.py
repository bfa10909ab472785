"""A run that is interrupted gives the numbers of one that is not, bit for bit."""

import json
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from tests.tiny_runs import make_documents, make_run, prepare
from twofold.data import PackedSequences
from twofold.models import LanguageModel, next_token_loss
from twofold.records import RunFolder
from twofold.spec import RunFolderError
from twofold.train import load_checkpoint, make_optimizer, save_checkpoint, text_task, train

# Somebody may commit to the checkout that these tests run in.
pytestmark = pytest.mark.filterwarnings("ignore:.*is resumed under another code or environment")

STEPS = 11
SETTINGS = {
    "model": {"hidden_dropout": 0.2, "attention_dropout": 0.1, "sharing": "tied-kv"},
    "steps": STEPS,
    "batch_size": 4,
    "gradient_accumulation": 2,
    "checkpoint_every": 4,
    "evaluate_every": 3,
    "log_every": 3,  # so that a checkpoint falls between two lines of the log
}


class Killed(BaseException):
    """What ends the process: nothing may catch it."""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("text"), make_documents())


def attempt(path, text, kill=(None, None), **changes):
    """Trains in a folder, from its checkpoint if it has one, until `kill` says so: where, and at which step."""
    config = make_run("unread.txt", **{**SETTINGS, **changes})
    folder = RunFolder.create(path, config, text.data_sha256)
    torch.manual_seed(config.train.seed)
    module = LanguageModel(config.model)
    torch.manual_seed(hash(kill) % 2**31)  # what happened before must not matter
    where, last_step = kill

    def end(place, step):
        if (place, step) == (where, last_step):
            raise Killed

    def evaluate(module):
        torch.rand(1)  # a validation that draws numbers
        batch = validation.batch(range(len(validation)))
        loss, count = next_token_loss(module, **batch)
        end("evaluate", current[0])
        return {"validation_loss": loss.item() / count}

    def save(module, directory):
        save_file({name: p.detach().clone() for name, p in module.named_parameters()}, directory / "w.safetensors")
        end("save", STEPS)

    current = [0]
    training = PackedSequences(text.train, config.data.sequence_length)
    validation = PackedSequences(text.validation, config.data.sequence_length, keep_partial=True)
    task = text_task(module, training, config.train, evaluate=evaluate, save_model=save)

    def batches(step):
        current[0] = step + 1
        end("batches", step + 1)
        return task.batches(step)

    def report(row):
        end("report", row["step"])

    accelerator = Accelerator(cpu=True)
    with folder.writing():
        result = train(replace(task, batches=batches), config.train, folder, accelerator=accelerator, report=report)
    return result, folder


def without_times(rows):
    return [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in rows]


@pytest.fixture(scope="module")
def unbroken(text, tmp_path_factory):
    return attempt(tmp_path_factory.mktemp("unbroken") / "run", text)


def assert_same(found, expected):
    (result, folder), (expected_result, expected_folder) = found, expected
    weights = load_file(folder.model_path / "w.safetensors")
    for name, weight in load_file(expected_folder.model_path / "w.safetensors").items():
        assert torch.equal(weights[name], weight), name
    assert without_times(folder.metrics()) == without_times(expected_folder.metrics())
    for name in ("targets", "validation_loss"):
        assert result[name] == expected_result[name]


@pytest.mark.parametrize(
    "kills",
    [
        [("batches", 3)],  # before the first checkpoint: nothing of it may remain
        [("report", 3)],
        [("batches", 5)],  # right after a checkpoint
        [("batches", 7)],  # between checkpoints
        [("report", 6)],
        [("evaluate", 6)],
        [("batches", 11), ("report", 9), ("save", STEPS)],
        [("batches", 2), ("batches", 6), ("batches", 6), ("batches", 10), ("evaluate", 11)],
    ],
    ids=str,
)
def test_resuming_equals_not_stopping(kills, text, unbroken, tmp_path):
    for kill in kills:
        with pytest.raises(Killed):
            attempt(tmp_path / "run", text, kill)
    assert_same(attempt(tmp_path / "run", text), unbroken)


def test_a_checkpoint_that_was_being_written_does_not_count(text, unbroken, tmp_path, monkeypatch):
    def save_and_die(directory, module, optimizer, state):
        save_checkpoint(directory, module, optimizer, {**state, "targets": -1})
        if state["step"] == 8:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("twofold.train.loop.save_checkpoint", save_and_die)
        with pytest.raises(Killed):
            attempt(tmp_path / "run", text, checkpoint_every=8, evaluate_every=3)
    assert RunFolder.open(tmp_path / "run").checkpoint_path is None
    result, folder = attempt(tmp_path / "run", text, checkpoint_every=8)
    assert_same((result, folder), unbroken)


def test_dropout_and_accumulation_were_really_on(text, unbroken, tmp_path):
    """Otherwise the tests above would not notice a random state that is lost."""
    without = attempt(tmp_path / "run", text, model={"sharing": "tied-kv"})
    assert without[0]["validation_loss"] != unbroken[0]["validation_loss"]


@pytest.fixture
def stopped(text, tmp_path):
    """A run that was stopped between two checkpoints."""
    with pytest.raises(Killed):
        attempt(tmp_path / "run", text, ("batches", 7))
    return RunFolder.open(tmp_path / "run")


def test_a_checkpoint_is_safetensors_and_json(stopped):
    assert {path.name for path in stopped.checkpoint_path.iterdir()} == {"state.safetensors", "state.json"}
    state = json.loads((stopped.checkpoint_path / "state.json").read_text(encoding="utf-8"))
    assert state["step"] == 4
    with safe_open(stopped.checkpoint_path / "state.safetensors", "pt") as tensors:
        names = set(tensors.keys())
    assert {"random.cpu", "weight.decoder.embed_tokens.weight", "optimizer.exp_avg.decoder.norm.bias"} <= names


def damage(path, how):
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "missing":
        path.unlink()
    else:
        path.write_text(how, encoding="utf-8")


@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
@pytest.mark.parametrize("how", ["cut", "empty", "missing", "{}", "[1]"])
def test_a_damaged_checkpoint_is_refused_in_one_line(name, how, stopped, text):
    damage(stopped.checkpoint_path / name, how)
    with pytest.raises(RunFolderError, match=r"is no checkpoint of this run.*remove it to start again") as caught:
        attempt(stopped.path, text)
    assert "\n" not in str(caught.value)
    assert str(stopped.path) in str(caught.value)
    assert stopped.error()["type"] == "RunFolderError"


@pytest.mark.parametrize("lost", ["random.cpu", "weight.decoder.norm.bias", "optimizer.exp_avg.decoder.norm.bias"])
def test_a_checkpoint_that_lacks_a_tensor_is_refused(lost, stopped, text):
    path = stopped.checkpoint_path / "state.safetensors"
    tensors = load_file(path)
    del tensors[lost]
    save_file(tensors, path)
    with pytest.raises(RunFolderError, match="is no checkpoint of this run"):
        attempt(stopped.path, text)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    small, large = nn.Linear(2, 2), nn.Linear(3, 3)
    save_checkpoint(tmp_path, small, trained_optimizer(small), {"step": 1})
    with pytest.raises(RunFolderError, match="is no checkpoint of this run"):
        load_checkpoint(tmp_path, large, make_optimizer(large, make_run("unread.txt").train))


def trained_optimizer(module):
    optimizer = make_optimizer(module, make_run("unread.txt").train)
    module(torch.ones(1, module.in_features)).sum().backward()
    optimizer.step()
    return optimizer


def test_frozen_parameters_survive_a_checkpoint(tmp_path):
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    for each in (module, other):
        each.bias.requires_grad_(False)
    save_checkpoint(tmp_path, module, trained_optimizer(module), {"step": 1})
    optimizer = make_optimizer(other, make_run("unread.txt").train)
    load_checkpoint(tmp_path, other, optimizer)
    assert torch.equal(other.bias, module.bias)
    assert set(optimizer.state[other.weight]) == {"step", "exp_avg", "exp_avg_sq"}
    other(torch.ones(1, 2)).sum().backward()
    optimizer.step()

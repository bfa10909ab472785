"""The loop on a toy model: what it computes, what it writes, how it fails."""

import json
import math
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.tiny_runs import make_run
from twofold.records import RunFolder
from twofold.spec import TwofoldError
from twofold.train import Task, TrainingError, learning_rate, train

ROW = {"step", "loss", "learning_rate", "tokens_per_second"}


def make_task(num_parts=1, batches=None, spoil_step=None, spoil=math.nan):
    """Linear regression in float64; a step's batch is always the same 12 rows, cut into unequal parts."""
    torch.manual_seed(0)
    module = nn.Linear(3, 1).double()
    inputs, targets = torch.randn(12, 3).double(), torch.randn(12, 1).double()
    sizes = {1: [12], 4: [1, 6, 2, 3]}[num_parts]
    step_now = 0

    def parts_of(step):
        nonlocal step_now
        step_now = step
        return list(zip(inputs.split(sizes), targets.split(sizes), strict=True))

    def loss(module, part):
        total = ((module(part[0]) - part[1]) ** 2).sum()
        return total * (spoil if step_now == spoil_step else 1.0), len(part[0])

    def save(module, directory):
        (directory / "weights.txt").write_text(str(module.weight.tolist()), encoding="utf-8")

    return Task(
        module=module,
        batches=batches or parts_of,
        loss=loss,
        evaluate=lambda module: {"validation_loss": float(((module(inputs) - targets) ** 2).mean())},
        save_model=save,
    )


def run(tmp_path, task, **settings):
    config = make_run("unread.txt", **settings)
    folder = RunFolder.create(tmp_path / "run", config, "data")
    with folder.writing():
        return train(task, config.train, folder, accelerator=Accelerator(cpu=True)), folder


@pytest.fixture
def gradients():
    """The gradients that every optimiser step uses."""
    seen = []
    handle = register_optimizer_step_pre_hook(
        lambda optimizer, *_: seen.append([p.grad.clone() for g in optimizer.param_groups for p in g["params"]])
    )
    yield seen
    handle.remove()


@pytest.mark.parametrize("num_parts", [1, 4])
def test_the_gradient_is_that_of_the_mean_over_all_targets(num_parts, tmp_path, gradients):
    expected_task = make_task()
    ((inputs, targets),) = expected_task.batches(0)
    mean = ((expected_task.module(inputs) - targets) ** 2).mean()
    expected = torch.autograd.grad(mean, list(expected_task.module.parameters()))
    run(tmp_path, make_task(num_parts), steps=1, max_grad_norm=0)
    torch.testing.assert_close(gradients[0], list(expected), rtol=1e-12, atol=1e-12)


def test_accumulation_changes_no_weight(tmp_path):
    whole, parts = make_task(1), make_task(4)
    run(tmp_path / "whole", whole, steps=20)
    run(tmp_path / "parts", parts, steps=20)
    torch.testing.assert_close(whole.module.weight, parts.module.weight, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(whole.module.weight, make_task().module.weight)


def test_gradients_are_clipped_to_the_norm(tmp_path, gradients):
    run(tmp_path, make_task(), steps=1, max_grad_norm=0.01)
    assert torch.cat([g.flatten() for g in gradients[0]]).norm().item() == pytest.approx(0.01, rel=1e-4)


def test_rows_have_the_documented_keys_and_rhythm(tmp_path):
    rows = []
    config = make_run("unread.txt", steps=7, log_every=3, evaluate_every=2)
    folder = RunFolder.create(tmp_path / "run", config, "data")
    result = train(make_task(), config.train, folder, accelerator=Accelerator(cpu=True), report=rows.append)
    assert rows == folder.metrics()
    losses = [row for row in rows if "loss" in row]
    validations = [row for row in rows if "loss" not in row]
    assert [row["step"] for row in losses] == [3, 6, 7]
    assert all(set(row) == ROW for row in losses)
    assert [row["step"] for row in validations] == [2, 4, 6, 7]
    assert all(set(row) == {"step", "validation_loss"} for row in validations)
    assert [row["learning_rate"] for row in losses] == [learning_rate(step - 1, config.train) for step in (3, 6, 7)]
    assert set(result) == {"targets", "seconds", "validation_loss"}
    assert result["targets"] == 7 * 12
    assert result["validation_loss"] == validations[-1]["validation_loss"]


def test_a_logged_loss_is_the_mean_since_the_last_one(tmp_path):
    _, every = run(tmp_path / "every", make_task(4), steps=6, log_every=1)
    _, third = run(tmp_path / "third", make_task(4), steps=6, log_every=3)
    losses = [row["loss"] for row in every.metrics() if "loss" in row]
    expected = [sum(losses[:3]) / 3, sum(losses[3:]) / 3]
    assert [row["loss"] for row in third.metrics() if "loss" in row] == pytest.approx(expected)


def test_validation_sees_evaluation_mode_and_no_gradients(tmp_path):
    modes = []

    def evaluate(module):
        modes.append((module.training, torch.is_grad_enabled()))
        return {"validation_loss": 0.0}

    task = make_task()
    trained = []
    loss = task.loss
    watched = replace(
        task, evaluate=evaluate, loss=lambda module, part: (trained.append(module.training), loss(module, part))[1]
    )
    run(tmp_path, watched, steps=4, evaluate_every=2)
    assert modes == [(False, False)] * 2
    assert trained == [True] * 4


def test_weights_that_are_no_numbers_are_found_by_the_validation(tmp_path):
    task = replace(make_task(), evaluate=lambda _: {"validation_loss": math.nan})
    with pytest.raises(TrainingError, match="the validation loss is nan at step 3"):
        run(tmp_path, task, steps=3)
    folder = RunFolder.open(tmp_path / "run")
    assert folder.metrics()[-1] == {"step": 3, "validation_loss": None}
    assert folder.error()["type"] == "TrainingError"
    assert not folder.model_path.exists()


@pytest.mark.parametrize(("spoil", "shown"), [(math.nan, "nan"), (math.inf, "inf")])
def test_a_loss_that_is_no_number_ends_the_run_and_is_recorded(spoil, shown, tmp_path):
    with pytest.raises(TrainingError, match=f"loss is {shown} at step 4; .*lower train.learning_rate"):
        run(tmp_path, make_task(spoil_step=3, spoil=spoil), steps=8, checkpoint_every=2)
    folder = RunFolder.open(tmp_path / "run")
    error = folder.error()
    assert error["type"] == "TrainingError"
    assert "step 4" in error["message"]
    assert "Traceback" in error["traceback"]
    assert not folder.is_finished
    assert not folder.model_path.exists()
    assert [row["step"] for row in folder.metrics()] == [1, 2, 3]
    assert issubclass(TrainingError, TwofoldError)


def test_any_failure_is_recorded_and_a_later_success_clears_it(tmp_path):
    def fail(_):
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk"):
        run(tmp_path, make_task(batches=fail))
    assert RunFolder.open(tmp_path / "run").error()["message"] == "the disk is gone"
    _, folder = run(tmp_path, make_task())
    assert folder.error() is not None  # until the caller says that the run is finished
    folder.write_result({})
    assert folder.error() is None


def test_an_interruption_is_no_failure(tmp_path):
    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, make_task(batches=interrupt))
    assert RunFolder.open(tmp_path / "run").error() is None


def test_the_model_is_saved_when_training_ends(tmp_path):
    task = make_task()
    _, folder = run(tmp_path, task)
    assert json.loads((folder.model_path / "weights.txt").read_text()) == task.module.weight.tolist()


def test_several_processes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    with pytest.raises(TrainingError, match="several processes"):
        run(tmp_path, make_task())

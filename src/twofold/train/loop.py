"""The one training loop."""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from twofold.records import RunFolder
from twofold.spec import TrainConfig, TwofoldError
from twofold.train.checkpoint import load_checkpoint, save_checkpoint
from twofold.train.schedule import learning_rate, make_optimizer

Batch = TypeVar("Batch")


class TrainingError(TwofoldError):
    """A run that cannot go on."""


@dataclass(frozen=True, kw_only=True)
class Task(Generic[Batch]):
    """What the loop trains: it knows nothing else of models and data."""

    module: nn.Module
    """The model, its weights initialised."""
    batches: Callable[[int], Sequence[Batch]]
    """The parts of a step's batch, a pure function of the step (from zero): nothing to save for resuming."""
    loss: Callable[[nn.Module, Batch], tuple[Tensor, int]]
    """Sum of the losses of one part, and the number of targets in it."""
    evaluate: Callable[[nn.Module], dict[str, float]]
    """Figures of the validation, by name; runs without gradients and in evaluation mode."""
    save_model: Callable[[nn.Module, Path], None]
    """Writes the model into an empty directory, for use outside the run."""


def train(
    task: Task[Batch],
    config: TrainConfig,
    folder: RunFolder,
    *,
    accelerator: Accelerator | None = None,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, float]:
    """Trains until the last step, from the folder's checkpoint where there is one, and leaves the model in the folder.

    A resumed run gives the same losses and weights as one that was never stopped. Call it within `folder.writing`.

    Args:
        task: What to train.
        config: Optimiser, schedule and rhythm.
        folder: Where metrics, checkpoints and the model go. The result is the caller's to write.
        accelerator: Devices and processes; by default this process on the best device that it has.
        report: Called with every row that goes to metrics.jsonl.

    Returns:
        `targets`, the number of targets trained on, `seconds`, the time spent in steps, and the last validation.

    Raises:
        TrainingError: when the loss or a figure of the validation is no longer a number.
    """
    return _Loop(task, config, folder, accelerator or Accelerator(), report).run()


class _Loop(Generic[Batch]):
    """One run of the loop; `state` is what a checkpoint holds beside tensors."""

    def __init__(
        self,
        task: Task[Batch],
        config: TrainConfig,
        folder: RunFolder,
        accelerator: Accelerator,
        report: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        self.task, self.config, self.folder, self.accelerator, self.report = task, config, folder, accelerator, report
        if accelerator.num_processes > 1:
            raise TrainingError("training on several processes is not supported yet; start one process")
        torch.manual_seed(config.seed)
        self.optimizer = make_optimizer(task.module, config)
        self.state: dict[str, Any] = {"step": 0, "targets": 0, "seconds": 0.0}
        self._start_window()
        self.validation: dict[str, float] = {}

    def run(self) -> dict[str, float]:
        module = self.task.module.to(self.accelerator.device)
        if self.folder.checkpoint_path is not None:
            self.state = load_checkpoint(self.folder.checkpoint_path, module, self.optimizer, self.state.keys())
        self.folder.truncate_metrics(self.state["step"])
        wrapped, self.optimizer = self.accelerator.prepare(module, self.optimizer)
        wrapped.train()
        while self.state["step"] < self.config.steps:
            self._step(wrapped)
            step, is_last = self.state["step"], self.state["step"] == self.config.steps
            if is_last or step % self.config.log_every == 0:
                self._log_window()
            if is_last or step % self.config.evaluate_every == 0:
                self._validate(module)
            if not is_last and step % self.config.checkpoint_every == 0:
                with self.folder.replacing_directory("checkpoint") as directory:
                    save_checkpoint(directory, module, self.optimizer, self.state)
        with self.folder.replacing_directory("model") as directory:
            self.task.save_model(module, directory)
        return {"targets": float(self.state["targets"]), "seconds": self.state["seconds"], **self.validation}

    def _step(self, module: nn.Module) -> None:
        started = time.perf_counter()
        step = self.state["step"]
        self.rate = learning_rate(step, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        parts = self.task.batches(step)
        loss_sum, num_targets = 0.0, 0
        for part in parts:
            with self._autocast():
                loss, targets = self.task.loss(module, part)
            self.accelerator.backward(loss)
            loss_sum += loss.item()
            num_targets += targets
        _check_finite("loss", loss_sum, step + 1)
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(max(1, num_targets))  # every target of the batch weighs the same
        if self.config.max_grad_norm > 0:
            self.accelerator.clip_grad_norm_(module.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - started
        self.state["step"] += 1
        for name, value in (("targets", num_targets), ("seconds", seconds)):
            self.state[name] += value
        for name, value in (("loss", loss_sum), ("targets", num_targets), ("seconds", seconds)):
            self.state["window"][name] += value

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.config.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.accelerator.device.type, dtype=torch.bfloat16)

    def _validate(self, module: nn.Module) -> None:
        module.eval()
        with torch.no_grad():
            self.validation = self.task.evaluate(module)
        module.train()
        self._write({"step": self.state["step"], **self.validation})
        for name, value in self.validation.items():
            _check_finite(name.replace("_", " "), value, self.state["step"])

    def _log_window(self) -> None:
        window = self.state["window"]
        row = {
            "step": self.state["step"],
            "loss": window["loss"] / max(1, window["targets"]),
            "learning_rate": self.rate,
            "tokens_per_second": window["targets"] / max(window["seconds"], 1e-9),
        }
        self._write(row)
        self._start_window()

    def _start_window(self) -> None:
        self.state["window"] = {"loss": 0.0, "targets": 0, "seconds": 0.0}

    def _write(self, row: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            self.folder.append_metrics(row)
            if self.report is not None:
                self.report(row)


def _check_finite(name: str, value: float, step: int) -> None:
    if not math.isfinite(value):
        raise TrainingError(f"the {name} is {value} at step {step}; start again with a lower train.learning_rate")

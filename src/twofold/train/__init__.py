"""One training loop for every task: optimiser, schedule, checkpoints, exact resume.

A `Task` says what is trained, `train` trains it in a run folder. Devices and processes are accelerate's business;
evaluation and the format of the saved model come in as functions, so that this room knows neither.
"""

from twofold.train.checkpoint import load_checkpoint, save_checkpoint
from twofold.train.device import make_accelerator, resolve_device, resolve_dtype
from twofold.train.loop import Task, TrainingError, train
from twofold.train.schedule import learning_rate, make_optimizer
from twofold.train.text import text_task

__all__ = [
    "Task",
    "TrainingError",
    "learning_rate",
    "load_checkpoint",
    "make_accelerator",
    "make_optimizer",
    "resolve_device",
    "resolve_dtype",
    "save_checkpoint",
    "text_task",
    "train",
]

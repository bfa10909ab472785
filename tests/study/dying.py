"""What worker processes of the tests run: it must be importable in another process."""

import os
import signal
import time

from twofold.study import train_language_model


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def train_or_die(config, output, *, device):
    """Trains; but the process of `qkv` dies once, at step 3, and that of `mqa` whenever it begins to train."""
    mark = output.with_name(f"{output.name}.died")

    def report(row):
        if output.name == "mqa" or (output.name == "qkv" and row["step"] == 3 and not mark.exists()):
            mark.touch()
            die()

    return train_language_model(config, output, device=device, report=report)


def sleep(started):
    started.touch()
    time.sleep(60)

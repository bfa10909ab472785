"""Which device a run uses."""

import torch
from accelerate import Accelerator

from twofold.cost import check_dtype
from twofold.spec import ConfigError


def resolve_device(name: str | None = None) -> torch.device:
    """The device that a user names, or the best one of this machine.

    Args:
        name: `cuda`, `mps` or `cpu`; None for the first of them that this machine has.

    Raises:
        ConfigError: for a device that this machine does not have.
    """
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    names = [device for device, is_present in present.items() if is_present]
    if name is not None and name not in names:
        raise ConfigError(f"device '{name}' is none of this machine's: {', '.join(names)}")
    return torch.device(name or names[0])


def resolve_dtype(name: str | None = None) -> torch.dtype | None:
    """The type of weights and arithmetic that a user names; None for None, which leaves weights as they are.

    Args:
        name: `float32`, `bfloat16` or `float16`.

    Raises:
        ConfigError: for another name.
    """
    if name is None:
        return None
    check_dtype(name)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def make_accelerator(device: torch.device) -> Accelerator:
    """Accelerate on a device of `resolve_device`.

    Raises:
        ConfigError: where this process has trained on another device, because accelerate keeps the first.
    """
    try:
        accelerator = Accelerator(cpu=device.type == "cpu")
        used = accelerator.device.type
    except ValueError:
        used = "another device"
    if used != device.type:
        raise ConfigError(f"this process has trained on {used} before; start another one to train on {device.type}")
    return accelerator

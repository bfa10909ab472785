"""The state of an interrupted run, in safetensors and JSON; no pickle."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from twofold.spec import RunFolderError

_TENSORS, _STATE = "state.safetensors", "state.json"


def save_checkpoint(
    directory: Path, module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Writes weights, optimiser moments, random state and the loop's own state.

    Args:
        directory: An empty directory.
        module: The unwrapped model.
        optimizer: Its optimiser.
        state: What else the loop needs, as JSON; floats keep every bit.
    """
    tensors = {f"weight.{name}": parameter.detach() for name, parameter in module.named_parameters()}
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{key}.{name}"] = value.detach()
    tensors["random.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, directory / _TENSORS)
    (directory / _STATE).write_text(json.dumps(state), encoding="utf-8")


def load_checkpoint(
    directory: Path, module: nn.Module, optimizer: torch.optim.Optimizer, names: Collection[str] = ()
) -> dict[str, Any]:
    """Restores what `save_checkpoint` wrote and returns the loop's state.

    Args:
        directory: The checkpoint.
        module: The model that it is read into.
        optimizer: Its optimiser.
        names: What the loop's state must hold.

    Raises:
        RunFolderError: for a checkpoint that is damaged or of another model.
    """
    try:
        tensors = load_file(directory / _TENSORS)
        state = json.loads((directory / _STATE).read_text(encoding="utf-8"))
        if not isinstance(state, dict) or not state.keys() >= set(names):
            raise ValueError(f"{_STATE} must hold {', '.join(names)}")
        random = tensors["random.cpu"]
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(tensors[f"weight.{name}"])
                if parameter.requires_grad:
                    optimizer.state[parameter] = _moments(tensors, name, parameter)
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise RunFolderError(f"{directory} is no checkpoint of this run: {error}; remove it to start again") from None
    torch.set_rng_state(random)
    if "random.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random.cuda"])
    return state


def _moments(tensors: dict[str, Tensor], name: str, parameter: Tensor) -> dict[str, Tensor]:
    return {key: tensors[f"optimizer.{key}.{name}"].to(parameter.device) for key in ("step", "exp_avg", "exp_avg_sq")}

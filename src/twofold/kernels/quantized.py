"""Models whose linear layers have int8 weights: a quarter of the bytes to keep, and to read for each token."""

from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

import torch
from jaxtyping import Float, Int, Int8
from torch import Tensor, nn

from twofold.kernels.linear import Linear, linear
from twofold.spec import ConfigError, did_you_mean

WEIGHTS = ("int8",)
"""What weights can be quantised to."""
_ROWS = 1_024  # that are quantised at once, which bounds the memory

Model = TypeVar("Model", bound=nn.Module)


@torch.no_grad()
def quantize_weights(model: Model) -> Model:
    """Replaces the weights of a model's linear layers by int8, in place, for decoding on the CPU.

    Each output's weights are rounded to multiples of a scale of their own, a 127th of the largest; biases stay as they
    are. An embedding that shares its matrix with a linear layer looks up the same integers; other tables stay too.
    Layers are replaced one by one, and the floats of each are freed at once. Nothing can be trained afterwards, and a
    model of int8 already is left as it is. Layers whose inputs are no multiple of 64 are right, but not fast.

    Args:
        model: A model in evaluation mode, on the CPU. Linear layers of a class of their own are left alone.

    Returns:
        The model that was given.

    Raises:
        ConfigError: for a model that is in training mode, elsewhere than on the CPU, or without linear layers.
    """
    places = _places_by_weight(model)
    if not places:
        if any(isinstance(module, QuantizedLinear) for module in model.modules()):
            return model
        raise ConfigError(f"{type(model).__name__} has no linear layers whose weights could be int8")
    if model.training:
        raise ConfigError("the model is in training mode, and int8 weights cannot be trained; call model.eval() first")
    devices = {parameter.device.type for parameter in model.parameters()} - {"cpu"}
    if devices:
        raise ConfigError(f"int8 weights are for the CPU, and the model is on {devices.pop()}; move it there first")
    model.requires_grad_(False)
    while places:
        _replace(places.pop())
    return model


def check_weights(name: str | None) -> None:
    """Raises `ConfigError`, with the nearest name for a typo, unless weights can be of this kind."""
    if name is not None and name not in WEIGHTS:
        raise ConfigError(
            f"weights of '{name}' are unknown{did_you_mean(name, WEIGHTS)} "
            f"Use {' or '.join(WEIGHTS)}, or leave it out for what the model was saved in"
        )


class _QuantizedRows(nn.Module):
    """A matrix of int8 and a factor for each of its rows."""

    weight: Int8[Tensor, "O I"]
    scale: Float[Tensor, "O"]

    def __init__(self, weight: Int8[Tensor, "O I"], scale: Float[Tensor, "O"]) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "_QuantizedRows":
        """Moves the module; a change of dtype is for what it computes, and its scales stay float32."""
        scale = self.scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.scale.dtype != scale.dtype:
            self.scale = scale.to(self.scale.device)
        return self


class QuantizedLinear(_QuantizedRows):
    """A linear layer with int8 weights, for inference; made by `quantize_weights`."""

    bias: nn.Parameter | None

    def __init__(self, weight: Int8[Tensor, "O I"], scale: Float[Tensor, "O"], bias: nn.Parameter | None) -> None:
        super().__init__(weight, scale)
        self.register_parameter("bias", bias)
        self.out_features, self.in_features = weight.shape

    def forward(self, input: Float[Tensor, "*n I"]) -> Float[Tensor, "*n O"]:
        """The input times the weights, plus the bias."""
        return linear(input, self.weight, self.bias, self.scale)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, int8"


class QuantizedEmbedding(_QuantizedRows):
    """A table of int8 rows, that of a `QuantizedLinear`; made by `quantize_weights`."""

    def __init__(self, weight: Int8[Tensor, "V C"], scale: Float[Tensor, "V"], dtype: torch.dtype) -> None:
        super().__init__(weight, scale)
        self.dtype = dtype
        """Of what is looked up."""

    def forward(self, input: Int[Tensor, "*n"]) -> Float[Tensor, "*n C"]:
        """The rows of some tokens."""
        return (self.weight[input] * self.scale[input][..., None]).to(self.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "_QuantizedRows":
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{', '.join(map(str, self.weight.shape))}, int8"


def quantize_rows(weight: Float[Tensor, "O I"]) -> tuple[Int8[Tensor, "O I"], Float[Tensor, "O"]]:
    """Rows as int8, and a scale for each: a row's largest magnitude over 127, or NaN where that is not finite."""
    codes, scale = torch.empty_like(weight, dtype=torch.int8), weight.new_empty(len(weight), dtype=torch.float32)
    for rows, to_codes, to_scale in zip(weight.split(_ROWS), codes.split(_ROWS), scale.split(_ROWS), strict=True):
        wide = rows.float()
        largest = wide.abs().amax(dim=1) / 127
        to_scale.copy_(torch.where(largest.isfinite(), largest, torch.nan))
        quotients = wide / torch.where(to_scale == 0, 1, to_scale)[:, None]
        to_codes.copy_(quotients.nan_to_num(0).round().clamp(-127, 127))  # tiny rows have coarse scales
    return codes, scale


_Place = tuple[nn.Module, str]


def _places_by_weight(model: nn.Module) -> list[list[_Place]]:
    """Where the linear layers are, as parents and names; those that share a matrix together, with its embedding."""
    places: dict[int, list[_Place]] = defaultdict(list)
    linears = set()
    for parent in model.modules():
        for name, module in parent._modules.items():
            if type(module) in (nn.Linear, Linear, nn.Embedding):
                assert module is not None
                places[id(module.weight)].append((parent, name))
                if type(module) is not nn.Embedding:
                    linears.add(id(module.weight))
    return [found for weight, found in places.items() if weight in linears]


def _replace(places: list[_Place]) -> None:
    """Gives the modules at these places int8 weights, which they share as they did their floats."""
    weight = getattr(*places[0]).weight
    codes, scale = quantize_rows(weight.detach())
    for parent, name in places:
        module = getattr(parent, name)
        if isinstance(module, nn.Embedding):
            setattr(parent, name, QuantizedEmbedding(codes, scale, weight.dtype))
        else:
            setattr(parent, name, QuantizedLinear(codes, scale, module.bias))

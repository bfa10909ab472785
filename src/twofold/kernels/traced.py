"""The compiled kernel as an operator of torch's, which torch.compile leaves whole in its graphs."""

from typing import Any

import torch
from torch import Tensor

from twofold.kernels import native, sdpa
from twofold.kernels.key_value import KeyValue, Rotation
from twofold.kernels.mask import Mask


def attend(query: Tensor, stored: KeyValue, mask: Mask, scale: float) -> Tensor:
    """What `native.attend` gives, for where torch.compile traces; elsewhere a call costs more than that one.

    Whether there is a library is found out when the graph runs: nothing can be loaded while it is traced.
    """
    tensors, options = arguments(query, stored, mask, scale)
    output: Tensor = decode_attention(*tensors, **options)
    return output


def arguments(
    query: Tensor, stored: KeyValue, mask: Mask, scale: float
) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """The operator takes tensors and numbers only; a value that is the key is None there, for none may come twice."""
    rotation = stored.rotation
    tensors = (
        query,
        stored.key,
        None if stored.tied else stored.value,
        stored.key_scale,
        None if stored.tied else stored.value_scale,
        stored.rope_key,
        stored.rope_scale,
        None if rotation is None else rotation.positions,
        None if rotation is None else rotation.frequencies,
        None if rotation is None else rotation.weight,
        mask.first,
        mask.last,
    )
    return tensors, {"is_causal": mask.is_causal, "scale": scale}


@torch.library.custom_op("twofold::decode_attention", mutates_args=())
def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    rope_key: Tensor | None,
    rope_scale: Tensor | None,
    positions: Tensor | None,
    frequencies: Tensor | None,
    weight: Tensor | None,
    first: Tensor | None,
    last: Tensor | None,
    *,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """The fields of `KeyValue`, its rotation and `Mask`, made into these again."""
    if value is None:
        value, value_scale = key, key_scale
    rotation = None if positions is None or frequencies is None else Rotation(positions, frequencies, weight)
    stored = KeyValue(key, value, key_scale, value_scale, rope_key, rope_scale, rotation)
    mask = Mask(first=first, last=last, is_causal=is_causal, num_keys=key.shape[2])
    if native.load_library() is None:
        return sdpa.attend(query, stored, mask=mask, scale=scale).contiguous()
    return native.attend(query, stored, mask, scale)


@decode_attention.register_fake
def _(query: Tensor, key: Tensor, *_: Tensor | None, **__: object) -> Tensor:
    width = key.shape[3] * (2 if key.dtype == torch.uint8 else 1)
    return query.new_empty(*query.shape[:3], width)

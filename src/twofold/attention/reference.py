"""The slow reference: the semantics written out, for any float dtype, to which every fast path is compared.

Nothing here is shared with the layer but its weights. Rotations are complex numbers, heads are repeated, the score
map's tensor is built in full and nothing is folded.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from twofold.spec import ModelConfig


def reference_attention(
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    layer: int,
    x: Float[Tensor, "B T C"],
    positions: Int[Tensor, "B T"],
    visible: Bool[Tensor, "B T T"],
) -> Float[Tensor, "B T C"]:
    """Self-attention over whole sequences, as the semantics define it.

    Args:
        weights: The layer's state, under the names of `Attention`.
        config: The model's description.
        layer: The layer's number, counted from zero.
        x: Hidden states, in the dtype to compute in; float64 for a reference.
        positions: Position of each token.
        visible: Which keys each query sees; every query must see one.
    """
    scores, values = _scores_and_values(weights, config, layer, x, positions)
    if config.score_map != "none":
        w = weights["score_map.weight"].to(x.dtype)
        channels = scores[..., None] + _score_map_tensor(config.score_map, positions.to(x.dtype))[:, None]
        scores = torch.einsum("bhijc,c->bhij", channels, w)
    probabilities = scores.masked_fill(~visible[:, None], float("-inf")).softmax(dim=-1)
    output = torch.einsum("bhij,bhijd->bihd", probabilities, values)
    return _linear(weights, "o_proj", output.flatten(2))


def reference_scores(
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    layer: int,
    x: Float[Tensor, "B T C"],
    positions: Int[Tensor, "B T"],
) -> Float[Tensor, "B H T T"]:
    """The scaled score map before score map mixing and masks."""
    return _scores_and_values(weights, config, layer, x, positions)[0]


def _scores_and_values(
    weights: Mapping[str, Tensor], config: ModelConfig, layer: int, x: Tensor, positions: Tensor
) -> tuple[Float[Tensor, "B H T T"], Float[Tensor, "B H T T D"]]:
    """Scores of query i and key j, and the value that query i sees at j."""
    assert config.head_dim is not None
    sharing, mode, width = config.layer_sharing(layer), config.layer_rope_mode(layer), config.head_dim
    heads, groups = config.num_attention_heads, config.layer_num_key_value_heads(layer)

    if config.query_depth == 2:
        query = _linear(weights, "q_b_proj", _linear(weights, "q_a_proj", x))
    else:
        query = _linear(weights, "q_proj", x)
    key = query if sharing.ties_query_key else _linear(weights, "k_proj", x)
    value = key if sharing.ties_key_value else _linear(weights, "v_proj", x)
    if mode == "decoupled":
        normed = _rms_norm(key, config.norm_eps) * weights["kv_norm.weight"].to(x.dtype)
        query, key, value = normed if sharing.ties_query_key else query, normed, normed
    query = query.unflatten(-1, (heads, width))  # (B, T, H, D)
    key, value = (t.unflatten(-1, (groups, width)) for t in (key, value))  # (B, S, G, D)

    if config.qk_norm:
        key_scale = weights["k_norm"].to(x.dtype)
        if mode == "relative":
            key_scale = torch.cat((key_scale, key_scale))
        query_scale = key_scale if sharing.ties_query_key else weights["q_norm"].to(x.dtype)
        if sharing.ties_key_value:
            value = _rms_norm(value, config.norm_eps)
        query = _rms_norm(query, config.norm_eps) * query_scale
        key = _rms_norm(key, config.norm_eps) * key_scale

    key, value = (t.repeat_interleave(heads // groups, dim=2) for t in (key, value))  # (B, S, H, D)
    values = value.transpose(1, 2)[:, :, None].expand(-1, -1, x.shape[1], -1, -1)  # (B, H, T, S, D)
    if config.positions == "rope" and mode != "decoupled":
        query, key = (_turn(t, positions, config.rope_theta) for t in (query, key))
        if mode == "relative":
            distance = positions[:, None, :] - positions[:, :, None]  # (B, T, S): j - i
            values = _turn(values.permute(0, 2, 3, 1, 4), distance, config.rope_theta).permute(0, 3, 1, 2, 4)
    scores = torch.einsum("bihd,bjhd->bhij", query, key)
    score_width = width
    if mode == "decoupled":
        rope_width = config.qk_rope_head_dim or 0
        query_rope = _linear(weights, "q_rope_proj", x).unflatten(-1, (heads, rope_width))
        key_rope = _linear(weights, "k_rope_proj", x)[:, :, None]
        query_rope, key_rope = (_turn(t, positions, config.rope_theta) for t in (query_rope, key_rope))
        scores = scores + torch.einsum("bihd,bjd->bhij", query_rope, key_rope[:, :, 0])
        score_width += rope_width
    scale = config.attention_scale if config.attention_scale is not None else score_width**-0.5
    return scores * scale, values


def _score_map_tensor(kind: str, positions: Float[Tensor, "B T"]) -> Float[Tensor, "B T T m"]:
    """The fixed tensor P of the score map, one channel after another."""
    rows, columns = torch.broadcast_tensors(positions[:, :, None], positions[:, None, :])
    if kind == "paper":
        frequencies = [10_000 ** (-2 * c / 5) for c in range(3)]
        waves = [[wave(p * f) for f in frequencies for wave in (torch.sin, torch.cos)][:5] for p in (rows, columns)]
        return torch.stack(waves[0] + waves[1], dim=-1)
    products = [
        left(rows * f) * right(columns * f)
        for f in (1.0, 0.1, 0.01)
        for left in (torch.sin, torch.cos)
        for right in (torch.sin, torch.cos)
    ]
    return torch.stack(products, dim=-1)


def _linear(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = torch.einsum("btc,oc->bto", x, weights[f"{name}.weight"].to(x.dtype))
    bias = weights.get(f"{name}.bias")
    return y if bias is None else y + bias.to(x.dtype)


def _rms_norm(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()


def _turn(x: Float[Tensor, "*n heads W"], positions: Int[Tensor, "*n"], theta: float) -> Float[Tensor, "*n heads W"]:
    """R_j x: channels c and c + W/2 as one complex number, times e^(i · position · theta^(-2c / W))."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angles = positions[..., None, None].to(x.dtype) * frequencies
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)

"""Attention in float64, and what caches of every kind hold."""

import math

import torch

# Against float64 on the same, already rounded inputs, half precision adds nothing but the rounding of the output.
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def exact(q, k, v, first, last, scale):
    """Attention written out in float64; a query that sees nothing gets zeros."""
    heads_each = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(heads_each, dim=1) for t in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * scale
    keys = torch.arange(k.shape[2])
    visible = (keys >= first[:, None, :, None]) & (keys < last[:, None, :, None])
    return scores.masked_fill(~visible, -math.inf).softmax(dim=-1).nan_to_num(0) @ v


def make(batch, groups, each, queries, keys, width, dtype, tied, seed=0):
    """Queries, keys and values; keys lie inside a larger tensor, as they do in a cache."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, groups * each, queries, width, generator=generator).to(dtype)
    k = in_cache(torch.randn(batch, groups, keys, width, generator=generator).to(dtype))
    v = k if tied else torch.randn(batch, groups, keys, width, generator=generator).to(dtype)
    return q, k, v


def in_cache(rows):
    """The same rows inside a larger tensor, as they lie in a cache, with rubbish around them."""
    batch, groups, keys, width = rows.shape
    rubbish = math.nan if rows.dtype.is_floating_point else 99
    storage = torch.full((batch, groups, keys + 5, width), rubbish, dtype=rows.dtype)
    storage[:, :, 2 : keys + 2] = rows
    return storage[:, :, 2 : keys + 2]


def store(rows, kind):
    """Rows as a cache of a kind stores them, their scale, and what they stand for in float64."""
    if kind not in ("int8", "int4"):
        stored = in_cache(rows.to(getattr(torch, kind)))
        return stored, None, stored.double()
    largest = 127 if kind == "int8" else 7
    scale = rows.abs().amax(dim=-1, keepdim=True) / largest
    codes = (rows / scale).round()
    if kind == "int8":
        return in_cache(codes.to(torch.int8)), in_cache(scale), codes.double() * scale.double()
    low, high = (codes + 8).to(torch.uint8).chunk(2, dim=-1)
    return in_cache(low + 16 * high), in_cache(scale), codes.double() * scale.double()


def turned(keys, positions, frequencies):
    """Keys rotated by their positions, channels c and c + D/2 as one complex number."""
    low, high = keys.chunk(2, dim=-1)
    angles = positions[:, None, :, None].double() * frequencies.double()
    turned = torch.complex(low, high) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)

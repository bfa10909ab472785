"""What `triton_decode` runs on the GPU. Importing this needs Triton.

`attend_part` is flash-decoding (Dao, Haziza, Massa, Sizov: "Flash-Decoding for long-context inference", 2023): the
context is cut into parts so that one query can keep a whole GPU busy; each part keeps the softmax's running maximum
and sum beside its weighted sum, and `merge_parts` joins the parts. Two things are ours. A block of keys that are the
values too is loaded once and used for both products. And a row is handled as two halves, channels c and c + D/2,
because rotations pair those and a byte of two 4-bit numbers holds those: every format then takes the same path.

What it has to move, which should decide its speed: S · D elements of each key/value head where K = V, twice that over
two tensors, 4 bytes for each scale, and D_r elements of a rope key. Each part also writes and reads back D + 2 floats
for each query: for 16 heads of 64 over 8,192 bfloat16 tokens, in 17 parts as on 132 processors, 144 KB beside 16.8 MB.
The query heads of a key/value head are rows of one matrix product (16 at least, because tensor cores take no fewer), so
that they share what is loaded. All of this is arithmetic: nothing was measured on a GPU, and no block size was tuned.
"""

from typing import no_type_check  # and no wrapping by those who check: Triton reads the source

import triton
import triton.language as tl

_STEPS_PER_RADIAN: tl.constexpr = tl.constexpr(2.0**48 / 6.283185307179586)
_RADIANS: tl.constexpr = tl.constexpr(6.283185307179586 / 2.0**32)


@triton.jit
@no_type_check
def _halves(start, row, stride, inside, WIDTH: tl.constexpr, HALF: tl.constexpr, NIBBLES: tl.constexpr):
    """Channels c and c + WIDTH/2 of stored rows, each (rows, HALF), and zeros for rows that are not `inside`."""
    channel = tl.arange(0, HALF)
    wanted = inside[:, None] & (channel < WIDTH // 2)[None, :]
    place = start + row[:, None] * stride + channel[None, :]
    if NIBBLES:
        both = tl.load(place, mask=wanted, other=0x88)  # two zeros
        low, high = (both & 15).to(tl.int8) - 8, (both >> 4).to(tl.int8) - 8
    else:
        low, high = tl.load(place, mask=wanted, other=0), tl.load(place + WIDTH // 2, mask=wanted, other=0)
    return low, high


@triton.jit
@no_type_check
def _cos_sin(position, step):
    """Cosine and sine of position · step, an integer product in 2^-48 turns, which wraps round as angles do.

    Their Taylor series within an eighth of a turn, where they are exact to float32. The GPU's library would reduce the
    angle once more, for which it keeps a table in memory.
    """
    turned = ((position.to(tl.int64) * step) >> 16).to(tl.int32)
    quarter = (turned + (1 << 29)) >> 30
    x = (turned - (quarter << 30)).to(tl.float32) * _RADIANS
    y = x * x
    sin = x * (1 + y * (-1 / 6 + y * (1 / 120 + y * (-1 / 5040 + y / 362880))))
    cos = 1 + y * (-1 / 2 + y * (1 / 24 + y * (-1 / 720 + y / 40320)))
    is_odd = (quarter & 1) == 1
    cos, sin = tl.where(is_odd, -sin, cos), tl.where(is_odd, cos, sin)
    is_past_half = (quarter & 2) == 2
    return tl.where(is_past_half, -cos, cos), tl.where(is_past_half, -sin, sin)


@triton.jit
@no_type_check
def _rounded(numbers, TYPE: tl.constexpr):
    """Stored numbers, or float32, as a matrix product takes them."""
    return numbers if numbers.dtype == TYPE else numbers.to(tl.float32).to(TYPE)


@triton.jit
@no_type_check
def _scores(query_low, query_high, low, high, TYPE: tl.constexpr):
    """Products of every query with every key, (queries, keys), in float32."""
    low, high = tl.trans(_rounded(low, TYPE)), tl.trans(_rounded(high, TYPE))
    return tl.dot(query_high, high, acc=tl.dot(query_low, low, input_precision="ieee"), input_precision="ieee")


@triton.jit(do_not_specialize=["num_keys"])
@no_type_check
def attend_part(
    output,
    best,
    total,
    query,
    key,
    value,
    key_scale,
    value_scale,
    rope_key,
    rope_scale,
    position,
    frequency,
    weight,
    first,
    last,
    query_stride,
    key_stride,
    value_stride,
    key_scale_stride,
    value_scale_stride,
    rope_stride,
    rope_scale_stride,
    position_stride,
    first_stride,
    last_stride,
    scale,
    num_keys,
    num_groups,
    CAUSAL: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    ROPE_HALF: tl.constexpr,
    NIBBLES: tl.constexpr,
    QUERY_TYPE: tl.constexpr,
    WEIGHT_TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attention of the queries of one key/value head to one part of the keys that they see.

    The grid is (batch · key/value heads, parts, blocks of ROWS queries). Pointers that a call does not need are None.

    Args:
        output: Weighted sums, (B, H, T, parts, D) in float32; or (B, H, T, D), where there is one part, and then what
            follows is None.
        best: Largest score of each part, (B, H, T, parts).
        total: Sum of exp2(score - best), (B, H, T, parts).
        value: None where the keys are the values.
        scale: Factor on q·k, times log2(e), because exp2 is what the hardware has.
        CAUSAL: Query t sees keys 0 to t. Otherwise keys `first` to `last` - 1, or all of them where these are None.
        HEADS: Query heads of a key/value head.
        QUERIES: Queries of a head.
        HALF: A power of two that holds D/2 channels. The same for ROPE_HALF.
        QUERY_TYPE: Type in which queries meet keys.
        WEIGHT_TYPE: Type in which weights meet values.
    """
    batch = (tl.program_id(0) // num_groups).to(tl.int64)
    group = (tl.program_id(0) % num_groups).to(tl.int64)
    part, num_parts = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    is_real = row < HEADS * QUERIES
    head, time = group * HEADS + row // QUERIES, row % QUERIES
    channel = tl.arange(0, HALF)
    is_channel = channel < WIDTH // 2

    if first is not None:
        begin = tl.load(first + batch * first_stride[0] + time * first_stride[1], mask=is_real, other=0).to(tl.int32)
        end = tl.load(last + batch * last_stride[0] + time * last_stride[1], mask=is_real, other=0).to(tl.int32)
    else:
        begin = tl.zeros_like(time)
        end = time + 1 if CAUSAL else begin + num_keys
    sees = is_real & (begin < end)
    begin, end = tl.where(sees, begin, num_keys), tl.where(sees, end, 0)
    start, stop = tl.maximum(tl.min(begin, 0), 0), tl.minimum(tl.max(end, 0), num_keys)
    share = tl.cdiv(tl.cdiv(tl.maximum(stop - start, 0), num_parts), KEYS) * KEYS
    start += part * share
    stop = tl.minimum(start + share, stop)

    query += batch * query_stride[0]
    query_row = head * query_stride[1] + time * query_stride[2]
    query_low, query_high = _halves(query, query_row, 1, is_real, WIDTH, HALF, False)
    query_low, query_high = _rounded(query_low, QUERY_TYPE), _rounded(query_high, QUERY_TYPE)
    key += batch * key_stride[0] + group * key_stride[1]
    if value is not None:
        value += batch * value_stride[0] + group * value_stride[1]
    if key_scale is not None:
        key_scale += batch * key_scale_stride[0] + group * key_scale_stride[1]
        if value_scale is not None:
            value_scale += batch * value_scale_stride[0] + group * value_scale_stride[1]
    if rope_key is not None:
        rope_key += batch * rope_stride[0]
        rope_low, rope_high = _halves(query + WIDTH, query_row, 1, is_real, ROPE_WIDTH, ROPE_HALF, False)
        rope_low, rope_high = _rounded(rope_low, QUERY_TYPE), _rounded(rope_high, QUERY_TYPE)
        if rope_scale is not None:
            rope_scale += batch * rope_scale_stride[0]
    if position is not None:
        position += batch * position_stride[0]
        radians = tl.load(frequency + channel, mask=is_channel, other=0).to(tl.float64)
        step = tl.floor(radians * _STEPS_PER_RADIAN + 0.5).to(tl.int64)
        near_cos, near_sin = _cos_sin(tl.arange(0, KEYS)[:, None], step[None, :])
        if weight is not None:
            weight_low = tl.load(weight + channel, mask=is_channel, other=0).to(tl.float32)
            weight_high = tl.load(weight + WIDTH // 2 + channel, mask=is_channel, other=0).to(tl.float32)

    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    normalizer = tl.zeros((ROWS,), tl.float32)
    sum_low, sum_high = tl.zeros((ROWS, HALF), tl.float32), tl.zeros((ROWS, HALF), tl.float32)
    for block in range(start, stop, KEYS):
        place = block + tl.arange(0, KEYS)
        inside = place < stop
        where = place.to(tl.int64)
        key_low, key_high = _halves(key, where, key_stride[2], inside, WIDTH, HALF, NIBBLES)
        if position is None:
            score = _scores(query_low, query_high, key_low, key_high, QUERY_TYPE)
        else:
            at = tl.load(position + where * position_stride[1], mask=inside, other=0).to(tl.int32)
            base = tl.load(position + block * position_stride[1]).to(tl.int32)
            if tl.max(tl.where(inside & (at - base != place - block), 1, 0), 0) == 0:
                # Neighbours, as nearly always: the angle is the block's plus one of the table made before the loop.
                base_cos, base_sin = _cos_sin(base, step)
                cos = base_cos[None, :] * near_cos - base_sin[None, :] * near_sin
                sin = base_sin[None, :] * near_cos + base_cos[None, :] * near_sin
            else:
                cos, sin = _cos_sin(at[:, None], step[None, :])
            low, high = key_low.to(tl.float32), key_high.to(tl.float32)
            if weight is not None:
                low, high = low * weight_low[None, :], high * weight_high[None, :]
            low, high = low * cos - high * sin, high * cos + low * sin
            score = _scores(query_low, query_high, low, high, QUERY_TYPE)
        if key_scale is not None:
            factor = tl.load(key_scale + where * key_scale_stride[2], mask=inside, other=0)
            score *= factor[None, :]
        if rope_key is not None:
            low, high = _halves(rope_key, where, rope_stride[1], inside, ROPE_WIDTH, ROPE_HALF, NIBBLES)
            further = _scores(rope_low, rope_high, low, high, QUERY_TYPE)
            if rope_scale is not None:
                further *= tl.load(rope_scale + where * rope_scale_stride[1], mask=inside, other=0)[None, :]
            score += further
        is_seen = (place[None, :] >= begin[:, None]) & (place[None, :] < tl.minimum(end, stop)[:, None])
        score = tl.where(is_seen, score * scale, float("-inf"))

        larger = tl.maximum(maximum, tl.max(score, 1))
        shift = tl.where(larger == float("-inf"), 0.0, larger)  # a query that has seen nothing yet
        decay = tl.exp2(maximum - shift)
        part_weight = tl.exp2(score - shift[:, None])
        normalizer = normalizer * decay + tl.sum(part_weight, 1)
        maximum = larger
        if value is not None:
            low, high = _halves(value, where, value_stride[2], inside, WIDTH, HALF, NIBBLES)
            if key_scale is not None:
                factor = tl.load(value_scale + where * value_scale_stride[2], mask=inside, other=0)
        else:
            low, high = key_low, key_high
        if key_scale is not None:
            part_weight *= factor[None, :]
        part_weight = _rounded(part_weight, WEIGHT_TYPE)
        low, high = _rounded(low, WEIGHT_TYPE), _rounded(high, WEIGHT_TYPE)
        sum_low = tl.dot(part_weight, low, acc=sum_low * decay[:, None], input_precision="ieee")
        sum_high = tl.dot(part_weight, high, acc=sum_high * decay[:, None], input_precision="ieee")

    line = ((batch * num_groups * HEADS + head) * QUERIES + time) * num_parts + part
    if best is not None:
        tl.store(best + line, maximum, mask=is_real)
        tl.store(total + line, normalizer, mask=is_real)
    else:
        divisor = tl.where(normalizer == 0, 1.0, normalizer)[:, None]
        sum_low, sum_high = sum_low / divisor, sum_high / divisor
    target = output + line[:, None] * WIDTH + channel[None, :]
    wanted = is_real[:, None] & is_channel[None, :]
    tl.store(target, sum_low, mask=wanted)
    tl.store(target + WIDTH // 2, sum_high, mask=wanted)


@triton.jit(do_not_specialize=["num_parts"])
@no_type_check
def merge_parts(output, parts, best, total, num_parts, WIDTH: tl.constexpr, PADDED: tl.constexpr, STEP: tl.constexpr):
    """Joins what `attend_part` found in the parts. The grid is (B · H · T), and zeros come of a query that saw no key.

    Args:
        output: (B, H, T, D).
        parts: Weighted sums, (B, H, T, parts, D).
        best: Largest scores, (B, H, T, parts).
        total: Sums of weights, (B, H, T, parts).
        PADDED: A power of two that holds D channels.
        STEP: Parts that are read at a time.
    """
    line = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, PADDED)
    maximum = tl.full((1,), float("-inf"), tl.float32)
    normalizer = tl.zeros((1,), tl.float32)
    weighted = tl.zeros((PADDED,), tl.float32)
    for start in range(0, num_parts, STEP):
        part = start + tl.arange(0, STEP)
        inside = part < num_parts
        place = line * num_parts + part
        part_best = tl.load(best + place, mask=inside, other=float("-inf"))
        larger = tl.maximum(maximum, tl.max(part_best, 0))
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        decay, share = tl.exp2(maximum - shift), tl.exp2(part_best - shift)
        maximum = larger
        normalizer = normalizer * decay + tl.sum(share * tl.load(total + place, mask=inside, other=0), 0)
        wanted = inside[:, None] & (channel < WIDTH)[None, :]
        sums = tl.load(parts + place[:, None] * WIDTH + channel[None, :], mask=wanted, other=0)
        weighted = weighted * decay + tl.sum(sums * share[:, None], 0)
    result = weighted / tl.where(normalizer == 0, 1.0, normalizer)
    tl.store(output + line * WIDTH + channel, result, mask=channel < WIDTH)

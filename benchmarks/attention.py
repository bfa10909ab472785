"""Attention of one new token over a long cache, by itself: our kernel beside torch's, and beside itself.

    .venv/bin/python benchmarks/attention.py [--context 8192] [--batch-size 1] [--threads 1]

Every contender of a row is first compared with attention in float64, in the first and the last sequence, then they run
by turns. `torch` is scaled_dot_product_attention over separate keys and values. `two` is our kernel over the same two
tensors and tells what is kernel and what is sharing; `one` is our kernel over one tensor; `rotated` rotates its keys
when it reads them; `folded` is what runs over one tensor where there was no compiler. Integers have no `torch`. Medians
over rounds, on one thread of process time, on more of wall time; `bandwidth` is the share of what a sum over a large
tensor reads in the same rounds. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from twofold.cache.quantize import quantize
from twofold.kernels import KeyValue, Mask, Rotation, instruction_set, native, rotary_frequencies, sdpa
from twofold.records import describe_environment

NUM_HEADS, WIDTH, SCALE = 16, 64, 0.125
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3, "int8": 1e-4, "int4": 1e-4}
ROWS = [(dtype, groups) for dtype in TOLERANCE for groups in (16, 4, 1)]
LARGE = 64 * 2**20  # elements, more than any cache holds
NUM_CACHES = 4  # visited by turns where one is small, so that none of them stays in a processor's cache

Run = Callable[[torch.Tensor, KeyValue], torch.Tensor]


def make_layer(dtype: str, groups: int, batch: int, context: int, seed: int) -> tuple[KeyValue, KeyValue]:
    """One tensor, and two, of the same kind."""
    generator = torch.Generator().manual_seed(seed)
    tensors = torch.randn(2, batch, groups, context, WIDTH, generator=generator)
    if dtype.startswith("int"):
        (key, key_scale), (value, value_scale) = (quantize(tensor, dtype)[:2] for tensor in tensors)
        return KeyValue(key, key, key_scale, key_scale), KeyValue(key, value, key_scale, value_scale)
    key, value = tensors.to(getattr(torch, dtype))
    return KeyValue(key, key), KeyValue(key, value)


def by_torch(query: torch.Tensor, stored: KeyValue) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, stored.key, stored.value, scale=SCALE, enable_gqa=True)


def by_kernel(query: torch.Tensor, stored: KeyValue) -> torch.Tensor:
    return native.attend(query, stored, Mask.full(), SCALE)


def folded(query: torch.Tensor, stored: KeyValue) -> torch.Tensor:
    return sdpa.attend(query, stored, mask=Mask.full(), scale=SCALE)


def exact(query: torch.Tensor, stored: KeyValue) -> torch.Tensor:
    """Of the first and the last sequence."""
    tensors = (ends(tensor).double() for tensor in stored.plain(torch.float32))
    key, value = (tensor.repeat_interleave(NUM_HEADS // tensor.shape[1], dim=1) for tensor in tensors)
    return (ends(query).double() @ key.mT * SCALE).softmax(dim=-1) @ value


def ends(batch: torch.Tensor) -> torch.Tensor:
    return batch[:: max(1, len(batch) - 1)]


def contenders(
    dtype: str, groups: int, batch: int, context: int
) -> tuple[torch.Tensor, dict[str, tuple[Run, list[KeyValue]]]]:
    layers = [make_layer(dtype, groups, batch, context, seed) for seed in range(max(1, NUM_CACHES // batch))]
    one, two = ([layer[i] for layer in layers] for i in range(2))
    frequencies = rotary_frequencies(WIDTH, 10_000.0, dtype=torch.float64)
    rotation = Rotation(torch.arange(context, dtype=torch.int32).expand(batch, -1), frequencies)
    rotated = [KeyValue(kv.key, kv.value, kv.key_scale, kv.value_scale, rotation=rotation) for kv in one]
    runs = {"two": (by_kernel, two), "one": (by_kernel, one), "rotated": (by_kernel, rotated)}
    if not dtype.startswith("int"):
        runs |= {"torch": (by_torch, two), "folded": (folded, one)}
    query = torch.randn(batch, NUM_HEADS, 1, WIDTH, generator=torch.Generator().manual_seed(99))
    return query if dtype.startswith("int") else query.to(getattr(torch, dtype)), runs


def seconds(run: Callable[[], object], clock: Callable[[], float]) -> float:
    started = clock()
    run()
    return clock() - started


def measure(dtype: str, groups: int, batch: int, context: int, rounds: int) -> dict[str, object]:
    query, runs = contenders(dtype, groups, batch, context)
    expected = {id(layers): exact(query, layers[0]) for _, layers in runs.values()}  # once for those who share layers
    for name, (run, layers) in runs.items():
        error = (ends(run(query, layers[0])).double() - expected[id(layers)]).abs().max().item()
        if not error <= TOLERANCE[dtype]:
            raise SystemExit(f"{name} over {dtype} is off by {error:.2g}; nothing was timed")
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in (*runs, "read")}
    large = torch.ones(LARGE)
    for number in range(rounds + 1):
        for name, (run, layers) in runs.items():
            taken = seconds(lambda run=run, layers=layers: [run(query, stored) for stored in layers], clock)
            if number > 0:
                times[name].append(taken / len(layers))
        if number > 0:
            times["read"].append(seconds(large.sum, clock))
    one = runs["one"][1][0]
    stored_bytes = sum(t.nbytes for t in (one.key, one.key_scale) if t is not None)
    return {
        "dtype": dtype,
        "num_key_value_heads": groups,
        "bytes_of_one_tensor": stored_bytes,
        "read_bandwidth_gb_s": large.nbytes / statistics.median(times.pop("read")) / 1e9,
        "milliseconds": {name: statistics.median(t) * 1e3 for name, t in times.items()},
        "spread": {name: [min(t) * 1e3, max(t) * 1e3] for name, t in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("context", 8_192), ("batch-size", 1), ("threads", 1), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(args.threads)
    print(f"{NUM_HEADS} heads of {WIDTH}, batch {args.batch_size}, context {args.context}, {instruction_set()}")
    print(
        f"{'dtype':9} {'kv heads':>8} {'torch ms':>9} {'two ms':>8} {'one ms':>8} {'vs torch':>9} {'vs two':>7} "
        f"{'rotated':>8} {'folded vs torch':>16} {'bandwidth':>10}"
    )
    rows = []
    for dtype, groups in ROWS:
        row = measure(dtype, groups, args.batch_size, args.context, args.rounds)
        rows.append(row)
        ms = row["milliseconds"]
        share = row["bytes_of_one_tensor"] / ms["one"] / 1e6 / row["read_bandwidth_gb_s"]
        against = partial(ratio, ms)
        print(
            f"{dtype:9} {groups:8} {ms.get('torch', float('nan')):9.3f} {ms['two']:8.3f} {ms['one']:8.3f} "
            f"{against('torch', 'one'):>9} {against('two', 'one'):>7} {ms['rotated'] / ms['one'] - 1:>+8.0%} "
            f"{against('torch', 'folded'):>16} {share:10.0%}",
            flush=True,
        )
    print(json.dumps({"arguments": vars(args), "environment": describe_environment(), "rows": rows}))


def ratio(milliseconds: dict[str, float], slow: str, fast: str) -> str:
    return f"{milliseconds[slow] / milliseconds[fast]:.2f}x" if slow in milliseconds else "-"


if __name__ == "__main__":
    main()

"""Peak memory of a decoding process, and what it is made of."""

import multiprocessing
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from twofold.bench.contender import Case
from twofold.bench.decode import DecodeCase
from twofold.bench.ours import Twofold
from twofold.cost import DTYPE_BYTES, cache_bytes, count_parameters, unshared_baseline
from twofold.spec import ConfigError, ModelConfig

REST_LIMIT = 200 * 2**20
"""Bytes that a generation may need beside weights and cache."""
REST_SPREAD = 16 * 2**20
"""Bytes by which what it needs beside them may differ between variants."""
USERS_MEMORY, USERS_TOKENS = 4 * 2**30, 4_096
"""The question of how many users fit."""
_USERS_CACHES = ("float32", "bfloat16", "int8", "int4")

_NEW_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Peak memory of one generation, in bytes: program + weights + cache + rest."""

    contender: str
    """The variant."""
    cache: str
    """`growing`, as `generate` makes it where none is given; or `fixed`, taken at once, as a StaticCache does."""
    context: int
    """Tokens in the cache at the end."""
    batch_size: int
    """Sequences together."""
    peak: int
    """Largest resident size of the process."""
    program: int
    """What was resident before the model was built: Python, torch, Transformers and what a first call leaves."""
    weight_bytes: int
    """The model's parameters."""
    cache_bytes: int
    """What the tokens need in the cache, by the formula."""
    unshared_bytes: int
    """What they would need in the same model with three projections and multi-head attention."""

    @property
    def rest(self) -> int:
        """What is explained by neither."""
        return self.peak - self.program - self.weight_bytes - self.cache_bytes


def measure_memory(
    configs: Mapping[str, ModelConfig],
    case: Case,
    *,
    dtype: str = "float32",
    cache_dtype: str | None = None,
    threads: int = 1,
    say: Callable[[str], None] = lambda _: None,
) -> list[PeakMemory]:
    """Peak memory of a generation with each model, each in a fresh process, with a growing and a fixed cache.

    Args:
        configs: Models by name.
        case: Tokens in the cache at the end, and sequences together.
        dtype: Type of weights and cache.
        cache_dtype: `int8` or `int4` for a quantised cache.
        threads: Threads.
        say: Called with a line of progress.

    Raises:
        ConfigError: for a context that is too short to generate in.
    """
    if case.context <= _NEW_TOKENS:
        raise ConfigError(f"memory is measured over a generation of {_NEW_TOKENS} tokens; --context must be larger")
    measured = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        for name, config in configs.items():
            for fixed in (False, True):
                say(f"peak memory of {name}, cache {'fixed' if fixed else 'growing'}, in a process of its own")
                measured.append(
                    pool.submit(generation_memory, name, config, case, dtype, cache_dtype, fixed, threads).result()
                )
    return measured


def generation_memory(
    name: str, config: ModelConfig, case: Case, dtype: str, cache_dtype: str | None, fixed: bool, threads: int
) -> PeakMemory:
    """Peak memory of this process while a model generates the last few tokens of a context.

    The growing cache is the one that `generate` makes for a text of this length. It is filled in pieces, as a prompt
    that is passed in pieces or a long generation fills it, so what growing needs is counted. Call it in a fresh
    process: memory that was freed before would hide what is needed now.
    """
    torch.set_num_threads(threads)
    small = replace(config, hidden_size=8 * config.num_attention_heads, num_hidden_layers=1, head_dim=None)
    small = replace(small, vocab_size=64, intermediate_size=64, qk_rope_head_dim=None)
    _generate(
        small, Case(context=2 * _NEW_TOKENS), dtype, cache_dtype, fixed
    )  # what the first call of everything leaves
    program = _resident("VmRSS")
    weight_bytes = _generate(config, case, dtype, cache_dtype, fixed)
    return PeakMemory(
        contender=name,
        cache="fixed" if fixed else "growing",
        context=case.context,
        batch_size=case.batch_size,
        peak=_peak_rss(),
        program=program,
        weight_bytes=weight_bytes,
        cache_bytes=cache_bytes(config, case.context, cache_dtype or dtype, case.batch_size).total,
        unshared_bytes=cache_bytes(unshared_baseline(config), case.context, dtype, case.batch_size).total,
    )


def users(config: ModelConfig, dtype: str) -> dict[str, int]:
    """How many sequences of `USERS_TOKENS` tokens fit in `USERS_MEMORY` bytes beside the weights: arithmetic.

    Args:
        config: The model; learned positions are extended to that many tokens.
        dtype: Type of the weights.

    Returns:
        The number for each type of the cache; without int4 where heads are of odd width.
    """
    positions = max(USERS_TOKENS, config.max_position_embeddings)
    weights = count_parameters(replace(config, max_position_embeddings=positions)).total * DTYPE_BYTES[dtype]
    left = max(0, USERS_MEMORY - weights)
    fitting = [kind for kind in _USERS_CACHES if kind != "int4" or config.head_dim is None or config.head_dim % 2 == 0]
    return {kind: left // cache_bytes(config, USERS_TOKENS, kind).total for kind in fitting}


def _generate(config: ModelConfig, case: Case, dtype: str, cache_dtype: str | None, fixed: bool) -> int:
    """Builds, fills, generates; returns the bytes of the model's parameters."""
    contender = _Generation(config, case, dtype, cache_dtype, fixed)
    contender.build(case.context)
    _reset_peak()  # random weights are made twice where input and output share them; loading does not do that
    contender.fill_caches(Case(context=case.context - _NEW_TOKENS, batch_size=case.batch_size))
    contender.ways()["generate"](_NEW_TOKENS)
    return sum(parameter.nbytes for parameter in contender.model.parameters())


class _Generation(Twofold):
    """A model whose cache is what users get; only sliding layers keep a few tokens more, which are taken back."""

    def __init__(self, config: ModelConfig, case: Case, dtype: str, cache_dtype: str | None, fixed: bool) -> None:
        super().__init__("memory", config, dtype, cache_dtype=cache_dtype)
        self._case, self._quantized, self._fixed = case, cache_dtype, fixed

    @torch.no_grad()
    def make_cache(self, name: str) -> Any:  # noqa: ARG002 - there is one kind
        """An empty cache: a fixed one, or what is left of a generation that was to fill the context and was stopped."""
        from twofold.hf import CACHE_NAME, adopt_cache, cache_for

        if self._fixed:
            cache = cache_for(self.model, self._quantized, self._case.context)
        else:
            options: dict[str, Any] = {}
            if self._quantized is not None:
                bits = int(self._quantized.removeprefix("int"))
                options = {"cache_implementation": "quantized", "cache_config": {"nbits": bits}}
            prompt = torch.zeros(self._case.batch_size, 1, dtype=torch.long)
            options |= {"max_length": self._case.context + 1, "max_time": 0.0, "return_dict_in_generate": True}
            cache = self.model.generate(prompt, do_sample=False, **options)[CACHE_NAME]
            cache.reset()
        for layer in adopt_cache(cache, self.model.spec):
            layer.rewind = 0 if layer.window is None else _NEW_TOKENS
        return cache


def peak_decode_memory(config: ModelConfig, context: int, batch_size: int = 1) -> int:
    """Bytes by which this process grows, at its peak, to hold a model and decode at a context.

    The cache grows up to the context without being told how far, so what growing needs is counted too. Call it in a
    fresh process: memory that was freed before would hide what is needed now.

    Args:
        config: The model, built here with random weights.
        context: Tokens in the cache.
        batch_size: Sequences decoded together.
    """
    before = _peak_rss()
    case = DecodeCase(config, context, batch_size)
    case.fill()
    case.seconds_per_token()
    return _peak_rss() - before


def available_memory() -> int | None:
    """Bytes that new data may take: nine tenths of what the system has left, or None where it does not say."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    return _proc_bytes(meminfo, "MemAvailable") * 9 // 10


def _peak_rss() -> int:
    """Largest resident size of this program so far, in bytes."""
    if Path("/proc/self/status").exists():  # getrusage counts what the parent had before it started this program
        return _resident("VmHWM")
    import resource  # Unix only

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _resident(field: str) -> int:
    """Resident bytes now (VmRSS) or at most (VmHWM); where there is no /proc, the most there was, for both."""
    status = Path("/proc/self/status")
    if not status.exists():
        return _peak_rss()
    return _proc_bytes(status, field)


def _proc_bytes(path: Path, field: str) -> int:
    """A field that Linux tells in KiB."""
    line = next(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def _reset_peak() -> None:
    """Lets the largest size count from now on, where Linux allows it; elsewhere importing may have needed more."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

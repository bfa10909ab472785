"""How fast one token follows another at a long context, variant beside variant."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from twofold.attention import AttentionContext
from twofold.bench.contender import Case, CorrectnessError, Spread, fill_caches
from twofold.cache import LayerCache
from twofold.kernels import implementation, instruction_set
from twofold.models import LanguageModel
from twofold.spec import ConfigError, ModelConfig

_GATE_TOKENS = 24
_GATE_TOLERANCE = 1e-4
_FILL_TOKENS = 1_024
_STEPS = 12


class DecodeCase:
    """An untrained model at a context length: what one decoding step costs does not depend on the weights' values.

    Args:
        config: The model; its positions are extended to the context.
        context: Tokens in the cache before the timed steps.
        batch_size: Sequences decoded together.
    """

    def __init__(self, config: ModelConfig, context: int, batch_size: int) -> None:
        if not config.causal:
            raise ConfigError("a model with causal: false does not generate, so there is no decoding to measure")
        longest = max(config.max_position_embeddings, context + 2 * _STEPS)
        torch.manual_seed(0)
        self.model = LanguageModel(replace(config, max_position_embeddings=longest)).eval()
        self.context = context
        self.tokens = torch.zeros(batch_size, 1, dtype=torch.long)
        self.model.fold_queries()
        self.cache: Sequence[LayerCache] = self.model.decoder.make_cache()
        for cache in self.cache:
            cache.rewind = _STEPS  # the timed steps are taken back

    @torch.no_grad()
    def check(self) -> float:
        """Largest difference between logits decoded token by token and those of one forward pass.

        Raises:
            CorrectnessError: when it is larger than rounding explains.
        """
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.model.config.vocab_size, (1, _GATE_TOKENS), generator=generator)
        cache = self.model.decoder.make_cache()
        stepwise = torch.cat([self.model(tokens[:, i : i + 1], cache=cache) for i in range(_GATE_TOKENS)], dim=1)
        error = (stepwise - self.model(tokens)).abs().max().item()
        if not error <= _GATE_TOLERANCE:
            raise CorrectnessError(f"decoding {self.model.config.label} is off by {error:.2g}; nothing was timed")
        return error

    def fill(self) -> None:
        """Fills the cache up to the context with what random hidden states project to."""
        case = Case(context=self.context, batch_size=len(self.tokens))
        fill_caches(self.model.decoder, self.cache, case, piece=_FILL_TOKENS)

    @torch.no_grad()
    def seconds_per_token(self) -> float:
        """Median time of a few steps at the context, which the cache is cropped back to."""
        times = []
        for _ in range(_STEPS):
            started = time.perf_counter()
            self.model(self.tokens, cache=self.cache, num_logits=1)
            times.append(time.perf_counter() - started)
        for cache in self.cache:
            cache.crop(self.context)
        return statistics.median(times)

    @torch.no_grad()
    def attention(self) -> str:
        """Which implementation of attention a timed step runs in the first layer."""
        positions = torch.full((len(self.tokens), 1), self.context)
        context = AttentionContext(positions, causal=True, num_past=self.context)
        layer = self.model.decoder.blocks()[0].self_attn
        hidden_states = torch.zeros(len(self.tokens), 1, self.model.config.hidden_size)
        read = layer.read(self.cache[0].tensors, context)
        query, _ = layer.project(hidden_states, context)
        return implementation(query, read, context.mask(read.key.shape[2], None), layer.implementation)

    @property
    def nbytes_used(self) -> int:
        """Bytes that the cache's tokens need."""
        return sum(cache.nbytes_used for cache in self.cache)

    @property
    def nbytes_allocated(self) -> int:
        """Bytes that the cache holds."""
        return sum(cache.nbytes_allocated for cache in self.cache)


def measure_decode(
    configs: Mapping[str, ModelConfig],
    *,
    context: int,
    batch_size: int = 1,
    repeats: int = 7,
    report: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Times one decoding step of each model, gated on correctness and interleaved: A B C A B C ...

    Runs on the CPU in float32 on the threads that torch has now.

    Args:
        configs: Models by name.
        context: Tokens in the cache.
        batch_size: Sequences decoded together.
        repeats: Rounds; the first one more, which is not counted, warms up.
        report: Called with a line of progress.

    Returns:
        The conditions, and for each name milliseconds a token and tokens a second (median, lowest and highest of the
        rounds), cache bytes used and allocated, and the largest error of the gate.
    """
    say = report or (lambda _: None)
    cases = {name: DecodeCase(config, context, batch_size) for name, config in configs.items()}
    errors = {name: case.check() for name, case in cases.items()}
    for case in cases.values():
        case.fill()
    rounds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(repeats + 1):
        say(f"timing decode steps at {context} tokens of context, round {number} of {repeats}")
        for name, case in cases.items():
            seconds = case.seconds_per_token()
            if number > 0:
                rounds[name].append(seconds)
    return {
        "context": context,
        "batch_size": batch_size,
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "attention": _spell_attention({name: case.attention() for name, case in cases.items()}),
        "repeats": repeats,
        "read_bandwidth_gb_s": read_bandwidth(),
        "variants": {
            name: {
                "milliseconds_per_token": asdict(Spread.of([1e3 * seconds for seconds in rounds[name]])),
                "tokens_per_second": asdict(Spread.of([batch_size / seconds for seconds in rounds[name]])),
                "cache_bytes_used": case.nbytes_used,
                "cache_bytes_allocated": case.nbytes_allocated,
                "largest_error": errors[name],
            }
            for name, case in cases.items()
        },
    }


def read_bandwidth(clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes a second, in units of 10^9, at which torch's threads sum a tensor much larger than the caches.

    Args:
        clock: Time in seconds.
    """
    tensor = torch.ones(64 * 2**20)
    times = []
    for _ in range(5):
        started = clock()
        tensor.sum()
        times.append(clock() - started)
    return tensor.nbytes / min(times) / 1e9


def _spell_attention(used: Mapping[str, str]) -> str:
    """What ran, and where something else did: `native kernel (avx512); decoupled: torch ...`."""
    words = {"torch": "torch scaled_dot_product_attention", "native": f"compiled kernel ({instruction_set()})"}
    usual = max(set(used.values()), key=list(used.values()).count)
    others = [f"{name}: {words[kind]}" for name, kind in used.items() if kind != usual]
    return "; ".join([words[usual], *others])

"""Rounds: what is compared takes turns, A B C A B C, so that a machine that slows down slows all of it."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from twofold.bench.contender import Case, Contender, Spread, check
from twofold.bench.decode import read_bandwidth

Task = Literal["decode", "prefill"]
SLACK_TOKENS = 64
"""Positions that models have beyond the longest context."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender, decoding in one way, at one case."""

    contender: str
    """Its name."""
    way: str
    """`generate`, `loop`, or the kind of cache that `generate` was given; `prompt` for prefill."""
    context: int
    """Tokens in the cache; for prefill, in the prompt."""
    batch_size: int
    """Sequences together."""
    cpu_ms: Spread
    """Milliseconds of the process's CPU time for a step; for prefill, for the prompt."""
    wall_ms: Spread
    """The same on the clock."""
    tokens_per_second: float
    """All sequences together, by the time that decides: CPU time on one thread, the clock on more."""
    cache_bytes: int
    """What the context needs in the cache, exactly."""
    moved_bytes: int | None
    """Bytes that a step must move: weights and cache once. None for prefill, which arithmetic binds."""
    bandwidth_share: float | None
    """Moved bytes over the deciding time, as a share of the read bandwidth of the same run."""
    largest_error: float
    """What the check found, as a share of the largest logit."""
    group: int
    """Contenders of one group took turns; there is more than one group only where memory did not hold all."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run found."""

    task: Task
    """What was timed."""
    rows: tuple[Row, ...]
    """Case by case, in the order of the contenders."""
    read_bandwidth_gb_s: float
    """10^9 bytes a second: the best of the rounds, by the time that decides."""
    rounds: int
    """Rounds that count; one more came before."""
    new_tokens: int
    """Tokens decoded in each round."""
    threads: int
    """Threads."""
    notes: tuple[str, ...]
    """What was left out or could not take turns."""


def measure(
    contenders: Sequence[Contender],
    cases: Sequence[Case],
    *,
    task: Task = "decode",
    new_tokens: int = 8,
    rounds: int = 5,
    memory_bytes: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Measured:
    """Checks contenders, then times them in turn, case by case, on the threads that torch has now.

    Args:
        contenders: What to compare.
        cases: Contexts and batch sizes.
        task: `decode`, or `prefill` for the prompt.
        new_tokens: Tokens that a round decodes; the cache is then taken back to the context.
        rounds: Rounds that count, after one that warms up.
        memory_bytes: What models and caches may take together. Contenders that do not fit take turns in groups, and a
            note says so. Default: no limit.
        say: Called with a line of progress.

    Raises:
        CorrectnessError: when a contender does not decode what it should. Then nothing was timed of its case.
    """
    threads = torch.get_num_threads()
    times: dict[tuple[Case, str, str], _Times] = {}
    bandwidth: list[float] = []
    groups = fit(contenders, cases, memory_bytes)
    for number, group in enumerate(groups):
        errors = {}
        for contender in group:
            say(f"building and checking {contender.name}")
            contender.build(max(case.context for case in cases) + new_tokens + SLACK_TOKENS)
            errors[contender.name] = check(contender)
        for case in cases:
            calls = dict(_calls(group, case, task, new_tokens, say))
            for turn in range(rounds + 1):
                say(f"{task} at {case.context:,} tokens, batch {case.batch_size}: round {turn} of {rounds}")
                for (contender, way), call in calls.items():
                    seconds = _time(call)
                    if turn > 0:
                        entry = times.setdefault((case, contender.name, way), _Times(contender, number))
                        entry.error = errors[contender.name]
                        entry.seconds.append(seconds)
                bandwidth.append(read_bandwidth(time.process_time if threads == 1 else time.perf_counter))
        for contender in group:
            contender.close()
    best = max(bandwidth)
    steps = new_tokens if task == "decode" else 1
    return Measured(
        task=task,
        rows=tuple(_row(*key, entry, steps, threads, best, task) for key, entry in _sorted(times, contenders, cases)),
        read_bandwidth_gb_s=best,
        rounds=rounds,
        new_tokens=new_tokens,
        threads=threads,
        notes=tuple(_notes(groups)),
    )


def fit(contenders: Sequence[Contender], cases: Sequence[Case], memory_bytes: int | None) -> list[list[Contender]]:
    """Contenders in groups that fit in memory together, in order, each as full as it can be."""
    groups: list[list[Contender]] = []
    used = 0
    for contender in contenders:
        needed = max(contender.memory(case) for case in cases)
        if not groups or (memory_bytes is not None and used + needed > memory_bytes):
            groups.append([])
            used = 0
        groups[-1].append(contender)
        used += needed
    return groups


@dataclass
class _Times:
    contender: Contender
    group: int

    def __post_init__(self) -> None:
        self.seconds: list[tuple[float, float]] = []
        self.error = float("nan")


def _time(call: Callable[[], object]) -> tuple[float, float]:
    """CPU time of this process, and time on the clock."""
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - cpu, time.perf_counter() - wall


def _calls(
    contenders: Sequence[Contender], case: Case, task: Task, new_tokens: int, say: Callable[[str], None]
) -> Iterator[tuple[tuple[Contender, str], Callable[[], None]]]:
    for contender in contenders:
        if task == "prefill":
            yield (contender, "prompt"), partial(contender.prefill, case)
            continue
        say(f"filling the cache of {contender.name} with {case.context:,} tokens, batch {case.batch_size}")
        contender.fill(case)
        for way, decode in contender.ways().items():
            yield (contender, way), partial(decode, new_tokens)


def _sorted(
    times: Mapping[tuple[Case, str, str], _Times], contenders: Sequence[Contender], cases: Sequence[Case]
) -> list[tuple[tuple[Case, str, str], _Times]]:
    names = [contender.name for contender in contenders]
    return sorted(times.items(), key=lambda item: (cases.index(item[0][0]), names.index(item[0][1])))


def _row(case: Case, name: str, way: str, entry: _Times, steps: int, threads: int, bandwidth: float, task: Task) -> Row:
    cpu, wall = (
        Spread.of([1e3 * seconds / steps for seconds in column]) for column in zip(*entry.seconds, strict=True)
    )
    deciding = (cpu if threads == 1 else wall).median / 1e3
    traffic = entry.contender.traffic(case)
    moved = traffic.total if task == "decode" else None
    return Row(
        contender=name,
        way=way,
        context=case.context,
        batch_size=case.batch_size,
        cpu_ms=cpu,
        wall_ms=wall,
        tokens_per_second=case.batch_size * (1 if task == "decode" else case.context) / deciding,
        cache_bytes=traffic.cache_bytes,
        moved_bytes=moved,
        bandwidth_share=None if moved is None else moved / deciding / bandwidth / 1e9,
        largest_error=entry.error,
        group=entry.group,
    )


def _notes(groups: Sequence[Sequence[Contender]]) -> Iterator[str]:
    if len(groups) > 1:
        names = "; ".join(", ".join(contender.name for contender in group) for group in groups)
        yield f"Memory does not hold all contenders at once; these took turns with each other: {names}."

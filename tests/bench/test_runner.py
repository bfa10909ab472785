"""Rounds, groups and rows, with contenders that do nothing and a clock that is set by hand."""

from dataclasses import asdict

import pytest

from twofold.bench import Case, CorrectnessError, Spread, Traffic, measure
from twofold.bench import runner as module
from twofold.bench.runner import fit


class Clock:
    """CPU time and wall time; a contender's turn moves them."""

    def __init__(self):
        self.cpu = self.wall = 0.0


class Fake:
    """A contender whose rounds take given times."""

    def __init__(self, name, clock, seconds=(9, 1, 2, 4), error=0.0):
        self.name, self.clock, self.seconds, self.error = name, clock, list(seconds), error
        self.tolerance = 1e-4
        self.log = clock.log

    def traffic(self, case):
        return Traffic(weight_bytes=100, cache_bytes=10 * case.context * case.batch_size)

    def memory(self, case):
        return self.traffic(case).total

    def build(self, longest):
        self.log.append((self.name, "build", longest))

    def check(self):
        self.log.append((self.name, "check"))
        return self.error

    def fill(self, case):
        self.log.append((self.name, "fill", case.context, case.batch_size))

    def ways(self):
        return {"loop": self.decode}

    def decode(self, num_tokens):
        self.log.append((self.name, "decode", num_tokens))
        seconds = self.seconds.pop(0)
        self.clock.cpu += seconds
        self.clock.wall += 3 * seconds

    def prefill(self, case):
        self.log.append((self.name, "prefill", case.context))
        self.decode(0)

    def close(self):
        self.log.append((self.name, "close"))


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    clock.log = []
    monkeypatch.setattr(module.time, "process_time", lambda: clock.cpu)
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock.wall)
    monkeypatch.setattr(module, "read_bandwidth", lambda _: 1e-6)
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: 1)
    return clock


def test_all_are_checked_first_then_take_turns(clock):
    contenders = [Fake("a", clock), Fake("b", clock), Fake("c", clock)]
    measured = measure(contenders, [Case(context=5)], new_tokens=2, rounds=3)
    steps = [entry[:2] for entry in clock.log]
    assert steps[:6] == [(name, step) for name in "abc" for step in ("build", "check")]
    assert [name for name, step in steps if step == "decode"] == list("abc") * 4
    assert clock.log[0] == ("a", "build", 5 + 2 + module.SLACK_TOKENS)
    assert steps[-3:] == [(name, "close") for name in "abc"]
    assert [row.contender for row in measured.rows] == list("abc")


def test_median_and_spread_leave_the_first_round_out(clock):
    (row,) = measure([Fake("a", clock)], [Case(context=5)], new_tokens=2, rounds=3).rows
    assert row.cpu_ms == Spread(median=1_000.0, low=500.0, high=2_000.0)
    assert row.wall_ms == Spread(median=3_000.0, low=1_500.0, high=6_000.0)
    assert row.tokens_per_second == 1.0


def test_share_of_the_bandwidth_is_what_must_move_over_the_time(clock):
    (row,) = measure([Fake("a", clock)], [Case(context=5, batch_size=2)], new_tokens=2, rounds=3).rows
    assert (row.cache_bytes, row.moved_bytes) == (100, 200)
    assert row.bandwidth_share == pytest.approx(200 / 1.0 / 1_000)
    assert row.tokens_per_second == 2.0


def test_on_more_threads_the_clock_decides(clock, monkeypatch):
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: 2)
    (row,) = measure([Fake("a", clock)], [Case(context=5)], new_tokens=2, rounds=3).rows
    assert row.tokens_per_second == pytest.approx(1 / 3)
    assert row.bandwidth_share == pytest.approx(150 / 3 / 1_000)


def test_prefill_counts_the_prompts_tokens_and_moves_nothing(clock):
    (row,) = measure([Fake("a", clock)], [Case(context=8)], task="prefill", rounds=3).rows
    assert not [entry for entry in clock.log if entry[1] == "fill"]
    assert (row.way, row.tokens_per_second, row.moved_bytes) == ("prompt", 4.0, None)


def test_one_that_is_wrong_ends_the_run_before_anything_is_timed(clock):
    for error in (2e-4, float("nan")):
        with pytest.raises(CorrectnessError, match=r"b: decoded logits are off by .* nothing was timed"):
            measure([Fake("a", clock), Fake("b", clock, error=error)], [Case(context=5)])
    assert not [entry for entry in clock.log if entry[1] in ("decode", "fill")]


def test_every_context_with_every_batch(clock):
    cases = [Case(context=5), Case(context=7), Case(context=5, batch_size=4)]
    contenders = [Fake("a", clock, range(1, 20)), Fake("b", clock, range(1, 20))]
    measured = measure(contenders, cases, rounds=1)
    rows = [(row.contender, row.context, row.batch_size) for row in measured.rows]
    assert rows == [("a", 5, 1), ("b", 5, 1), ("a", 7, 1), ("b", 7, 1), ("a", 5, 4), ("b", 5, 4)]
    assert measured.notes == ()


def test_contenders_that_do_not_fit_take_turns_in_groups(clock):
    contenders = [Fake(name, clock) for name in "abc"]  # 150 bytes each
    assert [len(group) for group in fit(contenders, [Case(context=5)], None)] == [3]
    assert [len(group) for group in fit(contenders, [Case(context=5)], 10)] == [1, 1, 1]
    measured = measure(contenders, [Case(context=5)], rounds=3, memory_bytes=300)
    assert [(row.contender, row.group) for row in measured.rows] == [("a", 0), ("b", 0), ("c", 1)]
    assert [name for name, step, *_ in clock.log if step in ("close", "build")] == list("ababcc")
    assert measured.notes[0].endswith("these took turns with each other: a, b; c.")


def test_progress_is_told(clock):
    said = []
    measure([Fake("a", clock)], [Case(context=5)], rounds=1, say=said.append)
    assert said[0] == "building and checking a"
    assert said[-1] == "decode at 5 tokens, batch 1: round 1 of 1"


def test_a_row_is_plain_data(clock):
    (row,) = measure([Fake("a", clock)], [Case(context=5)], rounds=1).rows
    assert asdict(row)["cpu_ms"] == {"median": 125.0, "low": 125.0, "high": 125.0}

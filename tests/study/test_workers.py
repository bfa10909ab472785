"""Worker processes: who dies takes nobody with it, and an interruption ends them at once."""

import time
from functools import partial

import pytest

from tests.study import dying
from twofold.study.workers import WorkerError, run_side_by_side, worker_pool


def test_errors_come_back_by_name_in_the_order_of_the_calls():
    errors = run_side_by_side({"a": dying.die, "b": partial(int, "x"), "c": partial(int, "1")}, num_workers=2)
    assert list(errors) == ["a", "b"]
    assert isinstance(errors["a"], WorkerError)
    assert "died twice" in str(errors["a"])
    assert isinstance(errors["b"], ValueError)


def test_an_interruption_ends_the_workers_at_once(tmp_path):
    started = tmp_path / "started"
    with pytest.raises(KeyboardInterrupt), worker_pool(1) as pool:  # noqa: PT012 - the block is what is tested
        pool.submit(dying.sleep, started)
        while not started.exists():
            time.sleep(0.05)
        processes = list(pool._processes.values())
        raise KeyboardInterrupt
    for process in processes:
        process.join(timeout=10)
        assert process.exitcode is not None

"""The paper's comparison, from made-up records of its commands."""

import pytest

from benchmarks import paper

MIB = 2**20


def record(command):
    names = ["QKV", "Q-K=V", "Q-MQA"]
    if "bench memory" in command:
        rows = [
            {
                "contender": name,
                "cache": cache,
                "context": 2_048,
                "batch_size": size,
                "peak": peak,
                "program": 400 * MIB,
            }
            for size in (1, 8)
            for name, needed in zip(names, (1_000, 750, 500), strict=True)
            for cache, peak in (("growing", (400 + needed * size) * MIB), ("fixed", 1))
        ]
    else:
        rows = [
            {
                "contender": name,
                "way": way,
                "context": 2_048,
                "batch_size": size,
                "tokens_per_second": size * 1e3 / ms,
                "cpu_ms": {"median": ms},
                "cache_bytes": cache * size,
            }
            for size in (1, 8)
            for name, ms, cache in zip(names, (100.0, 80.0, 50.0), (64, 32, 1), strict=True)
            for way, ms in (("generate", ms), ("loop", 1.0))
        ]
    return {"dtype": "float32", "rows": rows}


@pytest.fixture
def found():
    return list(paper.tables({f"twofold {command}": record(command) for command in paper.COMMANDS}))


def test_a_table_for_each_model_and_batch_size(found):
    assert [table.title for table in found] == [
        f"{model} at 2,048 tokens, batch {size}, float32" for model in ("gpt-300m", "gpt-1.2b") for size in (1, 8)
    ]


def test_each_figure_stands_beside_the_published_one(found):
    small, large = (found[index].rows[-1] for index in (1, 2))
    assert small[:6] == ("Q-MQA", "4,000 MiB", "-50.0 %", "", "160.0", "+100.0 %")
    assert small[6:] == ("", "50.0", "98.4375 %", "96.9 %")
    assert large[:6] == ("Q-MQA", "500 MiB", "-50.0 %", "-13.6 to -12.8 %", "20.0", "+100.0 %")
    assert large[6:] == ("+11.7 to +13.2 %", "50.0", "98.4375 %", "98.4 %")
    assert found[2].rows[0] == ("QKV", "1,000 MiB", "+0.0 %", "", "10.0", "+0.0 %", "", "100.0", "0 %", "")

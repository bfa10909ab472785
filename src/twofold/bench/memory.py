"""Peak memory of a decoding process."""

import sys
from pathlib import Path

from twofold.bench.decode import DecodeCase
from twofold.spec import ModelConfig


def peak_decode_memory(config: ModelConfig, context: int, batch_size: int = 1) -> int:
    """Bytes by which this process grows, at its peak, to hold a model and decode at a context.

    The cache grows up to the context as it does in generation, so what growing needs is counted too. Call it in a
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
    line = next(line for line in meminfo.read_text(encoding="utf-8").splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024 * 9 // 10


def _peak_rss() -> int:
    """Largest resident size of this program so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage counts what the parent had before it started this program
        line = next(line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource  # Unix only

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

"""Measured speed and memory: correctness first, then interleaved rounds, with median and spread."""

from twofold.bench.decode import CorrectnessError, DecodeCase, measure_decode, read_bandwidth
from twofold.bench.memory import peak_decode_memory

__all__ = ["CorrectnessError", "DecodeCase", "measure_decode", "peak_decode_memory", "read_bandwidth"]

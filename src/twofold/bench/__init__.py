"""Measured speed and memory: correctness first, then interleaved rounds, with median and spread.

A contender is a model with a cache, ours or another library's. The runner checks it, fills its cache and times it in
turn with the others.
"""

from twofold.bench.contender import Case, Contender, CorrectnessError, Spread, Traffic
from twofold.bench.decode import DecodeCase, measure_decode, read_bandwidth
from twofold.bench.generation import Transformers
from twofold.bench.memory import PeakMemory, available_memory, measure_memory, peak_decode_memory, users
from twofold.bench.ours import Twofold
from twofold.bench.peers import PEERS, make_peer, missing_packages
from twofold.bench.results import (
    Table,
    hardware_slug,
    markdown,
    measured_record,
    measured_tables,
    memory_record,
    memory_tables,
    spell_kinds,
    write_result,
)
from twofold.bench.runner import Measured, Row, Task, measure

__all__ = [
    "PEERS",
    "Case",
    "Contender",
    "CorrectnessError",
    "DecodeCase",
    "Measured",
    "PeakMemory",
    "Row",
    "Spread",
    "Table",
    "Task",
    "Traffic",
    "Transformers",
    "Twofold",
    "available_memory",
    "hardware_slug",
    "make_peer",
    "markdown",
    "measure",
    "measure_decode",
    "measure_memory",
    "measured_record",
    "measured_tables",
    "memory_record",
    "memory_tables",
    "missing_packages",
    "peak_decode_memory",
    "read_bandwidth",
    "spell_kinds",
    "users",
    "write_result",
]

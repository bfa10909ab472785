"""Run folders: what a run was, where it ran, how it went and what came out.

The only code that reads or writes them; every other room asks `RunFolder`. JSON here is written atomically and never
holds NaN or Infinity. Knows no torch.
"""

from twofold.records.environment import cpu_name, describe_environment, num_cores
from twofold.records.files import exclusive, read_json, write_json_atomic, write_text_atomic
from twofold.records.folder import RunFolder

__all__ = [
    "RunFolder",
    "cpu_name",
    "describe_environment",
    "exclusive",
    "num_cores",
    "read_json",
    "write_json_atomic",
    "write_text_atomic",
]

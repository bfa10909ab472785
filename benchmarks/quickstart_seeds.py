"""Makes the record of seeds from which the quickstart's page draws its intervals: five seeds of every variant.

    .venv/bin/python benchmarks/quickstart_seeds.py runs/seeds

Takes about five times as long as the quickstart's training; interrupted, it goes on where it was. Make it again
whenever the quickstart's settings change: the page uses it only for the settings that it was made with.
"""

import sys
from pathlib import Path

from twofold.records import write_json_atomic
from twofold.report import SEED_RECORD
from twofold.study import record_seeds

SEEDS = range(5)

if __name__ == "__main__":
    write_json_atomic(SEED_RECORD, record_seeds(Path(sys.argv[1]), SEEDS))
    print(SEED_RECORD)

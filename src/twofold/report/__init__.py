"""One HTML file that answers what sharing projections costs and saves: measured here, beside what was published.

Reads run folders and never trains. Knows no torch.
"""

from twofold.report.page import SEED_RECORD, write_report
from twofold.report.statistics import Interval, paired_difference, perplexity_increase, seed_interval

__all__ = [
    "SEED_RECORD",
    "Interval",
    "paired_difference",
    "perplexity_increase",
    "seed_interval",
    "write_report",
]

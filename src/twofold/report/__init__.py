"""One HTML file that answers what sharing projections costs and saves: measured here, beside what was published.

Reads run folders and never trains. Knows no torch.
"""

from twofold.report.page import write_report
from twofold.report.statistics import Interval, paired_difference, perplexity_increase, seed_interval

__all__ = ["Interval", "paired_difference", "perplexity_increase", "seed_interval", "write_report"]

"""How good a model is: perplexity over real targets, and samples of what it writes."""

from twofold.eval.perplexity import Perplexity, measure_perplexity
from twofold.eval.samples import sample_text

__all__ = ["Perplexity", "measure_perplexity", "sample_text"]

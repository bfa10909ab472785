"""The exceptions that a user's mistake raises."""

import difflib
from collections.abc import Iterable
from itertools import takewhile


class TwofoldError(Exception):
    """Something the user can mend; the message is one line that says what is wrong and what to do."""


class ConfigError(TwofoldError, ValueError):
    """A configuration that cannot be built."""


class DataError(TwofoldError, ValueError):
    """Input data that cannot be used."""


class RunFolderError(TwofoldError):
    """A run or model folder that is missing, incomplete, or belongs to something else."""


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """Ends a sentence: `"; did you mean 'x'?"` with the nearest allowed name, or `"."` when nothing is near."""
    by_folded = {name.casefold(): name for name in allowed}
    near = difflib.get_close_matches(given.casefold(), by_folded, n=3, cutoff=0.6)
    if not near:
        return "."
    best = max(near, key=lambda name: _shared_beginning(name, given.casefold()))  # the nearest of equals
    return f"; did you mean '{by_folded[best]}'?"


def _shared_beginning(first: str, second: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))

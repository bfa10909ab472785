"""The command line: parse, call, print.

Each verb has a module of its own, which imports the rooms it needs inside its function, so that `twofold --help`
answers at once. Nothing else in the package imports this room.
"""

from twofold.cli.app import main

__all__ = ["main"]

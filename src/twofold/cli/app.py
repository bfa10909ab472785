"""The `twofold` program: its verbs, and what the user sees when one of them fails."""

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from twofold import __version__
from twofold.cli.bench import bench
from twofold.cli.config import config
from twofold.cli.cost import cost
from twofold.cli.eval import eval
from twofold.cli.generate import generate
from twofold.cli.info import info
from twofold.cli.quickstart import quickstart
from twofold.cli.report import report
from twofold.cli.train import train
from twofold.spec import ConfigError, DataError, RunFolderError, TwofoldError

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

_RESUMED = ("quickstart", "train")
"""Verbs that go on where they were when they are given again."""

# Typer keeps the base of its usage errors private; every one of them is a sibling of BadParameter.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="twofold",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: twofold cost --preset gpt-300m",
)


def _verb(function: object, example: str) -> None:
    """Adds a verb named after its function, with an example at the end of its help."""
    app.command(epilog=f"Example: {example}")(function)  # type: ignore[type-var]


_verb(quickstart, "twofold quickstart")
_verb(train, "twofold train --preset gpt-tiny --set model.sharing=tied-kv --output runs/tied-kv")
_verb(eval, "twofold eval --model runs/quickstart/tied-kv")
_verb(generate, "twofold generate --model runs/quickstart/tied-kv --prompt 'The city'")
_verb(report, "twofold report runs/quickstart")
app.add_typer(bench, name="bench", epilog="Example: twofold bench decode --preset gpt-tiny --context 16384")
_verb(cost, "twofold cost --preset gpt-300m --context 8192")
_verb(config, "twofold config --preset gpt-tiny --set train.steps=200 > run.yaml")
_verb(info, "twofold info --json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code.

    Args:
        arguments: What follows the program's name. Default: the arguments of this process.

    Returns:
        0 done, 1 the run failed, 2 bad input, 130 interrupted.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given  # wherever it stands: it is usually added to the end of a failed command
    given = [argument for argument in given if argument != "--debug"]
    try:
        code = app(given, prog_name="twofold", standalone_mode=False)
    except _UsageError as error:
        return _usage_failed(error)
    except (ConfigError, DataError, RunFolderError) as error:
        return _failed(str(error), EXIT_BAD_INPUT, debug)
    except TwofoldError as error:  # a run that diverged, a measurement whose gate failed
        return _failed(str(error), EXIT_FAILED, debug)
    except (FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        path = error.filename2 or error.filename  # of a rename that fails, the target
        return _failed(f"{path}: {error.strerror}", EXIT_BAD_INPUT, debug)
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last resort of a program; --debug shows all of it
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        hint = "" if debug else " (run again with --debug for the traceback)"
        return _failed(f"{reason}{hint}", EXIT_FAILED, debug)
    if code == EXIT_INTERRUPTED:
        resumes = bool(given) and given[0] in _RESUMED
        _say("interrupted; run the same command again to resume" if resumes else "interrupted")
    return code if isinstance(code, int) else EXIT_DONE


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"twofold {__version__}")
        raise typer.Exit


@app.callback()
def _twofold(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere.")] = False,
) -> None:
    """Attention with shared projections, and a key/value cache that is really smaller."""


def _usage_failed(error: Exception) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":  # the help has been printed already
        return EXIT_BAD_INPUT
    context = getattr(error, "ctx", None)
    hint = f" (see {context.command_path} --help)" if context else ""
    return _failed(f"{error.format_message()}{hint}", EXIT_BAD_INPUT, debug=False)  # type: ignore[attr-defined]


def _failed(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    _say(f"error: {' '.join(message.split())}")
    return code


def _say(line: str) -> None:
    print(f"twofold: {line}", file=sys.stderr)

"""The program as a whole: exit codes, one-line errors, a light start."""

import json
import resource
import subprocess
import sys

import pytest
import typer

from twofold import __version__
from twofold.cli import app as program
from twofold.cli import main
from twofold.spec import ConfigError

PROGRAM = "import sys; from twofold.cli import main; code = main(sys.argv[1:]); "
HEAVY = ("torch", "transformers", "matplotlib", "numpy", "datasets", "tokenizers", "accelerate")


def run(*arguments, after="sys.exit(code)"):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + after, *arguments], capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def broken(monkeypatch):
    """Makes every verb raise an exception."""

    def break_with(error):
        def fail(*_, **__):
            raise error

        monkeypatch.setattr(program, "app", fail)

    return break_with


@pytest.mark.parametrize("arguments", [["--help"], ["cost", "--help"], ["config", "--preset", "gpt-tiny"]])
def test_a_verb_loads_only_what_it_needs(arguments):
    result = run(*arguments, after=f"print([name for name in {HEAVY} if name in sys.modules], code)")
    assert result.stdout.splitlines()[-1] == "[] 0"
    assert result.stderr == ""


def test_cost_needs_no_torch():
    result = run("cost", "--preset", "gpt-300m", "--json", after=f"assert not set({HEAVY}) & set(sys.modules)")
    assert result.returncode == 0, result.stderr
    assert len(json.loads(result.stdout)["variants"]) == 8


def test_help_answers_in_half_a_second():
    run("--help")  # the first start compiles the modules
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5  # time on a core, not on the wall


def test_every_verb_has_help_with_an_example(capsys):
    verbs = [command.name or command.callback.__name__ for command in program.app.registered_commands]
    assert {"cost", "config", "info"} <= set(verbs)
    for group in program.app.registered_groups:
        verbs.append(group.name)
        inner = group.typer_instance.registered_commands
        verbs += [f"{group.name} {command.name or command.callback.__name__}" for command in inner]
    assert {"bench", "bench decode"} <= set(verbs)
    for verb in verbs:
        assert main([*verb.split(), "--help"]) == 0
        assert f"Example: twofold {verb}" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"twofold {__version__}\n"


def test_no_arguments_show_the_help(capsys):
    assert main([]) == 2
    output = capsys.readouterr()
    assert "Usage: twofold" in output.out
    assert output.err == ""


def test_exit_code_and_message_leave_the_process():
    result = run("cost", "--preset", "gpt-3m")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("twofold: error: unknown preset 'gpt-3m'; did you mean 'gpt-300m'?")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cots"], "No such command 'cots'. Did you mean 'cost'? (see twofold --help)"),
        (["cost", "--contxt", "3"], "--contxt"),
        (["cost", "--preset", "gpt-tiny", "--context", "many"], "--context"),
        (["cost", "--preset", "gpt-tiny", "--context", "0"], "--context"),
        (["cost", "--preset"], "--preset"),
    ],
)
def test_usage_errors_are_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("twofold: error: ")
    assert output.err.count("\n") == 1
    assert message in output.err


def test_a_mistake_shows_its_traceback_with_debug_only(broken, capsys):
    broken(ConfigError("one\nthing is wrong"))
    assert main(["info"]) == 2
    assert capsys.readouterr().err == "twofold: error: one thing is wrong\n"
    for arguments in (["--debug", "info"], ["info", "--debug"]):
        assert main(arguments) == 2
        assert "Traceback" in capsys.readouterr().err


def test_a_failure_exits_with_1_and_says_how_to_see_more(broken, capsys):
    broken(RuntimeError("out of luck"))
    assert main(["info"]) == 1
    message = "twofold: error: RuntimeError: out of luck (run again with --debug for the traceback)\n"
    assert capsys.readouterr().err == message
    assert main(["info", "--debug"]) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.endswith("twofold: error: RuntimeError: out of luck\n")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), typer.Abort()])
@pytest.mark.parametrize("arguments", [["train"], ["--debug", "quickstart", "--seed", "3"]])
def test_an_interruption_says_how_to_go_on(error, arguments, broken, capsys):
    broken(error)
    assert main(arguments) == 130
    assert capsys.readouterr().err == "twofold: interrupted; run the same command again to resume\n"


@pytest.mark.parametrize("arguments", [["info"], ["report", "train"], []])
def test_what_begins_anew_is_only_interrupted(arguments, broken, capsys):
    broken(KeyboardInterrupt())
    assert main(arguments) == 130
    assert capsys.readouterr().err == "twofold: interrupted\n"


def test_an_interruption_inside_a_verb(monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("twofold.cost.model_cost", interrupt)
    assert main(["cost", "--preset", "gpt-tiny"]) == 130
    assert capsys.readouterr().err.endswith("twofold: interrupted\n")

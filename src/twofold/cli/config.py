"""`twofold config`: the complete settings of a run, as YAML."""

import ast
import inspect
import textwrap
from dataclasses import fields, is_dataclass
from typing import Annotated, Any

import typer

from twofold.cli.options import ConfigOption, JsonOption, PresetOption, SetOption, load_run
from twofold.cli.output import print_json
from twofold.spec import RunConfig, encode


def config(
    preset: PresetOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say above each setting what it means.")] = False,
    json: JsonOption = False,
) -> None:
    """Every setting of a run, with defaults filled in: a file to start from, or a check of one that you have."""
    run = load_run(preset, config, settings)
    if json:
        print_json(encode(run))
    else:
        print(to_yaml(run, explain=explain), end="")


def to_yaml(run: RunConfig, *, explain: bool = False) -> str:
    """The run as YAML that `--config` reads back to an equal run.

    Args:
        run: The run.
        explain: Put each setting's description above it, as a comment.
    """
    sections = []
    for section in fields(run):
        part = getattr(run, section.name)
        described = _field_docs(type(part)) if explain else {}
        lines = [f"{section.name}:"]
        for field in fields(part):
            comment = f"# {described[field.name]}\n" if field.name in described else ""
            setting = _setting(field.name, encode(getattr(part, field.name)))
            lines.append(textwrap.indent(f"{comment}{setting}", "  "))
        sections.append("\n".join(lines) + "\n")
    return "\n".join(sections)


def _setting(name: str, value: Any) -> str:
    import yaml

    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1_000)  # a list on one line
    return f"{name}: {text.rstrip().removesuffix('...').rstrip()}"


def _field_docs(config_type: type) -> dict[str, str]:
    """The docstring below each field of a dataclass, on one line. Python keeps them in the source only."""
    assert is_dataclass(config_type)
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(config_type))).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for field, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            docs[field.target.id] = " ".join(str(ast.literal_eval(after.value)).split())
    return docs

"""`twofold bench`: speed and memory measured on this machine."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twofold.cli.options import ConfigOption, JsonOption, PresetOption, SetOption, load_model, variants_of
from twofold.cli.output import print_json_line, print_table
from twofold.spec import ConfigError, ModelConfig

if TYPE_CHECKING:
    from twofold.bench import Case, Contender, Table, Task

bench = typer.Typer(no_args_is_help=True, help="Speed and memory measured on this machine, gated on correctness.")

VariantOption = Annotated[
    list[str] | None,
    typer.Option(
        "--variant", metavar="NAME", help="A variant. Repeatable. Default: the model as it is and the paper's eight."
    ),
]
ContextOption = Annotated[
    list[int] | None, typer.Option("--context", min=1, metavar="TOKENS", help="Tokens in the cache. Repeatable. [4096]")
]
BatchOption = Annotated[
    list[int] | None, typer.Option("--batch-size", min=1, help="Sequences together. Repeatable. [1]")
]
DtypeOption = Annotated[
    str, typer.Option("--dtype", metavar="NAME", help="Weights and cache: float32, bfloat16 or float16.")
]
ThreadsOption = Annotated[int, typer.Option("--threads", min=1, help="Threads. With one, CPU time decides.")]
PeersOption = Annotated[bool, typer.Option("--peers", help="Beside all the other libraries that are installed.")]
PeerOption = Annotated[
    list[str] | None, typer.Option("--peer", metavar="NAME", help="Beside one other library. Repeatable.")
]
RepeatsOption = Annotated[int, typer.Option("--repeats", min=1, help="Rounds, all contenders in turn in each.")]
OutputOption = Annotated[
    Path | None, typer.Option("--output", metavar="FILE", help="Write the tables as Markdown, and FILE.json beside it.")
]


@bench.callback()
def _bench() -> None:
    """Speed and memory measured on this machine, gated on correctness."""


@bench.command(epilog="Example: twofold bench decode --preset gpt-small --variant QKV --variant Q-K=V --peers")
def decode(
    preset: PresetOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    variant: VariantOption = None,
    context: ContextOption = None,
    batch_size: BatchOption = None,
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = 1,
    peers: PeersOption = False,
    peer: PeerOption = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that each round decodes.")] = 8,
    repeats: RepeatsOption = 5,
    output: OutputOption = None,
    json: JsonOption = False,
) -> None:
    """Time of one token through `generate` on the CPU, untrained models, all in turn. The last line printed is JSON."""
    model = load_model(preset or (None if config else "gpt-tiny"), config, settings)
    contenders = _contenders(model, variants_of(model, variant), _wanted(peers, peer), dtype, threads)
    _measure("decode", model, contenders, context, batch_size, dtype, threads, repeats, output, json, new_tokens)


@bench.command(epilog="Example: twofold bench prefill --preset gpt-small --variant QKV --variant Q-K=V --peers")
def prefill(
    preset: PresetOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    variant: VariantOption = None,
    context: ContextOption = None,
    batch_size: BatchOption = None,
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = 1,
    peers: PeersOption = False,
    peer: PeerOption = None,
    repeats: RepeatsOption = 3,
    output: OutputOption = None,
    json: JsonOption = False,
) -> None:
    """Time of a prompt up to its first new token on the CPU, untrained models, all in turn. The last line is JSON."""
    model = load_model(preset or (None if config else "gpt-tiny"), config, settings)
    contenders = _contenders(model, variants_of(model, variant), _wanted(peers, peer), dtype, threads)
    _measure("prefill", model, contenders, context, batch_size, dtype, threads, repeats, output, json, 1)


@bench.command(epilog="Example: twofold bench memory --preset gpt-small --context 16384 --variant QKV --variant Q-MQA")
def memory(
    preset: PresetOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    variant: VariantOption = None,
    context: ContextOption = None,
    batch_size: BatchOption = None,
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = 1,
    output: OutputOption = None,
    json: JsonOption = False,
) -> None:
    """Peak memory of a generation, a process for each variant, taken apart; and how many users fit. Ends with JSON."""
    model = load_model(preset or (None if config else "gpt-tiny"), config, settings)
    variants = variants_of(model, variant)

    from twofold.bench import measure_memory, memory_record, memory_tables

    cases = _cases(context, batch_size)
    peaks = [peak for case in cases for peak in measure_memory(variants, case, dtype=dtype, threads=threads, say=_say)]
    record = memory_record(peaks, model, variants, {"dtype": dtype, "threads": threads})
    _show(memory_tables(peaks, variants, dtype), record, output, json)


def _cases(contexts: Sequence[int] | None, batch_sizes: Sequence[int] | None) -> "list[Case]":
    from twofold.bench import Case

    return [
        Case(context=context, batch_size=batch_size)
        for batch_size in batch_sizes or [1]
        for context in contexts or [4_096]
    ]


def _wanted(every: bool, names: Sequence[str] | None) -> list[str]:
    """Peers that were asked for, each once."""
    from twofold.bench import PEERS

    return list(dict.fromkeys([*(PEERS if every else ()), *(names or ())]))


def _contenders(
    model: ModelConfig, variants: Mapping[str, ModelConfig], peers: Sequence[str], dtype: str, threads: int
) -> "list[Contender]":
    """Ours, and the peers that this machine and this shape allow; standard error names the others."""
    from twofold.bench import Twofold, make_peer, missing_packages

    contenders: list[Contender] = []
    first: Twofold | None = None
    for name, config in variants.items():
        ours = Twofold(name, config, dtype, like=first)
        first = first or ours
        contenders.append(ours)
    for name in peers:
        missing = missing_packages(name)
        if missing:
            print(f"twofold: left out {name}; to have it: pip install {' '.join(missing)}", file=sys.stderr)
            continue
        try:
            contenders.append(make_peer(name, model, dtype, threads))
        except ConfigError as error:
            print(f"twofold: left out {error}", file=sys.stderr)
    return contenders


def _measure(
    task: "Task",
    model: ModelConfig,
    contenders: "Sequence[Contender]",
    contexts: Sequence[int] | None,
    batch_sizes: Sequence[int] | None,
    dtype: str,
    threads: int,
    repeats: int,
    output: Path | None,
    json: bool,
    new_tokens: int,
) -> None:
    import torch

    from twofold.bench import available_memory, measure, measured_record, measured_tables

    torch.set_num_threads(threads)
    measured = measure(
        contenders,
        _cases(contexts, batch_sizes),
        task=task,
        new_tokens=new_tokens,
        rounds=repeats,
        memory_bytes=available_memory(),
        say=_say,
    )
    _show(measured_tables(measured, dtype), measured_record(measured, model, {"dtype": dtype}), output, json)


def _show(tables: "Sequence[Table]", record: dict[str, Any], output: Path | None, json: bool) -> None:
    """Tables, the file, and in the end one line of JSON."""
    if output is not None:
        from twofold.bench import write_result

        write_result(output, _command(), tables, record)
    if not json:
        for table in tables:
            print_table(table.title, table.columns, table.rows, table.notes)
            print()
    print_json_line(record)


def _command() -> str:
    import shlex

    return shlex.join(["twofold", *sys.argv[1:]])


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

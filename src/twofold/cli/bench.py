"""`twofold bench`: speed and memory measured on this machine."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twofold.cli.options import ConfigOption, JsonOption, PresetOption, SetOption, load_model, variants_of
from twofold.cli.output import print_json_line, print_table
from twofold.spec import ConfigError, ModelConfig

if TYPE_CHECKING:
    from twofold.bench import Case, Contender, Measured, Table

bench = typer.Typer(no_args_is_help=True, help="Speed and memory measured on this machine, gated on correctness.")

VariantOption = Annotated[
    list[str] | None,
    typer.Option(
        "--variant", metavar="NAME", help="A variant. Repeatable. Default: the model as it is and the paper's eight."
    ),
]
ContextOption = Annotated[
    list[int] | None,
    typer.Option("--context", min=1, metavar="TOKENS", help="Tokens in the cache. Repeatable. Default: 4096."),
]
BatchOption = Annotated[
    list[int] | None, typer.Option("--batch-size", min=1, help="Sequences together. Repeatable. Default: 1.")
]
DtypeOption = Annotated[
    str, typer.Option("--dtype", metavar="NAME", help="Weights and cache: float32, bfloat16 or float16.")
]
CacheDtypeOption = Annotated[
    str | None, typer.Option("--cache-dtype", metavar="NAME", help="int8 or int4 for our caches. Default: the dtype.")
]
WeightsOption = Annotated[
    str | None, typer.Option("--weights", metavar="NAME", help="int8 for our linear layers. Default: the dtype.")
]
ThreadsOption = Annotated[int, typer.Option("--threads", min=1, help="Threads. With one, CPU time decides.")]
PeersOption = Annotated[bool, typer.Option("--peers", help="Beside all the other libraries that are installed.")]
PeerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--peer", metavar="NAME", help="Beside one other library, or ours by `torch`'s attention. Repeatable."
    ),
]
RepeatsOption = Annotated[int, typer.Option("--repeats", min=1, help="Rounds, all contenders in turn in each.")]
OutputOption = Annotated[
    Path | None, typer.Option("--output", metavar="FILE", help="Write tables as Markdown, and data beside it as JSON.")
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
    cache_dtype: CacheDtypeOption = None,
    weights: WeightsOption = None,
    threads: ThreadsOption = 1,
    peers: PeersOption = False,
    peer: PeerOption = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that each round decodes.")] = 8,
    repeats: RepeatsOption = 5,
    output: OutputOption = None,
    json: JsonOption = False,
) -> None:
    """Time of one token through `generate` on the CPU, untrained models, all in turn. The last line printed is JSON."""
    model = _load(preset, config, settings)
    contenders = _contenders(
        model, variant, dtype, cache_dtype, weights=weights, by_torch=peers or "torch" in (peer or ())
    )
    contenders += _peers(model, peers, peer, dtype, threads)

    from twofold.bench import available_memory, measure

    _set_threads(threads)
    measured = measure(
        contenders,
        _cases(context, batch_size),
        new_tokens=new_tokens,
        rounds=repeats,
        memory_bytes=available_memory(),
        say=_say,
    )
    _show_measured(measured, model, dtype, cache_dtype, output, json, weights=weights)


@bench.command(epilog="Example: twofold bench prefill --preset gpt-small --variant QKV --variant Q-K=V --peers")
def prefill(
    preset: PresetOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    variant: VariantOption = None,
    context: ContextOption = None,
    batch_size: BatchOption = None,
    dtype: DtypeOption = "float32",
    cache_dtype: CacheDtypeOption = None,
    threads: ThreadsOption = 1,
    peers: PeersOption = False,
    peer: PeerOption = None,
    repeats: RepeatsOption = 3,
    output: OutputOption = None,
    json: JsonOption = False,
) -> None:
    """Time of a prompt up to its first new token on the CPU, untrained models, all in turn. The last line is JSON."""
    model = _load(preset, config, settings)
    contenders = _contenders(model, variant, dtype, cache_dtype, by_torch=peers or "torch" in (peer or ()))
    contenders += _peers(model, peers, peer, dtype, threads)

    from twofold.bench import available_memory, measure

    _set_threads(threads)
    cases, memory = _cases(context, batch_size), available_memory()
    measured = measure(contenders, cases, task="prefill", rounds=repeats, memory_bytes=memory, say=_say)
    _show_measured(measured, model, dtype, cache_dtype, output, json)


@bench.command(epilog="Example: twofold bench memory --preset gpt-small --context 16384 --variant QKV --variant Q-MQA")
def memory(
    preset: PresetOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    variant: VariantOption = None,
    context: ContextOption = None,
    batch_size: BatchOption = None,
    dtype: DtypeOption = "float32",
    cache_dtype: CacheDtypeOption = None,
    threads: ThreadsOption = 1,
    output: OutputOption = None,
    json: JsonOption = False,
) -> None:
    """Peak memory of a generation, a process for each variant, taken apart; and how many users fit. Ends with JSON."""
    model = _load(preset, config, settings)
    variants = variants_of(model, variant)

    from twofold.bench import measure_memory, memory_record, memory_tables

    peaks = [
        peak
        for case in _cases(context, batch_size)
        for peak in measure_memory(variants, case, dtype=dtype, cache_dtype=cache_dtype, threads=threads, say=_say)
    ]
    record = memory_record(peaks, model, variants, {"dtype": dtype, "cache_dtype": cache_dtype, "threads": threads})
    _show(memory_tables(peaks, variants, dtype, cache_dtype), record, output, json)


def _load(preset: str | None, config: Path | None, settings: Sequence[str] | None) -> ModelConfig:
    return load_model(preset or (None if config else "gpt-tiny"), config, settings)


def _contenders(
    model: ModelConfig,
    names: Sequence[str] | None,
    dtype: str,
    cache_dtype: str | None,
    *,
    weights: str | None = None,
    by_torch: bool,
) -> "list[Contender]":
    """Our variants, each by torch's attention too where that is wanted; they share what weights they can."""
    from twofold.bench import Twofold

    ours: list[Twofold] = []
    for name, config in variants_of(model, names).items():
        for attention in (None, "torch") if by_torch else (None,):
            title = name if attention is None else f"{name}, torch attention"
            like = ours[0] if ours else None
            contender = Twofold(
                title, config, dtype, cache_dtype=cache_dtype, weights=weights, like=like, attention=attention
            )
            ours.append(contender)
    return list(ours)


def _peers(model: ModelConfig, every: bool, names: Sequence[str] | None, dtype: str, threads: int) -> "list[Contender]":
    """The peers that this machine and this shape allow; standard error names the others."""
    from twofold.bench import PEERS, make_peer, missing_packages

    peers: list[Contender] = []
    libraries = [name for name in names or () if name != "torch"]
    for name in dict.fromkeys([*(PEERS if every else ()), *libraries]):
        missing = missing_packages(name)
        if missing:
            _say(f"twofold: left out {name}; to have it: pip install {' '.join(missing)}")
            continue
        try:
            peers.append(make_peer(name, model, dtype, threads))
        except ConfigError as error:
            _say(f"twofold: left out {error}")
    return peers


def _cases(contexts: Sequence[int] | None, batch_sizes: Sequence[int] | None) -> "list[Case]":
    from twofold.bench import Case

    return [
        Case(context=context, batch_size=batch_size)
        for batch_size in dict.fromkeys(batch_sizes or [1])
        for context in dict.fromkeys(contexts or [4_096])
    ]


def _set_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def _show_measured(
    measured: "Measured",
    model: ModelConfig,
    dtype: str,
    cache_dtype: str | None,
    output: Path | None,
    json: bool,
    *,
    weights: str | None = None,
) -> None:
    from twofold.bench import measured_record, measured_tables, spell_kinds

    record = measured_record(measured, model, {"dtype": dtype, "cache_dtype": cache_dtype, "weights": weights})
    _show(measured_tables(measured, spell_kinds(dtype, cache_dtype, weights)), record, output, json)


def _show(tables: "Sequence[Table]", record: Mapping[str, Any], output: Path | None, json: bool) -> None:
    """Tables, the file, and in the end one line of JSON."""
    if output is not None:
        from twofold.bench import write_result

        write_result(output, {shlex.join(["twofold", *sys.argv[1:]]): tables}, record)
    if not json:
        for table in tables:
            print_table(table.title, table.columns, table.rows, table.notes)
            print()
    print_json_line(record)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

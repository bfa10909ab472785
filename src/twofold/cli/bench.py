"""`twofold bench`: speed measured on this machine."""

from typing import Annotated

import typer

from twofold.cli.options import ConfigOption, JsonOption, PresetOption, SetOption, load_model, variants_of
from twofold.cli.output import print_json, print_table

bench = typer.Typer(no_args_is_help=True, help="Speed measured on this machine, gated on correctness.")


@bench.callback()
def _bench() -> None:
    """Speed measured on this machine, gated on correctness."""


@bench.command(epilog="Example: twofold bench decode --preset gpt-tiny --context 16384")
def decode(
    preset: PresetOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A variant. Repeatable. Default: the model as it is and the paper's eight."),
    ] = None,
    context: Annotated[int, typer.Option(min=1, metavar="TOKENS", help="Tokens in the cache.")] = 4_096,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds, all variants in turn in each.")] = 7,
    json: JsonOption = False,
) -> None:
    """Time of one decoding step on the CPU in float32 on one thread, untrained models, all variants interleaved."""
    model = load_model(preset or (None if config else "gpt-tiny"), config, settings)

    import torch

    from twofold.bench import measure_decode
    from twofold.cost import format_bytes

    torch.set_num_threads(1)
    result = measure_decode(variants_of(model, variant), context=context, batch_size=batch_size, repeats=repeats)
    if json:
        print_json(result)
        return
    rows = [
        [
            name,
            f"{row['milliseconds_per_token']['median']:.2f}",
            f"{row['milliseconds_per_token']['low']:.2f}-{row['milliseconds_per_token']['high']:.2f}",
            f"{row['tokens_per_second']['median']:.0f}",
            format_bytes(row["cache_bytes_used"]),
        ]
        for name, row in result["variants"].items()
    ]
    print_table(
        f"Decoding at {context:,} tokens of context, batch {batch_size}, float32, {result['threads']} thread",
        ["variant", "ms/token", "lowest-highest", "tokens/s", "cache"],
        rows,
        [f"{result['attention']}; this machine reads {result['read_bandwidth_gb_s']:.1f} GB/s (10^9 bytes)"],
    )

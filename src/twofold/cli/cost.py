"""`twofold cost`: what a model and its variants cost, computed from the config."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from twofold.cli.options import ConfigOption, JsonOption, PresetOption, SetOption, load_model, variants_of
from twofold.cli.output import print_json, print_table
from twofold.spec import RECENT_TOKENS, encode

if TYPE_CHECKING:
    from twofold.cost import CacheSize, Cost

DEFAULT_LENGTHS = (128, 512, 1024, 2048)


def cost(
    preset: PresetOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A variant of the model, such as Q-K=V, GQA-4 or Q-MQA. Repeatable. "
            "Default: the model as it is and the paper's eight.",
        ),
    ] = None,
    context: Annotated[int, typer.Option(min=1, metavar="TOKENS", help="Tokens in the cache.")] = 32_768,
    dtype: Annotated[
        str, typer.Option(metavar="NAME", help="Type of the cache: float32, bfloat16, float16, int8 or int4.")
    ] = "bfloat16",
    sequence_length: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help="Count the multiply-accumulates of a sequence this long. Repeatable. Default: 128 512 1024 2048.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Parameters, multiply-accumulates and exact cache bytes of a model and its variants, from the config alone."""
    from twofold.cost import model_cost

    model = load_model(preset, config, settings)
    lengths = sorted(set(sequence_length or DEFAULT_LENGTHS))
    costs = {
        name: model_cost(changed, context=context, dtype=dtype, sequence_lengths=lengths)
        for name, changed in variants_of(model, variant).items()
    }
    if json:
        rows = [_plain(name, row) for name, row in costs.items()]
        print_json({"context": context, "dtype": dtype, "baseline": "QKV", "variants": rows})
    else:
        _print(costs, context, dtype, lengths)


def _print(costs: "dict[str, Cost]", context: int, dtype: str, lengths: list[int]) -> None:
    from twofold.cost import format_count, format_percent

    print_table(
        f"Parameters and key/value cache in {dtype}, one sequence",
        ["variant", "parameters", "cache KiB/token", f"cache MiB at {context:,} tokens", "saved"],
        [
            [
                name,
                format_count(row.parameters.total),
                _in(row.cache_per_token, "KiB"),
                _in(row.cache_at_context, "MiB"),
                "none" if row.cache_reduction is None else format_percent(row.cache_reduction),
            ]
            for name, row in costs.items()
        ],
        _notes(costs, context),
    )
    print()
    print_table(
        "Multiply-accumulates of one forward pass, by tokens in the sequence",
        ["variant", *(f"{length:,}" for length in lengths)],
        [[name, *(format_count(row.macs[length].total) for length in lengths)] for name, row in costs.items()],
        ["Matrix products only; masks are not exploited (every token against every token)."],
    )


def _in(size: "CacheSize | None", unit: str) -> str:
    from twofold.cost import format_bytes

    return "none" if size is None else format_bytes(size.total, unit).removesuffix(f" {unit}")


def _notes(costs: "dict[str, Cost]", context: int) -> list[str]:
    model = next(iter(costs.values())).config
    if not model.causal:
        return ["The model is not causal: it does not generate, and keeps no cache."]
    notes = [
        "KiB and MiB are binary: 1,024 and 1,048,576 bytes.",
        "Saved is against the same model with three projections and a key/value head for each query head.",
    ]
    sizes = [row.cache_per_token for row in costs.values() if row.cache_per_token is not None]
    if any(size.scale_bytes for size in sizes):
        notes.append("A quantised cache includes a scale of 4 bytes for each token, key/value head and cached tensor.")
    if any(row.cache_at_context is not None and row.cache_at_context.recent_bytes for row in costs.values()):
        notes.append(f"An int4 cache at {context:,} tokens includes the last {RECENT_TOKENS} in float32 too.")
    if any(size.position_bytes for size in sizes):
        notes.append("With rope_mode unrotated the cache includes 4 bytes of position for each token and layer.")
    if model.positions == "learned" and context > model.max_position_embeddings:
        notes.append(
            f"The model's learned positions end at {model.max_position_embeddings:,} tokens; "
            f"{context:,} shows what a cache of that length would need."
        )
    return notes


def _plain(name: str, row: "Cost") -> dict[str, Any]:
    reduction = row.cache_reduction
    return {
        "name": name,
        "label": row.config.label,
        "sharing": encode(row.config.sharing),
        "num_key_value_heads": encode(row.config.num_key_value_heads),
        "parameters": {**encode(row.parameters), "total": row.parameters.total},
        "macs": {str(length): {**encode(macs), "total": macs.total} for length, macs in row.macs.items()},
        "cache_bytes_per_token": _plain_size(row.cache_per_token),
        "cache_bytes_at_context": _plain_size(row.cache_at_context),
        "cache_reduction": None if reduction is None else str(reduction),
        "cache_reduction_percent": None if reduction is None else float(100 * reduction),
    }


def _plain_size(size: "CacheSize | None") -> dict[str, int] | None:
    return None if size is None else {**encode(size), "total": size.total}

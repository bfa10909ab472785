"""`twofold eval`: perplexity of a saved model."""

from typing import Annotated

import typer

from twofold.cli.options import CacheDtypeOption, DeviceOption, DtypeOption, JsonOption, ModelOption, WeightsOption
from twofold.cli.output import print_json


def eval(
    model: ModelOption,
    source: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="wikipedia, a .txt or .jsonl file, or hf:NAME. Default: what it was trained on."
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences in one forward pass.")] = 8,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    cache_dtype: CacheDtypeOption = None,
    weights: WeightsOption = None,
    json: JsonOption = False,
) -> None:
    """Perplexity and bits per byte of a saved model over the held-out documents of a text."""
    from twofold.study import evaluate_language_model

    perplexity = evaluate_language_model(
        model,
        source=source,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        cache_dtype=cache_dtype,
        weights=weights,
    )
    if json:
        print_json(perplexity.to_dict())
        return
    print(f"perplexity      {perplexity.perplexity:.3f}")
    print(f"bits per byte   {perplexity.bits_per_byte:.4f}")
    print(f"loss            {perplexity.loss:.4f} nats per token")
    print(f"over            {perplexity.tokens:,} tokens, {perplexity.bytes:,} bytes of held-out documents")

"""`twofold generate`: text from a saved model, as it is written."""

import sys
import time
from typing import Annotated

import typer

from twofold.cli.options import CacheDtypeOption, DeviceOption, DtypeOption, ModelOption, WeightsOption
from twofold.spec import ConfigError


def generate(
    model: ModelOption,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="The text to continue.")] = "The history of",
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens to write. Default: 200, or what the positions leave.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among this many likeliest tokens; 0 for all.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Seeds the sampling.")] = 0,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    cache_dtype: CacheDtypeOption = None,
    weights: WeightsOption = None,
) -> None:
    """Continue a prompt, streaming the text; the speed follows on standard error."""
    from twofold.cache import check_cache_dtype
    from twofold.eval import sample_text
    from twofold.hf import load_model
    from twofold.kernels import check_weights, quantize_weights
    from twofold.study import model_folder
    from twofold.train import resolve_device, resolve_dtype

    check_cache_dtype(cache_dtype)
    check_weights(weights)
    target, precision = resolve_device(device), resolve_dtype(dtype)
    loaded, tokenizer = load_model(model_folder(model))
    if tokenizer is None:
        raise ConfigError(f"{model} has no tokenizer, so it cannot read a prompt")
    loaded.to(device=target, dtype=precision)  # type: ignore[call-arg]
    if weights is not None:
        quantize_weights(loaded)
    num_prompt = len(tokenizer(prompt, verbose=False)["input_ids"])
    if num_prompt == 0:
        raise ConfigError("the prompt is empty; give some text with --prompt")
    spec = loaded.config.spec
    room = spec.max_position_embeddings - num_prompt if spec.positions == "learned" else None
    if room is not None and room < (max_new_tokens or 1):
        raise ConfigError(
            f"the prompt's {num_prompt} tokens and {max_new_tokens or 1} new ones exceed the model's "
            f"{spec.max_position_embeddings} learned positions; shorten the prompt or --max-new-tokens"
        )
    num_new = max_new_tokens or (200 if room is None else min(200, room))

    print(prompt, end="", flush=True)
    started = time.perf_counter()
    text = sample_text(
        loaded,
        tokenizer,
        prompt,
        max_new_tokens=num_new,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        cache_dtype=cache_dtype,
        on_text=lambda piece: print(piece, end="", flush=True),
    )
    seconds = time.perf_counter() - started
    print()
    num_written = len(tokenizer(text, verbose=False)["input_ids"])
    print(f"about {num_written / seconds:.0f} tokens/s over {seconds:.1f} s", file=sys.stderr)

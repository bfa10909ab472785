"""Text that a model writes."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import TextStreamer

from twofold.hf import CACHE_NAME, TwofoldForCausalLM, cache_for


@torch.no_grad()
def sample_text(
    model: TwofoldForCausalLM,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int = 60,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    cache_dtype: str | None = None,
    on_text: Callable[[str], None] | None = None,
) -> str:
    """The model's continuation of a prompt, sampled with its cache; the same seed gives the same text.

    Args:
        model: A model in evaluation mode.
        tokenizer: Its Transformers tokenizer.
        prompt: The text to continue.
        max_new_tokens: Tokens to write at most.
        temperature: Divides the logits; 0 always takes the likeliest token.
        top_k: Sample among this many likeliest tokens; 0 for all.
        seed: Seeds the sampling; the caller's random state is left as it was.
        cache_dtype: `int8` or `int4` for a quantised cache; None for one of what the model computes.
        on_text: Called with each piece of text as soon as it stands.
    """
    inputs = tokenizer(prompt, return_tensors="pt", verbose=False).to(model.device)
    options: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        options = {"do_sample": True, "temperature": temperature, "top_k": top_k}
    if cache_dtype is not None:
        options[CACHE_NAME] = cache_for(model, cache_dtype)
    if on_text is not None:
        options["streamer"] = _Streamer(tokenizer, on_text)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):  # manual_seed seeds them all
        torch.manual_seed(seed)
        tokens = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.eos_token_id,
            **options,
        )
    written: str = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return written


class _Streamer(TextStreamer):
    """Hands on finished words instead of printing them."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:  # noqa: ARG002 - the name is Transformers'
        """Called by `generate`."""
        self.on_text(text)

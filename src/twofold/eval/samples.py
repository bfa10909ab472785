"""Text that a model writes."""

from typing import Any

import torch

from twofold.hf import TwofoldForCausalLM


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
    """
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    options: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        options = {"do_sample": True, "temperature": temperature, "top_k": top_k}
    with torch.random.fork_rng(devices=[]):
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

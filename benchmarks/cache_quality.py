"""What a quantised cache costs in quality: perplexity with a cache of floats, of int8 and of int4.

    .venv/bin/python benchmarks/cache_quality.py runs/quickstart/*/ path/to/llama path/to/llama.gguf

Takes run folders and model folders of twofold, which are measured on their own held-out text (or the Wikipedia articles
of the package), and Llama checkpoints, as a Transformers folder with safetensors or as a GGUF file (`pip install
gguf`), which are measured on `--tokens` tokens of those articles in windows of 512. Tokens are decoded one by one: in
one pass an int4 cache would give back every token of a window as floats. For Llama checkpoints the standard error of
each change is given too; every window is read through every cache, so it is that of the difference. The last line is
JSON.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, LlamaForCausalLM

from twofold.data import read_documents
from twofold.hf import from_llama
from twofold.models import LanguageModel
from twofold.records import RunFolder
from twofold.spec import DataConfig
from twofold.study import evaluate_language_model

QUANTIZED = ("int8", "int4")
DTYPES = (None, *QUANTIZED)
WINDOW = 512
TOLERANCE = 1e-4  # of the largest logit: float32 rounds differently in another order of sums

Measured = tuple[dict[str | None, float], dict[str, float]]
"""Perplexities by the cache's dtype, None for floats; and the standard errors of their changes in percent, if known."""


def measure_twofold(path: Path, _: int) -> Measured:
    found = [evaluate_language_model(path, device="cpu", cache_dtype=dtype).perplexity for dtype in DTYPES]
    return dict(zip(DTYPES, found, strict=True)), {}


@torch.no_grad()
def measure_llama(path: Path, num_tokens: int) -> Measured:
    place = {"gguf_file": path.name} if path.suffix == ".gguf" else {"use_safetensors": True}
    folder = path.parent if path.suffix == ".gguf" else path
    options = {"dtype": torch.float32, "local_files_only": True, **place}
    llama = LlamaForCausalLM.from_pretrained(folder, **options).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **place)
    text = "".join(read_documents(DataConfig()))[: 8 * num_tokens]
    tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"][: num_tokens // WINDOW * WINDOW])
    windows = tokens.view(-1, WINDOW)
    model = from_llama(llama)
    scores = llama(windows[:1]).logits
    error = ((model(windows[:1]) - scores).abs().max() / scores.abs().max()).item()
    if not error <= TOLERANCE:
        raise SystemExit(
            f"{path}: logits are off by {error:.2g} of the largest from Transformers'; nothing was measured"
        )
    losses = {dtype: window_losses(model, windows, dtype) for dtype in DTYPES}
    perplexities = {dtype: loss.mean().exp().item() for dtype, loss in losses.items()}
    changes = {dtype: losses[dtype] - losses[None] for dtype in QUANTIZED}
    return perplexities, {
        dtype: 100 * (change.mean().exp() * change.std() / len(change) ** 0.5).item()
        for dtype, change in changes.items()
    }


def window_losses(model: LanguageModel, windows: torch.Tensor, dtype: str | None) -> torch.Tensor:
    """Mean cross-entropy of each window in nats, (N,)."""
    cache = model.decoder.make_cache(dtype=dtype)
    total = torch.zeros(len(windows), dtype=torch.float64)
    for token, target in zip(windows[:, :-1].split(1, dim=1), windows[:, 1:].unbind(dim=1), strict=True):
        logits = model(token, cache=cache)[:, 0]  # (N, V)
        total += F.cross_entropy(logits, target, reduction="none")
    return total / (windows.shape[1] - 1)


def is_twofold(path: Path) -> bool:
    if RunFolder.exists(path):
        return True
    config = path / "config.json"
    return config.is_file() and json.loads(config.read_text(encoding="utf-8")).get("model_type") == "twofold"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=20_480, help="tokens on which a Llama is measured")
    arguments = parser.parse_args()
    results = {}
    print(f"{'model':40}{'float':>10}{'int8':>28}{'int4':>28}")
    for path in arguments.models:
        measure = measure_twofold if is_twofold(path) else measure_llama
        found, errors = measure(path, arguments.tokens)
        changes = {dtype: 100 * (found[dtype] / found[None] - 1) for dtype in QUANTIZED}
        cells = []
        for dtype in QUANTIZED:
            error = f" ± {errors[dtype]:.3f}" if dtype in errors else ""
            cells.append(f"{found[dtype]:.3f} ({changes[dtype]:+.3f}{error} %)")
        print(f"{str(path)[-40:]:40}{found[None]:>10.3f}{cells[0]:>28}{cells[1]:>28}", flush=True)
        perplexities = {dtype or "float": perplexity for dtype, perplexity in found.items()}
        results[str(path)] = {**perplexities, "change_percent": changes, "standard_error_percent": errors}
    print(json.dumps({"window": WINDOW, "results": results}))

"""What a quantised cache costs in quality: perplexity with a cache of floats, of int8 and of int4.

    .venv/bin/python benchmarks/cache_quality.py runs/quickstart/*/ path/to/llama path/to/llama.gguf

Takes run folders and model folders of twofold, which are measured on their own held-out text (or the Wikipedia
articles of the package), and Llama checkpoints, as a Transformers folder with safetensors or as a GGUF file (`pip
install gguf`), which are measured on `--tokens` tokens of those articles in windows of 512. Every key is read as the
cache stores it, the newest too, so these are the perplexities of decoding token by token. The last line is JSON.
"""

import argparse
import json
import math
from functools import partial
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from twofold.data import read_documents
from twofold.hf import from_llama
from twofold.models import LanguageModel, next_token_loss
from twofold.records import RunFolder
from twofold.spec import DataConfig
from twofold.study import evaluate_language_model

DTYPES = (None, "int8", "int4")
WINDOW = 512
TOLERANCE = 1e-4  # of the largest logit: float32 rounds differently in another order of sums


def measure_twofold(path: Path, _: int) -> dict[str, float]:
    return {str(dtype): evaluate_language_model(path, device="cpu", cache_dtype=dtype).perplexity for dtype in DTYPES}


@torch.no_grad()
def measure_llama(path: Path, num_tokens: int) -> dict[str, float]:
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
    return {str(dtype): perplexity(model, windows, dtype) for dtype in DTYPES}


def perplexity(model: LanguageModel, windows: torch.Tensor, dtype: str | None) -> float:
    make_cache = partial(model.decoder.make_cache, dtype=dtype)
    loss_sum, num_targets = 0.0, 0
    for window in windows.split(1):
        labels = torch.cat((window[:, 1:], torch.full_like(window[:, :1], -100)), dim=1)
        positions, documents = torch.arange(WINDOW)[None], torch.zeros_like(window)
        loss, targets = next_token_loss(
            model, input_ids=window, labels=labels, positions=positions, document_ids=documents, cache=make_cache()
        )
        loss_sum += loss.item()
        num_targets += targets
    return math.exp(loss_sum / num_targets)


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
    print(f"{'model':40}{'float':>10}{'int8':>20}{'int4':>20}")
    for path in arguments.models:
        measure = measure_twofold if is_twofold(path) else measure_llama
        found = measure(path, arguments.tokens)
        plain = found.pop("None")
        changes = {dtype: 100 * (value / plain - 1) for dtype, value in found.items()}
        cells = [f"{value:.3f} ({changes[dtype]:+.3f} %)" for dtype, value in found.items()]
        print(f"{str(path)[-40:]:40}{plain:>10.3f}{cells[0]:>20}{cells[1]:>20}", flush=True)
        results[str(path)] = {"float": plain, **found, "change_percent": changes}
    print(json.dumps({"window": WINDOW, "results": results}))

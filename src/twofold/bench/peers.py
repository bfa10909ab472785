"""Contenders from other libraries. Each imports its package only when it is built."""

import copy
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from twofold.bench.contender import (
    GATE_PROMPT,
    GATE_TOKENS,
    TOLERANCES,
    Case,
    Contender,
    Traffic,
    relative_error,
    step_traffic,
    torch_dtype,
)
from twofold.bench.generation import Transformers, peer_shape
from twofold.bench.llama_cpp import LlamaCpp
from twofold.cost import DTYPE_BYTES
from twofold.spec import ConfigError, ModelConfig, did_you_mean

# For each peer the packages that it needs beyond ours.
PEERS: dict[str, tuple[str, ...]] = {
    "transformers-gpt2": (),
    "transformers-llama": (),
    "x-transformers": ("x-transformers",),
    "llama.cpp-f32": ("llama-cpp-python", "gguf"),
    "llama.cpp-f16": ("llama-cpp-python", "gguf"),
    "llama.cpp-q8_0": ("llama-cpp-python", "gguf"),
}


def missing_packages(peer: str) -> list[str]:
    """Packages of a peer that are not installed.

    Raises:
        ConfigError: for a name that is none of `PEERS`.
    """
    if peer not in PEERS:
        raise ConfigError(f"unknown peer '{peer}'{did_you_mean(peer, PEERS)} Use one of {', '.join(PEERS)}")
    return [package for package in PEERS[peer] if not _is_installed(package)]


def make_peer(name: str, config: ModelConfig, dtype: str, threads: int) -> Contender:
    """A peer of a model's shape; see `PEERS`.

    Args:
        name: The peer.
        config: The shape.
        dtype: Type of weights and cache, where the peer leaves a choice.
        threads: Threads, where the peer does not take torch's.

    Raises:
        ConfigError: for an unknown name or where a package is missing.
    """
    missing = missing_packages(name)
    if missing:
        raise ConfigError(f"{name} needs {' and '.join(missing)}; run: pip install {' '.join(missing)}")
    family, _, kind = name.rpartition("-")
    if family == "llama.cpp":
        return LlamaCpp(kind, config, threads)
    if family == "transformers":
        return Transformers(kind, config, dtype)
    return XTransformers(config, dtype)


class XTransformers:
    """A decoder of x-transformers, with its flash attention, in a loop that passes its cache on.

    Args:
        config: The shape.
        dtype: Type of weights and cache.
    """

    name = "x-transformers"

    def __init__(self, config: ModelConfig, dtype: str) -> None:
        self.config, self.dtype = peer_shape(config, gated=False), dtype
        self.tolerance = TOLERANCES[dtype]
        self._model: Any = None
        self._cache: Any = None
        self._token = torch.zeros(1, 1, dtype=torch.long)

    def traffic(self, case: Case) -> Traffic:
        """Bytes that a step must move."""
        return step_traffic(self.config, case, weight_bytes=DTYPE_BYTES[self.dtype], dtype=self.dtype)

    def memory(self, case: Case) -> int:
        """Weights and cache."""
        return self.traffic(case).total

    def build(self, longest: int) -> None:
        """Makes the model."""
        from x_transformers import Decoder, TransformerWrapper

        torch.manual_seed(0)
        config = self.config
        heads = config.num_attention_heads
        model = TransformerWrapper(
            num_tokens=config.vocab_size,
            max_seq_len=longest,
            tie_embedding=True,
            attn_layers=Decoder(
                dim=config.hidden_size,
                depth=config.num_hidden_layers,
                heads=heads,
                attn_dim_head=config.hidden_size // heads,
                attn_flash=True,
            ),
        )
        self._model = model.to(torch_dtype(self.dtype)).eval()

    @torch.no_grad()
    def check(self) -> float:
        """Logits decoded token by token beside one pass."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.config.vocab_size, (1, GATE_PROMPT + GATE_TOKENS), generator=generator)
        _, cache = self._model(tokens[:, :GATE_PROMPT], return_intermediates=True)
        decoded = []
        for index in range(GATE_PROMPT, tokens.shape[1]):
            logits, cache = self._step(tokens[:, index : index + 1], cache)
            decoded.append(logits)
        return relative_error(torch.cat(decoded, dim=1), self._model(tokens)[:, GATE_PROMPT:])

    @torch.no_grad()
    def fill(self, case: Case) -> None:
        """Fills the cache with random keys and values."""
        self._token = torch.zeros(case.batch_size, 1, dtype=torch.long)
        _, cache = self._model(self._token, return_intermediates=True)
        generator = torch.Generator().manual_seed(0)
        for layer in cache.attn_intermediates:
            shape = (case.batch_size, *layer.cached_kv[0].shape[1:2], case.context, layer.cached_kv[0].shape[-1])
            layer.cached_kv = tuple(
                torch.randn(shape, generator=generator).to(layer.cached_kv[0].dtype) for _ in range(2)
            )
        cache.cache_length = case.context
        self._cache = cache

    def ways(self) -> Mapping[str, Callable[[int], None]]:
        """The loop."""
        return {"loop": self._decode}

    @torch.no_grad()
    def prefill(self, case: Case) -> None:
        """A prompt through the model."""
        self._model(torch.zeros(case.batch_size, case.context, dtype=torch.long), return_intermediates=True)

    def close(self) -> None:
        """Drops model and cache."""
        self._model = self._cache = None

    @torch.no_grad()
    def _decode(self, num_tokens: int) -> None:
        token, cache = self._token, copy.copy(self._cache)  # each step makes new tensors: nothing has to be taken back
        for _ in range(num_tokens):
            logits, cache = self._step(token, cache)
            token = logits.argmax(dim=-1)

    def _step(self, token: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        logits, cache = self._model(token, cache=cache, input_not_include_cache=True, return_intermediates=True)
        return logits, cache


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True

"""llama.cpp as a contender: GPT-2 of the same shape, written as GGUF, driven through llama-cpp-python."""

import ctypes
import tempfile
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import torch

from twofold.bench.contender import GATE_PROMPT, GATE_TOKENS, Case, Traffic, relative_error, step_traffic
from twofold.bench.generation import Transformers, peer_shape
from twofold.spec import ConfigError, ModelConfig

_FILL_TOKENS = 512
_BATCH_TOKENS = 512
# Bytes of one number; q8_0 keeps 32 of them in 34 bytes.
_ELEMENT = {"f32": Fraction(4), "f16": Fraction(2), "q8_0": Fraction(34, 32)}
_TOLERANCE = {"f32": 1e-3, "f16": 1e-2, "q8_0": 6e-2}


class LlamaCpp:
    """A GPT-2 of the same shape in llama.cpp, weights and cache of one kind, one sequence.

    Args:
        kind: `f32`, `f16` or `q8_0`, for the matrices and the cache; q8_0 caches need its flash attention.
        config: The shape.
        threads: Threads.
    """

    max_batch_size: int | None = 1  # several sequences in one cache would each pay for all of it

    def __init__(self, kind: str, config: ModelConfig, threads: int) -> None:
        self.name, self.kind, self.config = f"llama.cpp-{kind}", kind, peer_shape(config, gated=False)
        self.tolerance = _TOLERANCE[kind]
        inner = self.config.intermediate_size
        widths = (config.hidden_size // config.num_attention_heads, config.hidden_size, inner)
        if kind == "q8_0" and any(width is None or width % 32 for width in widths):
            head, hidden, inner = widths
            raise ConfigError(
                f"{self.name}: widths of head, model and MLP must be multiples of 32; "
                f"this model has {head}, {hidden} and {inner}"
            )
        self._threads = threads
        self._model: Any = None
        self._context: Any = None
        self._reference: Any = None
        self._num_past = 0

    def traffic(self, case: Case) -> Traffic:
        """Bytes that a step must move."""
        size = _ELEMENT[self.kind]
        return step_traffic(self.config, case, weight_bytes=size, dtype="float32", cache_element=size)

    def memory(self, case: Case) -> int:
        """Weights and cache."""
        return self.traffic(case).total

    def build(self, longest: int) -> None:
        """Makes a GPT-2 in Transformers, writes it as GGUF and loads that."""
        import llama_cpp as lib

        torch.manual_seed(0)
        maker = Transformers("gpt2", self.config, "float32")
        maker.build(longest)
        self._reference = maker.model
        _silence()
        lib.llama_backend_init()
        parameters = lib.llama_model_default_params()
        parameters.load_mode = lib.LLAMA_LOAD_MODE_NONE  # read, not mapped: the file goes at once
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_gpt2(self._reference, path, self.kind)
            self._model = lib.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise ConfigError(f"{self.name} does not load a model of this shape; leave it out")

    def check(self) -> float:
        """Logits that llama.cpp decodes, beside those of Transformers' model with the weights that it was given."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.config.vocab_size, (GATE_PROMPT + GATE_TOKENS,), generator=generator).tolist()
        self._open(len(tokens))
        self._decode(tokens[:GATE_PROMPT], 0)
        decoded = [self._decode([tokens[i]], i) for i in range(GATE_PROMPT, len(tokens))]
        with torch.no_grad():
            expected = self._reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, GATE_PROMPT:]
        self._reference = None
        return relative_error(torch.stack(decoded), expected)

    def fill(self, case: Case) -> None:
        """Passes some tokens through the model and repeats what they left in the cache up to the context.

        A prompt of the whole length would take minutes. What a step costs does not depend on what the cache holds.
        """
        import llama_cpp as lib

        self._open(case.context)
        piece = min(_FILL_TOKENS, case.context)
        self._decode([0] * piece, 0)
        memory = lib.llama_get_memory(self._context)
        size = lib.llama_state_seq_get_size(self._context, 0)
        state = (ctypes.c_uint8 * size)()
        lib.llama_state_seq_get_data(self._context, state, size, 0)
        filled = piece
        while filled < case.context:
            lib.llama_state_seq_set_data(self._context, state, size, 1)
            lib.llama_memory_seq_rm(memory, 1, min(piece, case.context - filled), -1)
            lib.llama_memory_seq_add(memory, 1, 0, -1, filled)
            lib.llama_memory_seq_cp(memory, 1, 0, -1, -1)
            lib.llama_memory_seq_rm(memory, 1, -1, -1)
            filled = min(filled + piece, case.context)
        self._num_past = lib.llama_memory_seq_pos_max(memory, 0) + 1
        assert self._num_past == case.context

    def ways(self) -> Mapping[str, Callable[[int], None]]:
        """The loop of llama.cpp's examples: decode a token, take the largest logit."""
        return {"loop": self._decode_tokens}

    def prefill(self, case: Case) -> None:
        """A prompt through the model."""
        import llama_cpp as lib

        if self._context is None or self._num_past != -case.context:
            self._open(case.context)
            self._num_past = -case.context  # the memory is taken, and empty
        lib.llama_memory_seq_rm(lib.llama_get_memory(self._context), 0, -1, -1)
        self._decode([0] * case.context, 0)

    def close(self) -> None:
        """Frees model and cache."""
        import llama_cpp as lib

        if self._context is not None:
            lib.llama_free(self._context)
        if self._model is not None:
            lib.llama_model_free(self._model)
        self._model = self._context = self._reference = None

    def _open(self, num_tokens: int) -> None:
        """A new empty cache for so many tokens and some more."""
        import llama_cpp as lib

        if self._context is not None:
            lib.llama_free(self._context)
        parameters = lib.llama_context_default_params()
        parameters.n_ctx = num_tokens + _FILL_TOKENS
        parameters.n_batch = parameters.n_ubatch = _BATCH_TOKENS
        parameters.n_seq_max, parameters.kv_unified = 2, True  # the second one serves to fill the first
        parameters.n_threads = parameters.n_threads_batch = self._threads
        kinds = {"f32": lib.GGML_TYPE_F32, "f16": lib.GGML_TYPE_F16, "q8_0": lib.GGML_TYPE_Q8_0}
        parameters.type_k = parameters.type_v = kinds[self.kind]
        flash = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if self.kind == "q8_0" else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        parameters.flash_attn_type = flash  # elsewhere it was slower on CPUs
        self._context = lib.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise ConfigError(f"{self.name} makes no cache of {num_tokens} tokens for this shape; leave it out")

    def _decode_tokens(self, num_tokens: int) -> None:
        import llama_cpp as lib

        token = 0
        for step in range(num_tokens):
            token = int(self._decode([token], self._num_past + step).argmax())
        lib.llama_memory_seq_rm(lib.llama_get_memory(self._context), 0, self._num_past, -1)

    def _decode(self, tokens: list[int], position: int) -> torch.Tensor:
        """Logits after the last of these tokens, (V,)."""
        import llama_cpp as lib

        for start in range(0, len(tokens), _BATCH_TOKENS):
            part = tokens[start : start + _BATCH_TOKENS]
            batch = lib.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for index, token in enumerate(part):
                batch.token[index], batch.pos[index] = token, position + start + index
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
                batch.logits[index] = start + index == len(tokens) - 1
            code = lib.llama_decode(self._context, batch)
            lib.llama_batch_free(batch)
            if code != 0:
                raise RuntimeError(f"llama_decode returned {code}")
        pointer = lib.llama_get_logits_ith(self._context, -1)
        logits = (ctypes.c_float * self.config.vocab_size).from_address(ctypes.addressof(pointer.contents))
        return torch.frombuffer(logits, dtype=torch.float32).clone()


def write_gpt2(model: Any, path: Path, kind: str) -> None:
    """Writes a Transformers GPT-2 as GGUF.

    Args:
        model: A `GPT2LMHeadModel` with tied embeddings.
        path: The file.
        kind: Type of the matrices: `f32`, `f16` or `q8_0`. Vectors and positions stay float32.
    """
    import gguf

    shape = model.config
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(shape.n_positions)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_inner or 4 * shape.n_embd)
    writer.add_head_count(shape.n_head)
    writer.add_layer_norm_eps(shape.layer_norm_epsilon)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    matrix = {
        "f32": gguf.GGMLQuantizationType.F32,
        "f16": gguf.GGMLQuantizationType.F16,
        "q8_0": gguf.GGMLQuantizationType.Q8_0,
    }[kind]
    for name, tensor in _gpt2_tensors(model):
        stored = matrix if tensor.ndim == 2 and name != "position_embd.weight" else gguf.GGMLQuantizationType.F32
        array = tensor.detach().float().contiguous().numpy()
        writer.add_tensor(name, gguf.quants.quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gpt2_tensors(model: Any) -> list[tuple[str, torch.Tensor]]:
    """GGUF's names, and matrices as (outputs, inputs), which Transformers' Conv1D keeps the other way round."""
    body = model.transformer
    tensors = [
        ("token_embd.weight", body.wte.weight),
        ("position_embd.weight", body.wpe.weight),
        ("output_norm.weight", body.ln_f.weight),
        ("output_norm.bias", body.ln_f.bias),
    ]
    for index, block in enumerate(body.h):
        norms = {"attn_norm": block.ln_1, "ffn_norm": block.ln_2}
        linears = {
            "attn_qkv": block.attn.c_attn,
            "attn_output": block.attn.c_proj,
            "ffn_up": block.mlp.c_fc,
            "ffn_down": block.mlp.c_proj,
        }
        for name, module in {**norms, **linears}.items():
            weight = module.weight.T if name in linears else module.weight
            tensors += [(f"blk.{index}.{name}.weight", weight), (f"blk.{index}.{name}.bias", module.bias)]
    return tensors


@cache
def _silence() -> Any:
    """llama.cpp writes pages to standard error; its failures reach us as return values.

    Returns the function that it calls instead, which lives as long as the cache of this one: C keeps a bare pointer.
    """
    import llama_cpp as lib

    silent = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(silent, ctypes.c_void_p(0))
    return silent

"""llama.cpp as a contender: GPT-2 of the same shape, written as GGUF, driven through llama-cpp-python."""

import ctypes
import struct
import tempfile
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from twofold.bench.contender import GATE_PROMPT, GATE_TOKENS, Case, Traffic, relative_error, step_traffic
from twofold.bench.generation import Transformers, peer_shape
from twofold.spec import ConfigError, ModelConfig

_FILL_TOKENS = 512
_BATCH_TOKENS = 512
_NUM_MEMORIES_AT = 8  # bytes from the start of a saved sequence
# Bytes of one number; q8_0 keeps 32 of them in 34 bytes.
_ELEMENT = {"f32": Fraction(4), "f16": Fraction(2), "q8_0": Fraction(34, 32)}
_TOLERANCE = {"f32": 1e-3, "f16": 1e-2, "q8_0": 6e-2}


class _Entry(NamedTuple):
    """A token of a batch."""

    token: int
    position: int
    row: int
    with_logits: bool


class LlamaCpp:
    """A GPT-2 of the same shape in llama.cpp, weights and cache of one kind.

    Args:
        kind: `f32`, `f16` or `q8_0`, for the matrices and the cache; q8_0 caches need its flash attention.
        config: The shape.
        threads: Threads.
    """

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
        self._rows = 1

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
        # Its tile instructions end the process when GCC 12 built it (ggml-org/llama.cpp#26954).
        has_tiles = hasattr(torch.cpu, "get_capabilities") and torch.cpu.get_capabilities().get("amx_tile")
        parameters.use_extra_bufts = not has_tiles
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
        state = self._save()
        filled = piece
        while filled < case.context:
            self._restore(state, 1)
            lib.llama_memory_seq_rm(memory, 1, min(piece, case.context - filled), -1)
            lib.llama_memory_seq_add(memory, 1, 0, -1, filled)
            lib.llama_memory_seq_cp(memory, 1, 0, -1, -1)
            lib.llama_memory_seq_rm(memory, 1, -1, -1)
            filled = min(filled + piece, case.context)
        if case.batch_size > 1:
            state = self._save(num_memories=case.batch_size)
            self._open(case.context, case.batch_size)
            for row in range(case.batch_size):
                self._restore(state, row)
        memory = lib.llama_get_memory(self._context)
        self._num_past = case.context
        assert all(lib.llama_memory_seq_pos_max(memory, row) + 1 == case.context for row in range(case.batch_size))

    def ways(self) -> Mapping[str, Callable[[int], None]]:
        """The loop of llama.cpp's examples: decode a token, take the largest logit."""
        return {"loop": self._decode_tokens}

    def prefill(self, case: Case) -> None:
        """A prompt through the model."""
        import llama_cpp as lib

        if self._context is None or self._num_past != -case.context or self._rows != case.batch_size:
            self._open(case.context, case.batch_size)
            self._num_past = -case.context  # the memory is taken, and empty
        for row in range(case.batch_size):
            lib.llama_memory_seq_rm(lib.llama_get_memory(self._context), row, -1, -1)
            self._decode([0] * case.context, 0, row)

    def close(self) -> None:
        """Frees model and cache."""
        import llama_cpp as lib

        if self._context is not None:
            lib.llama_free(self._context)
        if self._model is not None:
            lib.llama_model_free(self._model)
        self._model = self._context = self._reference = None

    def _open(self, num_tokens: int, rows: int = 1) -> None:
        """A new empty cache for so many tokens and some more of each sequence.

        Several sequences have a memory each, or each would pay for all. One has a second beside it in its own memory,
        which serves to fill it.
        """
        import llama_cpp as lib

        if self._context is not None:
            lib.llama_free(self._context)
        parameters = lib.llama_context_default_params()
        self._rows = rows
        parameters.n_ctx = rows * (num_tokens + _FILL_TOKENS)
        parameters.n_batch = parameters.n_ubatch = _BATCH_TOKENS
        parameters.n_seq_max, parameters.kv_unified = max(2, rows), rows == 1
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

        tokens = [0] * self._rows
        for step in range(num_tokens):
            position = self._num_past + step
            self._run([_Entry(token, position, row, True) for row, token in enumerate(tokens)])
            tokens = [int(self._logits(row).argmax()) for row in range(self._rows)]
        for row in range(self._rows):
            lib.llama_memory_seq_rm(lib.llama_get_memory(self._context), row, self._num_past, -1)

    def _decode(self, tokens: list[int], position: int, row: int = 0) -> torch.Tensor:
        """Logits after the last of these tokens of one sequence, (V,)."""
        last = len(tokens) - 1
        entries = [_Entry(token, position + index, row, index == last) for index, token in enumerate(tokens)]
        for start in range(0, len(entries), _BATCH_TOKENS):
            self._run(entries[start : start + _BATCH_TOKENS])
        return self._logits(-1).clone()

    def _run(self, entries: "list[_Entry]") -> None:
        """One call of llama.cpp for tokens of any sequences."""
        import llama_cpp as lib

        batch = lib.llama_batch_init(len(entries), 0, 1)
        batch.n_tokens = len(entries)
        for index, entry in enumerate(entries):
            batch.token[index], batch.pos[index], batch.logits[index] = entry.token, entry.position, entry.with_logits
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, entry.row
        code = lib.llama_decode(self._context, batch)
        lib.llama_batch_free(batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")

    def _logits(self, index: int) -> torch.Tensor:
        """A view of the logits of an entry of the last call, (V,); they are gone at the next."""
        import llama_cpp as lib

        pointer = lib.llama_get_logits_ith(self._context, index)
        logits = (ctypes.c_float * self.config.vocab_size).from_address(ctypes.addressof(pointer.contents))
        return torch.frombuffer(logits, dtype=torch.float32)

    def _save(self, num_memories: int = 1) -> bytearray:
        """What the first sequence has cached, for a context with so many memories.

        Their number is the third word; a block for each follows, of which an empty one is a length of 0.
        """
        import llama_cpp as lib

        state = bytearray(lib.llama_state_seq_get_size(self._context, 0) + 4 * (num_memories - 1))
        lib.llama_state_seq_get_data(self._context, (ctypes.c_uint8 * len(state)).from_buffer(state), len(state), 0)
        assert struct.unpack_from("<I", state, _NUM_MEMORIES_AT) == (1,)
        struct.pack_into("<I", state, _NUM_MEMORIES_AT, num_memories)
        return state

    def _restore(self, state: bytearray, row: int) -> None:
        """Gives a sequence what was saved."""
        import llama_cpp as lib

        buffer = (ctypes.c_uint8 * len(state)).from_buffer(state)
        if lib.llama_state_seq_set_data(self._context, buffer, len(state), row) != len(state):
            raise ConfigError(f"{self.name}: this version of llama.cpp does not take back the cache that it saved")


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

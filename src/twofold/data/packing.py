"""Packed sequences: documents one after another with no padding, and which of them each training step takes."""

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int64
from torch import Tensor
from torch.utils.data import Dataset

from twofold.data.prepare import TokenFile
from twofold.spec import DataError

IGNORE_INDEX = -100
"""The label of positions that have no target, as in PyTorch's cross-entropy."""

PADDING_DOCUMENT = -1
"""The document id of padding after the last token of a split."""


class PackedTokens(TypedDict):
    """Packed sequences as the model takes them; (B, T), or (T,) for one sequence."""

    input_ids: Int64[Tensor, "*B T"]
    """Tokens; padding repeats end-of-text."""
    labels: Int64[Tensor, "*B T"]
    """The NEXT token of each position: already shifted. -100 where a document ends, and on padding."""
    document_ids: Int64[Tensor, "*B T"]
    """The document of each token, numbered through the split; attention stays within equal ids. -1 on padding."""
    positions: Int64[Tensor, "*B T"]
    """Position within the document, from 0 at its first token in this sequence, so always below T."""


class PackedSequences(Dataset[PackedTokens]):
    """Cuts a token file into sequences of equal length; sequence i covers tokens i·T to i·T + T - 1.

    A token's target is the next token of its document, so the last token of a sequence is trained on what the next
    sequence begins with, and an end-of-text token has no target. Over all sequences every target occurs once. A
    document that is longer than the rest of its sequence goes on in the next one, with positions from 0 again,
    because its earlier tokens cannot be seen there.

    Args:
        token_file: The split.
        sequence_length: T, the tokens in a sequence.
        keep_partial: True pads the last, shorter sequence, so that no target is lost: for validation. False drops
            it: for training.

    Raises:
        DataError: for a split shorter than one sequence, unless partial sequences are kept.
    """

    def __init__(self, token_file: TokenFile, sequence_length: int, *, keep_partial: bool = False) -> None:
        if sequence_length < 1:
            raise DataError(f"sequence_length must be at least 1; got {sequence_length}")
        self.token_file = token_file
        self.sequence_length = sequence_length
        self.keep_partial = keep_partial
        self._tokens = token_file.tokens()
        self._starts = token_file.document_starts()
        # The last token of all ends a document and has no target: alone in a sequence it would be no use.
        whole, rest = divmod(token_file.num_tokens, sequence_length)
        self._num_sequences = whole + int(keep_partial and rest > 1)
        if self._num_sequences == 0:
            raise DataError(
                f"the split has {token_file.num_tokens} tokens, too few for one sequence of {sequence_length}; "
                "give more text or a shorter sequence_length"
            )

    def __len__(self) -> int:
        return self._num_sequences

    def __getitem__(self, index: int) -> PackedTokens:
        """Sequence `index`, shapes (T,)."""
        one = self.batch([index])
        return PackedTokens(
            input_ids=one["input_ids"][0],
            labels=one["labels"][0],
            document_ids=one["document_ids"][0],
            positions=one["positions"][0],
        )

    def batch(self, indices: Sequence[int]) -> PackedTokens:
        """Several sequences stacked, shapes (B, T); raises `IndexError` for one that does not exist."""
        chosen = np.asarray(indices, dtype=np.int64)
        if chosen.size and not (-len(self) <= chosen.min() and chosen.max() < len(self)):
            raise IndexError(f"sequence indices {list(indices)} must lie within {len(self)} sequences")
        chosen = chosen % len(self)
        first = chosen[:, None] * self.sequence_length  # (B, 1)
        index = first + np.arange(self.sequence_length + 1)  # (B, T + 1)
        last_index = self.token_file.num_tokens - 1
        tokens = self._tokens[np.minimum(index, last_index)].astype(np.int64)  # (B, T + 1)
        documents = np.searchsorted(self._starts, index, side="right") - 1  # (B, T + 1)
        positions = index - np.maximum(self._starts[documents], first)  # (B, T + 1)
        padding = index > last_index  # (B, T + 1)
        positions = np.where(padding, index - last_index - 1, positions)
        documents = np.where(padding, PADDING_DOCUMENT, documents)
        no_target = (documents[:, 1:] != documents[:, :-1]) | padding[:, :-1]  # (B, T)
        return PackedTokens(
            input_ids=_tensor(tokens[:, :-1]),
            labels=_tensor(np.where(no_target, IGNORE_INDEX, tokens[:, 1:])),
            document_ids=_tensor(documents[:, :-1]),
            positions=_tensor(positions[:, :-1]),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # A memory map pickles as its content; a worker process opens the files again instead.
        return _reopen, (self.token_file, self.sequence_length, self.keep_partial)


def batch_order(num_sequences: int, batch_size: int, seed: int) -> Callable[[int], list[int]]:
    """Says which sequences each training step takes, as a pure function of seed and step: nothing to save or resume.

    Every epoch is a permutation of its own. Steps take `batch_size` sequences in turn; where an epoch's last ones do
    not fill a step, the next epoch begins in the same step, so that every epoch visits every sequence once.

    Args:
        num_sequences: Sequences in the data set.
        batch_size: Sequences in one optimiser step, over all processes.
        seed: Chooses the permutations.

    Returns:
        A function from step (from 0) to `batch_size` sequence indices.

    Raises:
        DataError: for a count below 1, or (from the function) a negative step.
    """
    if num_sequences < 1 or batch_size < 1:
        raise DataError(f"num_sequences and batch_size must be at least 1; got {num_sequences} and {batch_size}")

    @lru_cache(maxsize=2)
    def permutation(epoch: int) -> npt.NDArray[np.int64]:
        digest = hashlib.sha256(f"{seed}:{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        order: npt.NDArray[np.int64] = torch.randperm(num_sequences, generator=generator).numpy()
        return order

    def sequences_of(step: int) -> list[int]:
        if step < 0:
            raise DataError(f"steps count from 0; got {step}")
        chosen: list[int] = []
        while len(chosen) < batch_size:
            epoch, offset = divmod(step * batch_size + len(chosen), num_sequences)
            chosen += permutation(epoch)[offset : offset + batch_size - len(chosen)].tolist()
        return chosen

    return sequences_of


def _tensor(values: npt.NDArray[np.int64]) -> Int64[Tensor, "B T"]:
    return torch.from_numpy(np.ascontiguousarray(values))


def _reopen(token_file: TokenFile, sequence_length: int, keep_partial: bool) -> PackedSequences:
    return PackedSequences(token_file, sequence_length, keep_partial=keep_partial)

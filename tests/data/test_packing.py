"""Packed sequences against a slow reference written token by token, and the order of training."""

from collections import Counter
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tests.pipes import through_a_pipe
from twofold.data import IGNORE_INDEX, PADDING_DOCUMENT, PackedSequences, TokenFile, batch_order
from twofold.spec import DataError

END = 999


@pytest.fixture(scope="module")
def write_tokens(tmp_path_factory):
    """Writes a token file with documents of the given lengths, end-of-text included; token i is i elsewhere."""

    def write(lengths):
        path = tmp_path_factory.mktemp("tokens") / "x.bin"
        tokens = np.arange(sum(lengths), dtype=np.uint16)
        tokens[np.cumsum(lengths) - 1] = END
        tokens.tofile(path)
        file = TokenFile(
            path=path, dtype="uint16", num_tokens=len(tokens), num_documents=len(lengths), num_bytes=0, sha256=""
        )
        (np.cumsum(lengths) - lengths).astype(np.int64).tofile(file.starts_path)
        return file

    return write


def reference(lengths, sequence_length):
    """What packing must give: one list of (token, label, document, position) for each sequence."""
    stream = []
    for document, length in enumerate(lengths):
        begin = len(stream)
        for index in range(begin, begin + length):
            last = index == begin + length - 1
            target = END if index == begin + length - 2 else index + 1
            stream.append([END if last else index, IGNORE_INDEX if last else target, document])
    stream += [[END, IGNORE_INDEX, PADDING_DOCUMENT]] * (-len(stream) % sequence_length)
    sequences = [stream[begin : begin + sequence_length] for begin in range(0, len(stream), sequence_length)]
    for sequence in sequences:
        for place, entry in enumerate(sequence):
            same = place > 0 and sequence[place - 1][2] == entry[2]
            entry_position = sequence[place - 1][3] + 1 if same else 0
            sequence[place] = [*entry, entry_position]
    return torch.tensor(sequences)  # (num_sequences, T, 4)


KEYS = ("input_ids", "labels", "document_ids", "positions")


@given(lengths=st.lists(st.integers(2, 12), min_size=1, max_size=12), sequence_length=st.integers(2, 9))
def test_every_sequence_agrees_with_the_reference(write_tokens, lengths, sequence_length):
    packed = PackedSequences(write_tokens(lengths), sequence_length, keep_partial=True)
    expected = reference(lengths, sequence_length)
    if sum(lengths) % sequence_length == 1:  # one end-of-text token alone has no target
        expected = expected[:-1]
    assert len(packed) == len(expected)
    batch = packed.batch(range(len(packed)))
    for index, key in enumerate(KEYS):
        assert batch[key].dtype == torch.int64
        assert torch.equal(batch[key], expected[..., index]), key
    targets = batch["labels"][batch["labels"] != IGNORE_INDEX]
    stream = [
        END if end - 1 == i else i
        for end, n in zip(np.cumsum(lengths), lengths, strict=True)
        for i in range(end - n + 1, end)
    ]
    assert targets.tolist() == stream, "every target once, and in order"


def test_an_example_by_hand(write_tokens):
    packed = PackedSequences(write_tokens([3, 7]), 4, keep_partial=True)
    assert [{key: value.tolist() for key, value in packed[index].items()} for index in range(3)] == [
        {
            "input_ids": [0, 1, END, 3],
            "labels": [1, END, -100, 4],
            "document_ids": [0, 0, 0, 1],
            "positions": [0, 1, 2, 0],
        },
        {"input_ids": [4, 5, 6, 7], "labels": [5, 6, 7, 8], "document_ids": [1] * 4, "positions": [0, 1, 2, 3]},
        {
            "input_ids": [8, END, END, END],
            "labels": [END, -100, -100, -100],
            "document_ids": [1, 1, -1, -1],
            "positions": [0, 1, 0, 1],
        },
    ]


def test_training_drops_the_partial_sequence_only(write_tokens):
    file = write_tokens([3, 7, 5])
    kept, dropped = PackedSequences(file, 4, keep_partial=True), PackedSequences(file, 4)
    assert (len(kept), len(dropped)) == (4, 3)
    for index in range(3):
        assert all(torch.equal(kept[index][key], dropped[index][key]) for key in KEYS)
    assert not (dropped.batch(range(3))["document_ids"] == PADDING_DOCUMENT).any()


def test_batches_may_be_in_any_order_and_indices_are_checked(write_tokens):
    packed = PackedSequences(write_tokens([9, 9, 9]), 5)
    batch = packed.batch([4, 0, 4])
    for place, index in enumerate([4, 0, 4]):
        assert all(torch.equal(batch[key][place], packed[index][key]) for key in KEYS)
    assert torch.equal(packed[-1]["input_ids"], packed[4]["input_ids"])
    for index in (5, -6):
        with pytest.raises(IndexError, match="5 sequences"):
            packed[index]


def test_too_little_text_for_a_sequence(write_tokens):
    file = write_tokens([3, 4])
    assert len(PackedSequences(file, 8, keep_partial=True)) == 1
    with pytest.raises(DataError, match="7 tokens, too few for one sequence of 8"):
        PackedSequences(file, 8)


def test_large_ids_survive_and_batches_do_not_touch_the_file(tmp_path):
    tokens = np.array([65_535, 0, 65_534, 65_535], dtype=np.uint16)
    tokens.tofile(tmp_path / "x.bin")
    np.array([0], dtype=np.int64).tofile(tmp_path / "x.starts.bin")
    file = TokenFile(path=tmp_path / "x.bin", dtype="uint16", num_tokens=4, num_documents=1, num_bytes=0, sha256="")
    item = PackedSequences(file, 4)[0]
    assert item["input_ids"].tolist() == [65_535, 0, 65_534, 65_535]
    item["input_ids"].zero_()
    assert np.array_equal(file.tokens(), tokens)


def test_worker_processes_reopen_the_file(write_tokens):
    packed = PackedSequences(write_tokens([500] * 40), 8)
    assert len(ForkingPickler.dumps(packed)) < 1_000, "the tokens are not in it"
    assert torch.equal(through_a_pipe(packed)[3]["labels"], packed[3]["labels"])
    batches = list(DataLoader(packed, batch_size=4, sampler=[5, 2, 7, 1]))
    assert len(batches) == 1
    assert torch.equal(batches[0]["input_ids"], packed.batch([5, 2, 7, 1])["input_ids"])


@given(num_sequences=st.integers(1, 40), batch_size=st.integers(1, 50), seed=st.integers(0, 2**40))
def test_every_epoch_visits_every_sequence_once(num_sequences, batch_size, seed):
    order = batch_order(num_sequences, batch_size, seed)
    steps = -(-3 * num_sequences // batch_size)
    flat = []
    for step in range(steps):
        chosen = order(step)
        assert len(chosen) == batch_size
        flat += chosen
    for epoch in range(3):
        assert Counter(flat[epoch * num_sequences : (epoch + 1) * num_sequences]) == Counter(range(num_sequences))


def test_order_depends_on_seed_and_step_only():
    order = batch_order(100, 7, seed=3)
    forwards = [order(step) for step in range(60)]
    assert [batch_order(100, 7, seed=3)(step) for step in reversed(range(60))] == forwards[::-1]
    assert batch_order(100, 7, seed=4)(0) != forwards[0]
    by_one = batch_order(100, 1, seed=3)
    assert [by_one(step)[0] for step in range(420)] == [index for batch in forwards for index in batch]
    first, second = ([by_one(epoch * 100 + place)[0] for place in range(100)] for epoch in range(2))
    assert first != second, "epochs differ"
    assert forwards[0] == [28, 17, 10, 40, 8, 6, 83], "the same on every machine"


def test_order_refuses_nonsense():
    for counts in ((0, 4), (4, 0)):
        with pytest.raises(DataError, match="at least 1"):
            batch_order(*counts, seed=0)
    with pytest.raises(DataError, match="count from 0"):
        batch_order(4, 2, seed=0)(-1)

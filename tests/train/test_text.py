"""Language modelling in the loop: packed documents, learning, mixed precision."""

import itertools
import math

import pytest
import torch
from accelerate import Accelerator

from tests.tiny_runs import MODEL, make_documents, make_run, prepare
from twofold.data import IGNORE_INDEX, PackedSequences
from twofold.models import LanguageModel, next_token_loss
from twofold.records import RunFolder
from twofold.spec import ModelConfig
from twofold.train import text_task, train

VARIANTS = {
    "qkv": {},
    "tied-qk": {"sharing": "tied-qk"},
    "tied-qkv": {"sharing": "tied-qkv", "positions": "sinusoidal"},
    "q-gqa-2": {"sharing": "tied-kv", "num_key_value_heads": 2},
    "relative": {"sharing": "tied-kv", "positions": "rope"},
    "unrotated": {"sharing": "tied-kv", "positions": "rope", "rope_mode": "unrotated"},
    "decoupled": {"sharing": "tied-kv", "positions": "rope", "rope_mode": "decoupled", "qk_rope_head_dim": 4},
    "window": {"sliding_window": 3},
}


def make_model(config):
    torch.manual_seed(0)
    return LanguageModel(config)


def start(tmp_path, text, config):
    """Trains a model in the loop and returns it with its folder."""
    module = make_model(config.model)
    sequences = PackedSequences(text.train, config.data.sequence_length)
    folder = RunFolder.create(tmp_path / "run", config, text.data_sha256)
    task = make_task(module, sequences, config.train)
    with folder.writing():
        train(task, config.train, folder, accelerator=Accelerator(cpu=True))
    return module, folder


def make_task(module, sequences, config):
    return text_task(module, sequences, config, evaluate=lambda _: {"validation_loss": 0.0}, save_model=lambda *_: None)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_packed_batch_gives_the_loss_of_its_documents_one_by_one(variant, tmp_path):
    text = prepare(tmp_path, make_documents(12, longest=4))
    sequences = PackedSequences(text.train, 64, keep_partial=True)
    config = ModelConfig(**{**MODEL, "max_position_embeddings": 64, "initializer_range": 0.4, **VARIANTS[variant]})
    module = make_model(config).double()
    loss, num_targets = next_token_loss(module, **sequences.batch(range(len(sequences))))

    tokens = torch.from_numpy(text.train.tokens().astype("int64"))
    starts = [*text.train.document_starts().tolist(), len(tokens)]
    expected, count = 0.0, 0
    for first, end in itertools.pairwise(starts):
        cuts = sorted({first, end, *(cut for cut in range(0, end, 64) if cut > first)})
        for begin, stop in itertools.pairwise(cuts):
            targets = tokens[begin + 1 : min(stop + 1, end)]
            logits = module(tokens[None, begin:stop])[0, : len(targets)]
            expected += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
            count += len(targets)
    assert num_targets == count
    assert sequences.batch([0])["document_ids"].unique().numel() > 2  # documents really share a sequence
    assert loss.item() == pytest.approx(expected, rel=1e-10)


def test_a_document_does_not_see_its_neighbours(tmp_path):
    sequences = PackedSequences(prepare(tmp_path, make_documents()).train, 32)
    batch = sequences.batch([1])
    module = make_model(ModelConfig(**{**MODEL, "initializer_range": 0.4})).double()
    inputs = {"positions": batch["positions"], "documents": batch["document_ids"]}
    changed = batch["input_ids"].clone()
    neighbours = batch["document_ids"] != batch["document_ids"][0, -1]
    assert neighbours.any()
    changed[neighbours] = (changed[neighbours] + 1) % 257
    before, after = (module(tokens, **inputs) for tokens in (batch["input_ids"], changed))
    assert torch.equal(before[~neighbours], after[~neighbours])
    assert not torch.allclose(before[neighbours], after[neighbours])


def test_accumulation_changes_no_weight_where_parts_have_unequal_targets(tmp_path):
    text = prepare(tmp_path, make_documents())
    trained = []
    for parts in (1, 4):
        config = make_run("unread.txt", steps=3, batch_size=8, gradient_accumulation=parts)
        trained.append(start(tmp_path / str(parts), text, config))
    sequences = PackedSequences(text.train, 16)
    order = make_task(make_model(config.model), sequences, config.train).batches(0)
    assert [len(part["labels"]) for part in order] == [2] * 4
    assert len({int((part["labels"] != IGNORE_INDEX).sum()) for part in order}) > 1
    (whole, first), (parts, second) = trained
    for (name, ours), theirs in zip(whole.named_parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5, msg=name)
    losses = [[row["loss"] for row in folder.metrics() if "loss" in row] for folder in (first, second)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_repeated_pattern_is_learned_to_almost_no_loss(tmp_path):
    pattern = "abcdefgh"
    documents = [(pattern * 3)[start : start + 15] for start in range(8)]  # 16 tokens with the end of text
    config = make_run("unread.txt", model={"sharing": "tied-kv"}, steps=150, batch_size=6)
    _, folder = start(tmp_path, prepare(tmp_path, documents), config)
    losses = [row["loss"] for row in folder.metrics() if "loss" in row]
    assert losses[0] == pytest.approx(math.log(257), abs=0.1)  # it knows nothing yet
    assert losses[-1] < 0.02


def test_bfloat16_computes_narrow_and_keeps_weights_wide(tmp_path):
    text = prepare(tmp_path, make_documents())
    dtypes = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, _, output: dtypes.append(output.dtype) if isinstance(module, torch.nn.Linear) else None
    )
    try:
        settings = {"steps": 4, "checkpoint_every": 2}
        narrow, folder = start(tmp_path / "bf16", text, make_run("unread.txt", precision="bf16", **settings))
        assert set(dtypes) == {torch.bfloat16}
        dtypes.clear()
        _, exact = start(tmp_path / "fp32", text, make_run("unread.txt", **settings))
        assert set(dtypes) == {torch.float32}
    finally:
        handle.remove()
    assert {parameter.dtype for parameter in narrow.parameters()} == {torch.float32}
    losses = [[row["loss"] for row in run.metrics() if "loss" in row] for run in (folder, exact)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


def test_batches_depend_on_the_seed_alone(tmp_path):
    sequences = PackedSequences(prepare(tmp_path, make_documents()).train, 16)

    def tokens(seed):
        config = make_run("unread.txt", seed=seed)
        task = make_task(make_model(config.model), sequences, config.train)
        return torch.stack([task.batches(step)[0]["input_ids"] for step in (0, 1, 2)])

    assert torch.equal(tokens(0), tokens(0))
    assert not torch.equal(tokens(0), tokens(1))

"""The quickstart's runs: what they are, side by side in processes, and the folder that they share."""

import json
from dataclasses import fields, replace

import pytest

from tests.study import dying
from tests.tiny_runs import make_documents, make_run, write_text
from twofold.data import prepare_text
from twofold.records import RunFolder, exclusive, read_json
from twofold.report import SEED_RECORD
from twofold.spec import RunConfig, RunFolderError, TwofoldError, decode
from twofold.study import (
    StudyError,
    quickstart,
    quickstart_configs,
    record_seeds,
    run_quickstart,
    text_cache_folder,
    train_side_by_side,
)

LABELS = {
    "qkv": "QKV",
    "tied-qk": "Q=K-V",
    "tied-kv": "Q-K=V",
    "tied-qkv": "Q=K=V",
    "gqa-4": "GQA-4",
    "mqa": "MQA",
    "q-gqa-4": "Q-GQA-4",
    "q-mqa": "Q-MQA",
    "q-gqa-4-decoupled": "Q-GQA-4 decoupled",
}

pytestmark = pytest.mark.filterwarnings("ignore:.*is resumed under another code or environment")


def test_nine_variants_with_the_papers_names():
    assert {slug: config.model.label for slug, config in quickstart_configs().items()} == LABELS


def test_sharing_and_heads_alone_set_the_eight_apart():
    configs = quickstart_configs()
    baseline = configs["qkv"].model
    assert baseline.positions == "rope"
    allowed = {"sharing", "num_key_value_heads", "rope_mode"}
    for slug, config in configs.items():
        changed = {f.name for f in fields(baseline) if getattr(config.model, f.name) != getattr(baseline, f.name)}
        decoupled = slug.endswith("decoupled")
        assert changed <= allowed | ({"qk_rope_head_dim"} if decoupled else set()), slug
        one_tensor = config.model.layer_sharing(0).ties_key_value
        assert config.model.rope_mode == ("decoupled" if decoupled else "relative" if one_tensor else None), slug


def test_grouped_heads_are_neither_all_nor_one():
    configs = quickstart_configs()
    assert 1 < configs["gqa-4"].model.num_key_value_heads == 4 < configs["gqa-4"].model.num_attention_heads
    assert configs["mqa"].model.num_key_value_heads == configs["q-mqa"].model.num_key_value_heads == 1


@pytest.mark.parametrize("seed", [0, 3])
def test_all_have_the_same_data_order_and_seed(seed):
    configs = quickstart_configs(seed)
    assert {config.train.seed for config in configs.values()} == {seed}
    assert len({config.train for config in configs.values()}) == 1
    assert len({config.data for config in configs.values()}) == 1
    assert replace(configs["qkv"].train, seed=0) == quickstart_configs()["qkv"].train


def tiny(config: RunConfig, source, **train) -> RunConfig:
    """A quickstart config on a model and a text so small that a second trains it."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "head_dim": 2, "intermediate_size": 16}
    if config.model.qk_rope_head_dim:
        sizes["qk_rope_head_dim"] = 2
    return RunConfig(
        model=replace(config.model, **sizes),
        data=make_run(source).data,
        train=replace(config.train, steps=4, warmup_steps=2, log_every=1, checkpoint_every=2, **train),
    )


def losses(path):
    return [(row["step"], row.get("loss"), row.get("validation_loss")) for row in RunFolder.open(path).metrics()]


def test_side_by_side_twice_with_one_seed_and_a_run_that_fails(tmp_path):
    source = write_text(tmp_path / "text.txt", make_documents())
    configs = quickstart_configs(seed=7)
    chosen = {slug: tiny(configs[slug], source) for slug in ("tied-kv", "q-gqa-4-decoupled")}
    failing = {"qkv": tiny(configs["qkv"], source, learning_rate=1e30, max_grad_norm=0.0)}
    seen = []
    with pytest.raises(StudyError, match=r"^qkv failed: the loss is nan at step \d; .*lower train.learning_rate$"):
        train_side_by_side({**failing, **chosen}, tmp_path / "first", num_workers=2, on_metrics=seen.append)
    assert issubclass(StudyError, TwofoldError)
    assert set(seen[-1]) == {"qkv", "tied-kv", "q-gqa-4-decoupled"}
    assert seen[-1]["tied-kv"][-1]["step"] == 4
    failed = RunFolder.open(tmp_path / "first" / "qkv")
    assert not failed.is_finished
    assert failed.error()["type"] == "TrainingError"

    train_side_by_side(chosen, tmp_path / "second", num_workers=2)
    for slug in chosen:
        first, second = (RunFolder.open(tmp_path / name / slug) for name in ("first", "second"))
        assert first.result()["validation"] == second.result()["validation"]
        assert losses(first.path) == losses(second.path)
        weights = [(run.model_path / "model.safetensors").read_bytes() for run in (first, second)]
        assert weights[0] == weights[1]
        assert first.result()["sample"] == second.result()["sample"]


def test_a_process_that_dies_takes_no_neighbour_with_it_and_its_run_is_resumed(tmp_path, monkeypatch):
    source = write_text(tmp_path / "text.txt", make_documents())
    configs = {slug: tiny(quickstart_configs()[slug], source) for slug in ("qkv", "mqa", "tied-kv")}
    monkeypatch.setattr(quickstart, "train_language_model", dying.train_or_die)
    with pytest.raises(StudyError, match=r"^mqa failed: its process died twice: killed, most likely for .* memory$"):
        train_side_by_side(configs, tmp_path, num_workers=3)
    assert (tmp_path / "qkv.died").exists()
    for slug in ("qkv", "tied-kv"):
        assert RunFolder.open(tmp_path / slug).is_finished
    assert [step for step, *_ in losses(tmp_path / "qkv")] == [1, 2, 3, 4, 4]
    assert RunFolder.open(tmp_path / "mqa").error()["type"] == "WorkerError"


def test_a_users_mistake_in_a_run_is_raised_as_it_is():
    mistake = RunFolderError("runs/a holds another run")
    with pytest.raises(RunFolderError, match=r"^runs/a holds another run$"):
        quickstart._raise_failures({"qkv": mistake, "mqa": ValueError("x")})


def test_every_run_that_failed_is_named():
    with pytest.raises(StudyError, match=r"^mqa failed: MemoryError: no room \(gqa-4, qkv failed too\)$"):
        quickstart._raise_failures({"mqa": MemoryError("no room"), "gqa-4": ValueError(), "qkv": ValueError()})


@pytest.fixture
def no_work(monkeypatch):
    """A quickstart that neither trains nor measures; it says what it would have done."""
    done = []
    monkeypatch.setattr(quickstart, "train_side_by_side", lambda configs, *_, **__: done.append(list(configs)))
    monkeypatch.setattr(
        quickstart, "measure_in_processes", lambda _, context, __: (done.append(context), {"context": context})[1]
    )
    return done


def test_a_folder_holds_one_quickstart(tmp_path, no_work):
    output = tmp_path / "runs" / "quickstart"
    said = []
    run_quickstart(output, seed=0, on_phase=said.append)
    record = json.loads((output / "quickstart.json").read_text(encoding="utf-8"))
    assert no_work == [list(LABELS), quickstart.DECODE_CONTEXT]
    assert record["variants"] == list(LABELS)
    assert record["seed"] == 0
    assert record["decode"] == {"context": quickstart.DECODE_CONTEXT}
    assert len(said) == 2

    run_quickstart(output, seed=0)
    assert no_work[2:] == [list(LABELS)]  # what was measured is kept

    with pytest.raises(RunFolderError, match=r"holds another quickstart \(seed 0, .*choose another --output"):
        run_quickstart(output, seed=1)
    assert json.loads((output / "quickstart.json").read_text(encoding="utf-8")) == record
    assert len(no_work) == 3


def test_one_process_at_a_time_writes_a_quickstart(tmp_path, no_work):
    run_quickstart(tmp_path / "q")
    with exclusive(tmp_path / "q"), pytest.raises(RunFolderError, match="is being written by another process"):
        run_quickstart(tmp_path / "q")
    assert len(no_work) == 2


def test_a_folder_that_is_no_quickstart_is_refused(tmp_path, no_work):
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    for output, message in ((tmp_path, "holds files that are no quickstart"), (tmp_path / "notes.txt", "is a file")):
        with pytest.raises(RunFolderError, match=message):
            run_quickstart(output)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert no_work == []


def test_a_record_of_seeds_says_what_it_was_made_with(tmp_path, monkeypatch):
    source = write_text(tmp_path / "text.txt", make_documents())
    monkeypatch.setattr(
        quickstart, "quickstart_configs", lambda seed=0: {"qkv": tiny(quickstart_configs(seed)["qkv"], source)}
    )
    record = record_seeds(tmp_path / "seeds", [3, 4], on_phase=lambda _: None)
    run = RunFolder.open(tmp_path / "seeds" / "seed-3" / "qkv")
    assert record["data_sha256"] == run.data_sha256
    assert {slug: decode(RunConfig, config) for slug, config in record["configs"].items()} == {"qkv": run.config}
    assert run.config.train.seed == 3
    assert record["seeds"] == [3, 4]
    assert len(record["variants"]["qkv"]["loss"]) == len(record["variants"]["qkv"]["bits_per_byte"]) == 2


@pytest.mark.skipif(not SEED_RECORD.exists(), reason="the record has not been made yet")
def test_the_packaged_record_speaks_for_the_quickstart():
    record = read_json(SEED_RECORD)
    configs = quickstart_configs(record["seeds"][0])
    assert {slug: decode(RunConfig, config) for slug, config in record["configs"].items()} == configs
    assert record["data_sha256"] == prepare_text(configs["qkv"].data, text_cache_folder()).data_sha256
    assert {slug: len(row["loss"]) for slug, row in record["variants"].items()} == dict.fromkeys(
        configs, len(record["seeds"])
    )

"""Run folders: written once, resumed safely, never half there."""

import json
import math
import warnings
from pathlib import Path

import pytest

from twofold.records import RunFolder, files, read_json, write_json_atomic
from twofold.spec import RunConfig, RunFolderError, TrainConfig, preset, run_id


def make_config(**train: int) -> RunConfig:
    return RunConfig(model=preset("gpt-tiny", sharing="tied-kv"), train=TrainConfig(**train))


def write_state(folder: RunFolder, text: str, error: BaseException | None = None) -> None:
    with folder.replacing_directory("checkpoint") as directory:
        (directory / "state").write_text(text, encoding="utf-8")
        if error:
            raise error


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path / "runs" / "a", make_config(), "data")
    with folder.writing():
        return folder


def resume(path: Path) -> RunFolder:
    folder = RunFolder.create(path, make_config(), "data")
    with folder.writing():
        return folder


def test_create_writes_what_open_reads(folder: RunFolder) -> None:
    opened = RunFolder.open(folder.path)
    assert opened == folder
    assert opened.run_id == run_id(make_config(), "data")
    run = read_json(folder.path / "run.json")
    assert run["schema"] == 1
    assert run["config"]["model"]["sharing"] == "tied-kv"
    environment = folder.environment()
    assert environment["cores"] >= 1
    assert environment["packages"]["numpy"]
    assert environment["twofold"]


def test_layers_that_differ_survive_the_round_trip(tmp_path: Path) -> None:
    model = preset(
        "gpt-tiny",
        sharing={"every": 2, "value": "tied-kv", "otherwise": "qkv"},
        num_key_value_heads=[8, 2, 8, 1],
        sliding_window=[None, 16, None, 16],
    )
    config = RunConfig(model=model)
    assert RunFolder.create(tmp_path / "a", config, "x") == RunFolder.open(tmp_path / "a")
    RunFolder.create(tmp_path / "a", config, "x")


def test_same_run_is_resumed_silently(folder: RunFolder) -> None:
    folder.append_metrics({"step": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = resume(folder.path)
    assert again.metrics() == [{"step": 1}]


def test_another_code_revision_warns_and_is_noted(folder: RunFolder) -> None:
    environment = folder.environment()
    write_json_atomic(folder.path / "environment.json", {**environment, "git_revision": "abc", "twofold": "0.0.1"})
    with pytest.warns(UserWarning, match=r"another code or environment: twofold 0\.0\.1 -> .*git_revision abc -> "):
        resume(folder.path)
    assert folder.environment()["git_revision"] == "abc"
    assert folder.environment()["resumed"][0]["git_revision"] == environment["git_revision"]


def test_another_config_is_refused_with_its_names(folder: RunFolder) -> None:
    with pytest.raises(
        RunFolderError, match=r"another run \(id [0-9a-f]{12}; its config differs in train\.steps\); choose"
    ):
        RunFolder.create(folder.path, make_config(steps=7), "data")
    with pytest.raises(RunFolderError, match=r"its data differ\)"):
        RunFolder.create(folder.path, make_config(), "other data")


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("!", encoding="utf-8")
    with pytest.raises(RunFolderError, match=r"no run \(thesis\.tex"):
        RunFolder.create(tmp_path, make_config(), "data")
    with pytest.raises(RunFolderError, match="is a file"):
        RunFolder.create(tmp_path / "thesis.tex", make_config(), "data")
    with pytest.raises(RunFolderError, match="not a run folder"):
        RunFolder.open(tmp_path)
    with pytest.raises(RunFolderError, match="does not exist"):
        RunFolder.open(tmp_path / "nowhere")


def test_a_start_that_was_cut_short_can_be_started_again(tmp_path: Path) -> None:
    (tmp_path / ".run.json.tmp").write_text('{"sch', encoding="utf-8")
    assert not RunFolder.exists(tmp_path)
    resume(tmp_path)
    assert RunFolder.exists(tmp_path)
    (tmp_path / "environment.json").unlink()
    assert resume(tmp_path).environment()["schema"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 2}', "has schema 2"),
        ('{"schema": 1}', "has no 'config'"),
        ('{"schema": 1, "config": {"model": {"colour": 1}}}', "unknown setting .*another version"),
        ("[]", "must hold a JSON object"),
        ("{", "cannot be read as JSON"),
    ],
)
def test_an_unreadable_run_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(RunFolderError, match=message) as caught:
        RunFolder.open(tmp_path)
    assert "\n" not in str(caught.value)


def test_metrics_hold_no_nan_and_are_flushed_by_line(folder: RunFolder) -> None:
    assert folder.metrics() == []
    folder.append_metrics({"step": 1, "loss": math.nan, "all": (math.inf, 2.0)})
    text = (folder.path / "metrics.jsonl").read_text(encoding="utf-8")
    assert json.loads(text) == {"step": 1, "loss": None, "all": [None, 2.0]}
    assert text.endswith("\n")


def test_metrics_are_truncated_to_the_checkpoint(folder: RunFolder) -> None:
    folder.truncate_metrics(0)
    for step in (1, 2, 3):
        folder.append_metrics({"step": step})
    with (folder.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 4, "lo')
    assert len(folder.metrics()) == 3
    folder.truncate_metrics(2)
    folder.append_metrics({"step": 3})
    assert [row["step"] for row in folder.metrics()] == [1, 2, 3]


def test_resuming_drops_a_half_written_line(folder: RunFolder) -> None:
    folder.append_metrics({"step": 1})
    with (folder.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 2')
    resumed = resume(folder.path)
    resumed.append_metrics({"step": 2})
    assert resumed.metrics() == [{"step": 1}, {"step": 2}]


def test_damage_in_the_middle_is_reported(folder: RunFolder) -> None:
    (folder.path / "metrics.jsonl").write_text('{"step": 1}\nnoise\n{"step": 2}\n', encoding="utf-8")
    with pytest.raises(RunFolderError, match="line 2 is not"):
        folder.metrics()


def test_directories_are_replaced_whole(folder: RunFolder) -> None:
    assert folder.checkpoint_path is None
    assert folder.model_path == folder.path / "model"
    for text in ("first", "second"):
        with folder.replacing_directory("checkpoint") as directory:
            (directory / "deep").mkdir()
            (directory / "deep" / "state").write_text(text, encoding="utf-8")
            assert directory.parent == folder.path
        assert folder.checkpoint_path == folder.path / "checkpoint"
        assert (folder.path / "checkpoint" / "deep" / "state").read_text(encoding="utf-8") == text
    with pytest.raises(KeyboardInterrupt):
        write_state(folder, "third", KeyboardInterrupt())
    assert (folder.path / "checkpoint" / "deep" / "state").read_text(encoding="utf-8") == "second"
    assert sorted(entry.name for entry in folder.path.iterdir()) == [
        ".lock",
        "checkpoint",
        "environment.json",
        "run.json",
    ]


@pytest.mark.parametrize(
    ("crash_at", "seen", "resumed"),
    [
        (1, "old", "old"),  # about to call the new one complete
        (2, "old", "new"),  # about to move the old one aside
        (3, "new", "new"),  # about to move the new one in: no `checkpoint` at all
        (4, "new", "new"),  # about to remove the old one
    ],
)
def test_a_crash_during_the_swap_leaves_old_or_new(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, crash_at: int, seen: str, resumed: str
) -> None:
    def state(of: RunFolder) -> str:
        assert of.checkpoint_path is not None
        return (of.checkpoint_path / "state").read_text(encoding="utf-8")

    class Crash(BaseException):
        pass

    calls = 0

    def dying(original):
        def step(*arguments, **keywords):
            nonlocal calls
            calls += 1
            if calls == crash_at:
                raise Crash
            return original(*arguments, **keywords)

        return step

    write_state(folder, "old")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dying(Path.rename))
        patch.setattr(files.shutil, "rmtree", dying(files.shutil.rmtree))
        with pytest.raises(Crash):
            write_state(folder, "new")
    assert state(RunFolder.open(folder.path)) == seen
    again = resume(folder.path)
    assert again.checkpoint_path == folder.path / "checkpoint"
    assert state(again) == resumed
    assert [entry.name for entry in folder.path.iterdir() if entry.name.startswith(".")] == [".lock"]


def test_one_writer_at_a_time(folder: RunFolder) -> None:
    with folder.writing():
        with pytest.raises(RunFolderError, match="is being written by another process"), folder.writing():
            pytest.fail("two writers")
        assert RunFolder.open(folder.path).error() is None  # the one that writes has not failed
    with folder.writing():
        pass


def test_without_locks_there_is_none(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "fcntl", None)
    with folder.writing(), folder.writing():
        pass


def test_a_failure_while_writing_is_recorded_and_an_interruption_is_not(folder: RunFolder) -> None:
    with pytest.raises(KeyboardInterrupt), folder.writing():
        raise KeyboardInterrupt
    assert folder.error() is None
    with pytest.raises(OSError, match="disk"), folder.writing():
        raise OSError("the disk is gone")
    error = folder.error()
    assert error is not None
    assert error["message"] == "the disk is gone"


def test_the_result_finishes_a_run_and_clears_its_error(folder: RunFolder) -> None:
    with pytest.raises(RunFolderError, match="has not finished"):
        folder.result()
    assert folder.error() is None
    try:
        raise ValueError("no such thing")
    except ValueError as error:
        folder.write_error(error)
    error_record = folder.error()
    assert error_record is not None
    assert (error_record["type"], error_record["message"]) == ("ValueError", "no such thing")
    assert "test_run_folder.py" in error_record["traceback"]
    folder.write_result({"loss": math.inf})
    assert folder.is_finished
    assert folder.result() == {"loss": None}
    assert folder.error() is None


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json_atomic(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json_atomic(path, {"a": object()})
    assert read_json(path) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]

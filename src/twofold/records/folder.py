"""One run's folder, from its first step to its result."""

import json
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from twofold.records import files
from twofold.records.environment import describe_environment
from twofold.records.files import read_json, write_json_atomic
from twofold.spec import ConfigError, RunConfig, RunFolderError, decode, encode, run_id

SCHEMA = 1
_REPLACED = ("model", "checkpoint")


@dataclass(frozen=True)
class RunFolder:
    """A folder that holds one run. `create` or `open` it; whoever then writes to it does so within `writing`."""

    path: Path
    """The folder."""
    run_id: str
    """Twelve hex digits that name the config together with its data."""
    config: RunConfig
    """What the run is."""
    data_sha256: str
    """Hash of the data it is trained on."""

    @classmethod
    def create(cls, path: Path, config: RunConfig, data_sha256: str) -> "RunFolder":
        """Begins a run in an empty or new folder, or opens the same run there, finished or to be resumed.

        Args:
            path: The folder; parents are made.
            config: What the run is.
            data_sha256: Hash of its data.

        Raises:
            RunFolderError: where the folder holds another run, or files that are no run.
        """
        if cls.exists(path):
            folder = cls.open(path)
            folder._refuse_another(config, data_sha256)
            return folder
        _refuse_foreign(path)
        path.mkdir(parents=True, exist_ok=True)
        folder = cls(path, run_id(config, data_sha256), config, data_sha256)
        run = {"schema": SCHEMA, "config": encode(config), "data_sha256": data_sha256, "run_id": folder.run_id}
        write_json_atomic(path / "run.json", run)
        return folder

    @staticmethod
    def exists(path: Path) -> bool:
        """True when a run has begun in a folder."""
        return (path / "run.json").exists()

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Opens a run for reading; changes nothing, so a run that is still training is not disturbed.

        Raises:
            RunFolderError: where there is no run, or one that this version cannot read.
        """
        file = path / "run.json"
        if not cls.exists(path):
            missing = "does not exist" if not path.exists() else "is not a run folder: it has no run.json"
            raise RunFolderError(f"{path} {missing}")
        run = read_json(file)
        if run.get("schema") != SCHEMA:
            raise RunFolderError(f"{file} has schema {run.get('schema')!r}; this version of twofold reads {SCHEMA}")
        try:
            config = decode(RunConfig, run["config"], str(file))
            return cls(path, str(run["run_id"]), config, str(run["data_sha256"]))
        except KeyError as error:
            raise RunFolderError(f"{file} has no {error}") from None
        except ConfigError as error:
            raise RunFolderError(f"{error}; it was written by another version of twofold") from None

    @property
    def model_path(self) -> Path:
        """The model's folder, which may not exist yet."""
        return files.current_directory(self.path / "model") or self.path / "model"

    @property
    def checkpoint_path(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        return files.current_directory(self.path / "checkpoint")

    @property
    def is_finished(self) -> bool:
        """True when the run has written its result."""
        return (self.path / "result.json").exists()

    def result(self) -> dict[str, Any]:
        """What the run wrote last.

        Raises:
            RunFolderError: where it has not finished.
        """
        if not self.is_finished:
            raise RunFolderError(f"{self.path} has no result yet: its run has not finished")
        return read_json(self.path / "result.json")

    def error(self) -> dict[str, Any] | None:
        """`type`, `message`, `traceback` and `created` of the failure that stopped the run, or None."""
        path = self.path / "error.json"
        return read_json(path) if path.exists() else None

    def environment(self) -> dict[str, Any]:
        """Versions, machine and code revision with which the run began; `resumed` lists those that differed later.

        Empty where the run was stopped before it could write them.
        """
        path = self.path / "environment.json"
        return read_json(path) if path.exists() else {}

    @contextmanager
    def writing(self, device: str | None = None) -> Iterator[None]:
        """Holds the folder for this process, which may write to it within the block.

        What an earlier process left half done is repaired first. The environment is written before the first step;
        another code revision or version than before warns and is noted there. An exception in the block, but no
        interruption, is recorded in error.json.

        Args:
            device: Name of the accelerator, for environment.json.

        Raises:
            RunFolderError: where another process is writing.
        """
        with files.exclusive(self.path):
            self._repair()
            self._note_environment(device)
            try:
                yield
            except Exception as error:
                self.write_error(error)
                raise

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Adds one line to metrics.jsonl; numbers that are not finite become null."""
        with self._metrics_path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(files.dump_json(dict(row)) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All complete rows of metrics.jsonl. A last line that was cut off by a crash is left out.

        Raises:
            RunFolderError: where another line is no JSON object.
        """
        rows = []
        lines = self._metrics_lines()
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict):
                rows.append(row)
            elif number < len(lines) or line.endswith("\n"):
                raise RunFolderError(f"{self._metrics_path} line {number} is not a JSON object")
        return rows

    def truncate_metrics(self, last_step: int) -> None:
        """Drops rows after a step, and a half-written last line: what a resumed run is about to write again."""
        if self._metrics_path.exists():
            kept = [row for row in self.metrics() if row.get("step", 0) <= last_step]
            self._write_metrics(kept)

    @contextmanager
    def replacing_directory(self, name: str) -> Iterator[Path]:
        """Yields an empty directory that becomes `name` when the block ends well, and vanishes when it raises.

        Files are synced and swapped in so that after a crash at any moment the old or the new directory is there.

        Args:
            name: `model` or `checkpoint`.
        """
        assert name in _REPLACED
        with files.replacing_directory(self.path / name) as directory:
            yield directory

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Marks the run finished: writes result.json, the last file of a run, and removes an earlier error."""
        write_json_atomic(self.path / "result.json", result)
        (self.path / "error.json").unlink(missing_ok=True)

    def write_error(self, exception: BaseException) -> None:
        """Records why the run stopped, with its traceback, in error.json."""
        error = {
            "schema": SCHEMA,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "type": type(exception).__name__,
            "message": str(exception),
            "traceback": "".join(traceback.format_exception(exception)),
        }
        write_json_atomic(self.path / "error.json", error)

    @property
    def _metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    def _metrics_lines(self) -> list[str]:
        if not self._metrics_path.exists():
            return []
        return self._metrics_path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)

    def _write_metrics(self, rows: list[dict[str, Any]]) -> None:
        files.write_text_atomic(self._metrics_path, "".join(files.dump_json(row) + "\n" for row in rows))

    def _repair(self) -> None:
        for name in _REPLACED:
            files.repair_directory(self.path / name)
        lines = self._metrics_lines()
        if lines and not lines[-1].endswith("\n"):
            self._write_metrics(self.metrics())

    def _refuse_another(self, config: RunConfig, data_sha256: str) -> None:
        if (self.config, self.data_sha256) == (config, data_sha256):
            return
        parts = []
        if changed := _differences(encode(self.config), encode(config)):
            shown = ", ".join(changed[:4]) + (f" and {len(changed) - 4} more" if len(changed) > 4 else "")
            parts.append(f"its config differs in {shown}")
        if self.data_sha256 != data_sha256:
            parts.append("its data differ")
        reasons = "; ".join([f"id {self.run_id}", *parts])
        raise RunFolderError(f"{self.path} holds another run ({reasons}); choose another --output")

    def _note_environment(self, device: str | None) -> None:
        path = self.path / "environment.json"
        now = describe_environment(device)
        if not path.exists():
            write_json_atomic(path, {"schema": SCHEMA, **now, "resumed": []})
            return
        environment = read_json(path)
        latest = environment["resumed"][-1] if environment.get("resumed") else environment
        changed = [
            f"{name} {_text(latest.get(name))} -> {_text(now[name])}"
            for name in ("twofold", "git_revision", "git_modified", "python", "packages")
            if latest.get(name) != now[name]
        ]
        if changed:
            message = f"{self.path} is resumed under another code or environment: {'; '.join(changed)}"
            warnings.warn(message, stacklevel=4)  # this, writing, contextlib
            write_json_atomic(path, {**environment, "resumed": [*environment.get("resumed", []), now]})


def _refuse_foreign(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise RunFolderError(f"{path} is a file; choose another --output")
    found = sorted(entry.name for entry in path.iterdir() if entry.name != ".run.json.tmp")
    if found:
        raise RunFolderError(f"{path} holds files that are no run ({found[0]}, ...); choose another --output")


def _differences(ours: Any, given: Any, prefix: str = "") -> list[str]:
    if isinstance(ours, dict) and isinstance(given, dict):
        paths = [_differences(ours.get(key), given.get(key), f"{prefix}{key}.") for key in {**ours, **given}]
        return [path for group in paths for path in group]
    return [] if ours == given else [prefix.rstrip(".")]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {found}" for name, found in value.items())
    return str(value)

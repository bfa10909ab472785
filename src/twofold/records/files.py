"""JSON files and directories that are replaced whole: after a crash there is the old one or the new one."""

import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from twofold.spec import RunFolderError

try:
    import fcntl
except ImportError:  # not Unix: nothing is locked
    fcntl = None  # type: ignore[assignment]


LOCK_NAME = ".lock"
"""The file by which `exclusive` holds a folder; it stays when the folder is free again."""


def dump_json(data: Any, indent: int | None = None) -> str:
    """JSON text in which every number that is not finite has become null, because JSON has no NaN."""
    return json.dumps(_finite(data), indent=indent, ensure_ascii=False, allow_nan=False)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        RunFolderError: where the file is missing, is not JSON, or holds something other than an object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunFolderError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise RunFolderError(f"{path} must hold a JSON object, not a {type(data).__name__}")
    return data


def write_json_atomic(path: Path, data: Mapping[str, Any]) -> None:
    """Writes a JSON object so that a reader sees the old file or the complete new one. NaN becomes null."""
    write_text_atomic(path, dump_json(data, indent=2) + "\n")


def write_text_atomic(path: Path, text: str) -> None:
    """Writes text to a temporary sibling and renames it over `path`."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Holds an existing folder for the one process that writes to it, however that ends; readers are not held up.

    The lock is advice between processes that ask for it, on systems and file systems that have locks.

    Raises:
        RunFolderError: where another process holds the folder.
    """
    with (folder / LOCK_NAME).open("a") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderError(f"{folder} is being written by another process; wait for it or stop it") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
        yield


@contextmanager
def replacing_directory(target: Path) -> Iterator[Path]:
    """Yields an empty directory beside `target` that takes its place when the block ends without an exception.

    A directory cannot be renamed over a full one in one step, so the new one is first marked complete by the name
    `.NAME.ready`. From there on `repair_directory` can finish the swap, whenever the process dies.
    """
    repair_directory(target)
    writing, ready = _sibling(target, "writing"), _sibling(target, "ready")
    writing.mkdir()
    try:
        yield writing
        _sync_tree(writing)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise
    writing.rename(ready)
    repair_directory(target)


def repair_directory(target: Path) -> None:
    """Finishes a swap that was cut short and clears what it left. Only the one writer of a folder may call this."""
    writing, ready, old = (_sibling(target, name) for name in ("writing", "ready", "old"))
    if ready.exists():
        if target.exists():
            if old.exists():
                shutil.rmtree(old)
            target.rename(old)
        ready.rename(target)
        _sync_directory(target.parent)
    elif old.exists() and not target.exists():
        old.rename(target)
    for leftover in (writing, old):
        if leftover.exists():
            shutil.rmtree(leftover)


def current_directory(target: Path) -> Path | None:
    """Where the contents of `target` lie now, also in the middle of a swap, or None; changes nothing."""
    candidates = (target, _sibling(target, "ready"), _sibling(target, "old"))
    return next((path for path in candidates if path.is_dir()), None)


def _sibling(target: Path, state: str) -> Path:
    return target.with_name(f".{target.name}.{state}")


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return data


def _sync_tree(root: Path) -> None:
    for directory, _, names in os.walk(root):
        for name in names:
            path = Path(directory, name)
            if path.is_file():
                _sync(path, os.O_RDWR)
        _sync_directory(Path(directory))


def _sync_directory(path: Path) -> None:
    if os.name == "posix":  # other systems cannot open a directory
        _sync(path, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

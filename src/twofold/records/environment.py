"""What a run ran on: versions, machine and code revision."""

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import twofold

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "datasets", "ray", "flash-attn")


def describe_environment(device: str | None = None) -> dict[str, Any]:
    """Plain data about this process: versions, machine, code revision and time. Imports none of the packages it names.

    Args:
        device: Name of the accelerator in use, from those who know torch; None for a CPU.
    """
    revision, modified = _git_state(Path(__file__).resolve().parents[1])
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "twofold": twofold.__version__,
        "git_revision": revision,
        "git_modified": modified,
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "os": platform.platform(),
        "cpu": cpu_name(),
        "cores": num_cores(),
        "memory_bytes": _memory_bytes(),
        "device": device,
    }


def cpu_name() -> str:
    """The processor's name, or its architecture where the system does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def num_cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_state(package: Path) -> tuple[str | None, bool | None]:
    """Revision of the checkout that holds this code, and whether the code differs from it.

    A virtual environment inside somebody's own repository is no checkout of ours: the file must be tracked.
    """
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    changes = _git(package, "status", "--porcelain", "--", ".")
    return _git(package, "rev-parse", "HEAD"), None if changes is None else bool(changes)


def _git(directory: Path, *arguments: str) -> str | None:
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(directory), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None

"""Checks annotated shapes and types while the tests run, and keeps browser tests from vanishing."""

import os

import pytest
from jaxtyping import install_import_hook

# The rooms that hold tensors. The others read what users write, and check it themselves.
ROOMS = ("cache", "kernels", "attention", "models", "data", "hf", "train", "eval", "bench")
install_import_hook([f"twofold.{room}" for room in ROOMS], "beartype.beartype")  # before they are imported


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):  # noqa: ARG001 - pytest passes arguments by name
    report = yield
    if report.skipped and item.get_closest_marker("browser") and os.environ.get("TWOFOLD_REQUIRE_BROWSER"):
        report.outcome = "failed"
        report.longrepr = f"skipped where TWOFOLD_REQUIRE_BROWSER is set: {report.longrepr[2]}"
    return report

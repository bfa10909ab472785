"""Checks annotated shapes and types while the tests run, and keeps tests that need something from vanishing."""

import importlib.util
import os

import hypothesis
import pytest
from jaxtyping import install_import_hook

# The rooms that hold tensors. The others read what users write, and check it themselves.
ROOMS = ("cache", "kernels", "attention", "models", "data", "hf", "train", "eval", "bench")
install_import_hook([f"twofold.{room}" for room in ROOMS], "beartype.beartype")  # before they are imported

# A busy machine is no failure; everything else stays as Hypothesis has it, which repeats the same examples in CI.
hypothesis.settings.register_profile("twofold", hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("twofold")


def pytest_runtest_setup(item):
    if item.get_closest_marker("kernel"):
        from twofold.kernels import native

        if native.load_library() is None:
            pytest.skip("the kernel was not compiled")
    if item.get_closest_marker("triton") and importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):  # noqa: ARG001 - pytest passes arguments by name
    report = yield
    required = os.environ.get("TWOFOLD_REQUIRE", "").split(",")
    if report.skipped and any(item.get_closest_marker(name) for name in required if name):
        report.outcome = "failed"
        report.longrepr = f"skipped where TWOFOLD_REQUIRE={','.join(required)}: {report.longrepr[2]}"
    return report

"""Decoding through torch.compile, from a fixed cache."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CAN_COMPILE = shutil.which(os.environ.get("CXX", "g++")) is not None


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor", marks=[pytest.mark.kernel, pytest.mark.skipif(not CAN_COMPILE, reason="no C++ compiler")]
        ),
    ],
)
def test_compiled_steps_choose_the_same_tokens(backend):
    """In every form that is cached, with two or three graphs in all, the kernel an operator inside them."""
    script = Path(__file__).with_name("compiled_steps.py")
    subprocess.run([sys.executable, str(script), backend], check=True, timeout=500)

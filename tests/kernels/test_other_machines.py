"""The kernel as it is compiled for machines other than this one, in a program of its own (check_decode.cpp)."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src" / "twofold" / "kernels" / "csrc"
FLAGS = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-Wno-unknown-pragmas", "-ffp-contract=fast")


def check(folder, compiler, isa, flags=(), emulator=()):
    if missing := [tool for tool in (compiler, *emulator) if shutil.which(tool) is None]:
        pytest.skip(f"{' and '.join(missing)} not installed")
    program = folder / "check_decode"
    sources = [HERE / "check_decode.cpp", *(SOURCES / f"{name}.cpp" for name in ("decode", "dispatch", "linear"))]
    command = [compiler, *FLAGS, f"-DTWOFOLD_ISA={isa}", *flags, "-I", SOURCES, *sources, "-o", program]
    subprocess.run(command, check=True, timeout=600)
    ran = subprocess.run([*emulator, program], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count(isa) == 5 + 4  # formats of attention and of linear layers


def test_baseline(tmp_path):
    """Vectors of four floats, as every x86-64 has them."""
    check(tmp_path, "c++", "baseline")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="not an x86 machine")
def test_avx2(tmp_path):
    """What this machine would not choose if it has AVX-512."""
    cpu = Path("/proc/cpuinfo")
    if not cpu.exists() or " avx2 " not in cpu.read_text():
        pytest.skip("this machine has no AVX2")
    check(tmp_path, "c++", "avx2", ("-mavx2", "-mfma", "-mf16c"))


@pytest.mark.aarch64
def test_aarch64(tmp_path):
    """NEON, emulated."""
    check(tmp_path, "aarch64-linux-gnu-g++", "neon", ("-static",), ("qemu-aarch64",))

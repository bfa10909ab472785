"""Processes that import Triton in a way of their own, so that no other test sees it.

Triton reads `TRITON_INTERPRET` when it is imported and cannot change its mind, so each way needs a process.
"""

import multiprocessing
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

from twofold.kernels import VARIABLE, attend, describe, triton_decode

assert "triton" not in sys.modules or multiprocessing.parent_process() is None, "a worker imports Triton itself"


@contextmanager
def interpreter():
    """A process in which Triton's programs run on the CPU; submit it `decode`, `by_name` or what a test has."""
    with _process(_interpret) as process:
        yield process


@contextmanager
def compiler(folder):
    """A process in which Triton compiles programs for GPUs that are not there; submit `compiled` to it."""
    with _process(_compile, str(folder)) as process:
        yield process


def decode(*arguments):
    """What the kernel says against a call, and what it computes."""
    return triton_decode.why_not(*arguments[:3]), triton_decode.attend(*arguments)


def by_name(query, stored, mask, scale):
    """The same by the name in the environment, and what `describe` says."""
    os.environ[VARIABLE] = "triton"
    return attend(query, stored, mask=mask, scale=scale), describe()["triton"]


def compiled(capability, *arguments):
    """What the compiler makes of a call: loads in each program, its shared memory in bytes, and its assembly."""
    import triton
    from triton.backends.compiler import GPUTarget

    from twofold.kernels import triton_program

    class Driver:
        """What Triton asks a GPU before it compiles."""

        def get_current_target(self):
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self):
            return capability

        def get_current_stream(self, device):  # noqa: ARG002
            return 0

    triton.runtime.driver.set_active(Driver())
    made = []
    for program in (triton_program.attend_part, triton_program.merge_parts):

        def compile_only(*given, program=program, grid, warmup, **settings):  # noqa: ARG001
            made.append(type(program).run(program, *given, grid=grid, warmup=True, **settings))

        program.run = compile_only
    triton_decode.attend(*arguments)
    return [
        (len(re.findall(r"\btt\.load\b", program.asm["ttir"])), program.metadata.shared, program.asm["ptx"])
        for program in made
    ]


@contextmanager
def _process(initializer, *arguments):
    context = multiprocessing.get_context("spawn")  # a fork would inherit what was imported
    with ProcessPoolExecutor(1, mp_context=context, initializer=initializer, initargs=arguments) as process:
        yield process


def _interpret():
    os.environ[triton_decode.INTERPRETER] = "1"


def _compile(folder):
    os.environ.pop(triton_decode.INTERPRETER, None)
    os.environ["TRITON_CACHE_DIR"] = folder

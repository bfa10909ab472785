"""Which device a run uses."""

import pytest
import torch
from accelerate import Accelerator

from twofold.spec import ConfigError
from twofold.train import make_accelerator, resolve_device


@pytest.fixture
def machine(monkeypatch):
    """Says which accelerators the machine has."""

    def has(*names):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in names)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in names)

    return has


@pytest.mark.parametrize(("present", "best"), [([], "cpu"), (["cuda"], "cuda"), (["mps"], "mps")])
def test_the_best_device_is_the_default_and_each_can_be_named(present, best, machine):
    machine(*present)
    assert resolve_device() == torch.device(best)
    for name in ("cpu", *present):
        assert resolve_device(name) == torch.device(name)


@pytest.mark.parametrize("name", ["gpu", "", "cuda", "cuda:9", "CPU", "meta", "tpu"])
def test_a_device_that_is_not_there_is_refused_with_what_is(name, machine):
    machine("mps")
    with pytest.raises(ConfigError, match=f"^device '{name}' is none of this machine's: mps, cpu$"):
        resolve_device(name)


def test_the_accelerator_is_on_the_device():
    assert make_accelerator(torch.device("cpu")).device == torch.device("cpu")


def test_a_second_device_in_one_process_is_refused():
    assert Accelerator(cpu=True).device.type == "cpu"  # accelerate keeps it for this process
    with pytest.raises(ConfigError, match="trained on cpu before; start another one to train on cuda"):
        make_accelerator(torch.device("cuda"))

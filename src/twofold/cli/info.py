"""`twofold info`: versions, hardware and what this machine can run; paste it into a bug report."""

from typing import Any

from twofold.cli.options import JsonOption
from twofold.cli.output import print_json


def info(json: JsonOption = False) -> None:
    """Versions, hardware, threads, and what computes attention and linear layers on this machine."""
    facts = collect()
    if json:
        print_json(facts)
        return
    for name, value in facts.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for inner, inner_value in value.items():
                print(f"  {inner:<24}{_text(inner_value)}")
        else:
            print(f"{name:<26}{_text(value)}")


def collect() -> dict[str, Any]:
    """Facts about this machine as plain data. None of them names its owner, its paths or its network."""
    import torch

    from twofold.kernels import describe, describe_linear
    from twofold.records import describe_environment

    accelerators = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        accelerators.append("Apple GPU (mps)")
    return {
        **describe_environment(accelerators[0] if accelerators else None),
        "accelerators": accelerators,
        "torch": {
            "threads": torch.get_num_threads(),
            "cuda": torch.version.cuda,
            "cpu_instructions": torch.backends.cpu.get_cpu_capability(),
            "bfloat16_on_gpu": torch.cuda.is_bf16_supported() if torch.cuda.is_available() else None,
        },
        "attention": describe(),
        "linear_layers": describe_linear(),
    }


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)

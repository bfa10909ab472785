"""`twofold train`: one language model from a config."""

from pathlib import Path
from typing import Annotated, Any

import typer

from twofold.cli.options import ConfigOption, DeviceOption, JsonOption, PresetOption, SetOption, load_run
from twofold.cli.output import print_json


def train(
    preset: PresetOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="The run folder.")] = Path("runs/train"),
    seed: Annotated[int | None, typer.Option(min=0, help="The same as --set train.seed=N.")] = None,
    device: DeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Train a language model and keep it, its metrics and its result in a run folder.

    The same command resumes an interrupted run, to the same numbers. OUTPUT/model is a folder for Transformers.
    """
    run = load_run(preset, config, [*(settings or ()), *([] if seed is None else [f"train.seed={seed}"])])

    from twofold.cli.progress import RunProgress
    from twofold.study import train_language_model

    rows: list[dict[str, Any]] = []
    with RunProgress([output.name], run.train.steps) as progress:

        def report(row: dict[str, Any]) -> None:
            rows.append(row)
            progress.show({output.name: rows})

        result = train_language_model(run, output, device=device, report=report)
    if json:
        print_json(result)
        return
    validation, cache = result["validation"], result["cache"]
    print(f"{result['label']}: {result['parameters']:,} parameters")
    print(f"validation perplexity {validation['perplexity']:.2f}, {validation['bits_per_byte']:.3f} bits per byte")
    print(f"cache {cache['bytes_per_token_measured'] / 1024:g} KiB per token in {cache['dtype']}")
    print(f"model in {output / 'model'}")

"""Writes benchmarks/results/<this machine>.md and .json: decoding, prompts and memory beside other libraries.

    .venv/bin/python benchmarks/results.py [--only decode]
    .venv/bin/python benchmarks/results.py --paper

Each section is one command, which is printed with it: of the `twofold` program, or attention alone by attention.py.
`--paper` writes <this machine>-paper.md instead: the paper's own comparison, gpt-300m and gpt-1.2b.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import paper

from twofold.bench import hardware_slug, markdown
from twofold.records import cpu_name, num_cores

FOLDER = Path(__file__).parent / "results"
SMALL = "--preset gpt-small --variant QKV --variant Q-K=V --variant Q-MQA"
OTHERS = "--peer transformers-gpt2 --peer x-transformers --peer llama.cpp-f32"
LONG = "--peer transformers-gpt2 --peer llama.cpp-f32"  # x-transformers takes seconds a token there
EIGHT_BITS = "--weights int8 --cache-dtype int8"
KERNEL = ["--batch-size 1", "--batch-size 8 --rounds 3"]
SECTIONS = [
    f"bench decode {SMALL} --context 512 --context 4096 --repeats 5 {OTHERS}",
    f"bench decode {SMALL} --context 16384 --repeats 3 {LONG}",
    f"bench decode {SMALL} --context 4096 --batch-size 8 --repeats 3 --peer llama.cpp-f32",
    f"bench decode {SMALL} --context 4096 --threads 2 --repeats 3 {OTHERS}",
    f"bench decode {SMALL} --context 4096 --context 16384 {EIGHT_BITS} --repeats 3 --peer llama.cpp-q8_0",
    f"bench prefill {SMALL} --context 512 --repeats 3 {OTHERS}",
    f"bench memory {SMALL} --context 16384",
]


def run(command: str, page: Path) -> tuple[str, Any]:
    """The section of one command as Markdown, and its data."""
    arguments = [*shlex.split(command), "--output", str(page), "--json"]
    subprocess.run([sys.executable, "-m", "twofold", *arguments], stdout=subprocess.DEVNULL, check=True)
    _, _, tables = page.read_text(encoding="utf-8").partition("\n\n    ")
    _, _, tables = tables.partition("\n\n")  # without its heading, and the command with this folder's path
    return f"    twofold {command}\n\n{tables}", json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))


def run_kernel(options: str) -> tuple[str, str, Any]:
    """The command of one table of attention alone, its section, and its data."""
    script = Path(__file__).with_name("attention.py")
    arguments = [sys.executable, str(script), *shlex.split(options)]
    output = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True).stdout
    *table, record = output.splitlines()
    command = f"python benchmarks/attention.py {options}"
    return command, "\n".join([f"    {command}\n", "```text", *table, "```\n"]), json.loads(record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--only", choices=("kernel", "decode", "prefill", "memory"), help="these sections only")
    chosen.add_argument("--paper", action="store_true", help="the paper's own comparison, on a page of its own")
    arguments = parser.parse_args()
    parts, records = [], {}
    if not arguments.paper and arguments.only in (None, "kernel"):
        for options in KERNEL:
            command, part, records[command] = run_kernel(options)
            print(command, file=sys.stderr, flush=True)
            parts.append(part)
    with tempfile.TemporaryDirectory() as folder:
        for command in paper.COMMANDS if arguments.paper else SECTIONS:
            if arguments.only in (None, command.split()[1]):
                print(f"twofold {command}", file=sys.stderr, flush=True)
                part, records[f"twofold {command}"] = run(command, Path(folder) / "section.md")
                parts.append(part)
    if arguments.paper:
        parts.insert(0, markdown(list(paper.tables(records))))
    parts.insert(0, f"# {cpu_name()}, {num_cores()} cores\n")
    FOLDER.mkdir(exist_ok=True)
    page = FOLDER / f"{hardware_slug()}{'-paper' if arguments.paper else ''}.md"
    page.write_text("\n".join(parts), encoding="utf-8")
    page.with_suffix(".json").write_text(json.dumps(records) + "\n", encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()

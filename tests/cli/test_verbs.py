"""The verbs that train, evaluate, write and measure, from end to end on tiny settings."""

import json
import re

import pytest

from tests.tiny_runs import MODEL, make_documents, write_text
from twofold.cli import main
from twofold.records import RunFolder, write_json_atomic
from twofold.study import quickstart_configs

# Somebody may commit to the checkout that these tests run in.
pytestmark = pytest.mark.filterwarnings("ignore:.*is resumed under another code or environment")


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch, tmp_path_factory):
    """An empty current folder with a text and a config, and a cache of its own."""
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path_factory.mktemp("texts")))
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "text.txt", make_documents())
    sections = {
        "model": MODEL,
        "data": {"source": "text.txt", "tokenizer": "bytes", "sequence_length": 16},
        "train": {"steps": 4, "batch_size": 2, "warmup_steps": 1, "log_every": 2},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(sections), encoding="utf-8")  # JSON is YAML
    return tmp_path


def program(capfd, *arguments, code=0):
    """Runs a verb and returns what it wrote on standard output and standard error, of any library."""
    capfd.readouterr()
    assert main(list(arguments)) == code, capfd.readouterr().err
    return capfd.readouterr()


def train(capfd, *arguments, output="runs/a"):
    return program(capfd, "train", "--config", "run.yaml", "--device", "cpu", "--output", output, *arguments)


def test_train_keeps_a_model_and_says_how_good_it_is(capfd, workplace):
    output = train(capfd, "--set", "model.sharing=tied-kv", "--seed", "3")
    folder = RunFolder.open(workplace / "runs" / "a")
    result = folder.result()
    validation = result["validation"]
    assert folder.config.train.seed == 3
    assert output.out.splitlines() == [
        f"Q-K=V: {result['parameters']:,} parameters",
        f"validation perplexity {validation['perplexity']:.2f}, {validation['bits_per_byte']:.3f} bits per byte",
        "cache 0.125 KiB per token in float32",
        "model in runs/a/model",
    ]
    (line,) = output.err.splitlines()
    assert re.fullmatch(r" *\d+ s  100%  a 4/4 loss \d\.\d{3}, [\d,]+ tokens/s", line)


@pytest.mark.parametrize(("inside", "reason"), [("", "File exists"), ("/in", "Not a directory")])
def test_a_cache_that_is_a_file_is_one_line(inside, reason, capfd, workplace, monkeypatch):
    (workplace / "cache").write_text("", encoding="utf-8")
    monkeypatch.setenv("TWOFOLD_CACHE", f"cache{inside}")
    assert main(["train", "--config", "run.yaml", "--device", "cpu"]) == 2
    assert capfd.readouterr().err.splitlines()[-1] == f"twofold: error: cache{inside}: {reason}"


def test_train_prints_json_alone(capfd, workplace):
    output = train(capfd, "--json")
    assert json.loads(output.out) == RunFolder.open(workplace / "runs" / "a").result()


def test_train_again_gives_the_finished_run(capfd):
    first = json.loads(train(capfd, "--json").out)
    assert json.loads(train(capfd, "--json").out) == first


def test_train_says_how_to_resume_and_resumes(capfd, workplace, monkeypatch):
    append = RunFolder.append_metrics

    def interrupt(folder, row):
        append(folder, row)
        if row["step"] == 2 and "loss" in row:
            raise KeyboardInterrupt

    settings = ("--set", "train.checkpoint_every=1")
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append_metrics", interrupt)
        arguments = ["train", "--config", "run.yaml", "--device", "cpu", "--output", "runs/a", *settings]
        output = program(capfd, *arguments, code=130)
    assert output.err.splitlines()[-1] == "twofold: interrupted; run the same command again to resume"
    train(capfd, *settings)
    train(capfd, *settings, output="runs/b")
    broken, unbroken = (RunFolder.open(workplace / "runs" / name) for name in "ab")
    assert broken.result()["validation"] == unbroken.result()["validation"]


def test_train_exits_with_1_when_the_run_diverges(capfd, workplace):
    settings = ["--set", "train.learning_rate=1e30", "--set", "train.max_grad_norm=0", "--device", "cpu"]
    output = program(capfd, "train", "--config", "run.yaml", "--output", "runs/a", *settings, code=1)
    assert output.out == ""
    assert re.fullmatch(
        r"twofold: error: the loss is nan at step \d; start again with a lower train.learning_rate\n", output.err
    )
    assert RunFolder.open(workplace / "runs" / "a").error()["type"] == "TrainingError"


def test_eval_gives_the_figures_of_the_run(capfd, workplace):
    train(capfd)
    expected = RunFolder.open(workplace / "runs" / "a").result()["validation"]
    for model in ("runs/a", "runs/a/model"):
        found = json.loads(program(capfd, "eval", "--model", model, "--device", "cpu", "--json").out)
        assert found == pytest.approx(expected, rel=1e-6)
    output = program(capfd, "eval", "--model", "runs/a", "--device", "cpu", "--batch-size", "3")
    assert output.err == ""
    assert output.out.splitlines() == [
        f"perplexity      {expected['perplexity']:.3f}",
        f"bits per byte   {expected['bits_per_byte']:.4f}",
        f"loss            {expected['loss']:.4f} nats per token",
        f"over            {expected['tokens']:,} tokens, {expected['bytes']:,} bytes of held-out documents",
    ]


def test_eval_of_another_text(capfd, workplace):
    train(capfd)
    write_text(workplace / "other.txt", make_documents(number=40, seed=4))
    found = json.loads(program(capfd, "eval", "--model", "runs/a", "--source", "other.txt", "--json").out)
    assert found["bytes"] > RunFolder.open(workplace / "runs" / "a").result()["validation"]["bytes"]


def test_generate_streams_the_prompt_and_its_continuation(capfd):
    train(capfd)
    arguments = ["generate", "--model", "runs/a", "--device", "cpu", "--prompt", "the séa", "--max-new-tokens", "9"]
    first, second = (program(capfd, *arguments, "--seed", "1") for _ in range(2))
    assert first.out == second.out
    assert first.out.startswith("the séa")
    assert first.out.endswith("\n")
    assert re.fullmatch(r"about \d+ tokens/s over \d+\.\d s\n", first.err)
    assert program(capfd, *arguments, "--seed", "2").out != first.out


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_model_runs_with_a_quantised_cache(dtype, capfd):
    long = ["--set", "model.max_position_embeddings=48", "--set", "data.sequence_length=48"]  # beyond int4's floats
    train(capfd, "--set", "model.sharing=tied-kv", "--set", "model.initializer_range=0.4", *long)
    floats, integers = (
        json.loads(program(capfd, "eval", "--model", "runs/a", "--device", "cpu", "--json", *options).out)
        for options in ([], ["--cache-dtype", dtype])
    )
    assert integers["loss"] == pytest.approx(floats["loss"], rel=0.05)
    assert integers["loss"] != floats["loss"]
    assert integers["tokens"] == floats["tokens"]
    arguments = ["generate", "--model", "runs/a", "--device", "cpu", "--prompt", "a", "--max-new-tokens", "3"]
    assert program(capfd, *arguments, "--cache-dtype", dtype).out.startswith("a")


def test_a_model_runs_with_int8_weights(capfd):
    train(capfd, "--set", "model.sharing=tied-kv", "--set", "model.initializer_range=0.4")
    floats, integers = (
        json.loads(program(capfd, "eval", "--model", "runs/a", "--device", "cpu", "--json", *options).out)
        for options in ([], ["--weights", "int8"])
    )
    assert integers["loss"] == pytest.approx(floats["loss"], rel=0.05)
    assert integers["loss"] != floats["loss"]
    arguments = ["generate", "--model", "runs/a", "--device", "cpu", "--prompt", "a", "--max-new-tokens", "3"]
    assert program(capfd, *arguments, "--weights", "int8", "--cache-dtype", "int8").out.startswith("a")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_runs_in_the_type_that_is_asked_for(dtype, capfd):
    train(capfd, "--set", "model.sharing=tied-kv")
    saved, narrow = (
        json.loads(program(capfd, "eval", "--model", "runs/a", "--device", "cpu", "--json", *options).out)
        for options in ([], ["--dtype", dtype])
    )
    assert narrow["loss"] == pytest.approx(saved["loss"], rel=0.02)
    assert narrow["loss"] != saved["loss"]
    arguments = ["generate", "--model", "runs/a", "--device", "cpu", "--prompt", "a", "--max-new-tokens", "3"]
    assert program(capfd, *arguments, "--dtype", dtype).out.startswith("a")


@pytest.mark.parametrize("verb", ["eval", "generate"])
def test_an_unknown_dtype_is_one_line(verb, capfd):
    assert main([verb, "--model", "runs/a", "--dtype", "bf16"]) == 2
    assert "error: dtype 'bf16' is unknown" in capfd.readouterr().err


def test_generate_writes_up_to_the_last_position_by_default(capfd):
    train(capfd)
    output = program(capfd, "generate", "--model", "runs/a/model", "--prompt", "x" * 31, "--temperature", "0")
    assert output.out.startswith("x" * 31)
    assert len(output.err.splitlines()) == 1


def test_a_long_prompt_of_a_rotary_model_is_no_warning(capfd):
    train(capfd, "--set", "model.positions=rope")
    output = program(capfd, "generate", "--model", "runs/a", "--prompt", "the sea " * 8, "--max-new-tokens", "3")
    assert len(output.err.splitlines()) == 1


def test_report_writes_the_page_of_runs_that_are_there(capfd, workplace):
    """The variants of a quickstart, two of them trained here."""
    train(capfd, output="quick/qkv")
    train(capfd, "--set", "model.sharing=tied-kv", output="quick/tied-kv")
    record = {
        "schema": 1,
        "created": "2026-12-01T09:00:00+00:00",
        "seed": 0,
        "variants": list(quickstart_configs()),
        "hardware": "a test machine",
        "decode": None,
    }
    write_json_atomic(workplace / "quick" / "quickstart.json", record)
    assert program(capfd, "report", "quick").out == "quick/report.html\n"
    page = (workplace / "quick" / "report.html").read_text(encoding="utf-8")
    assert "Q-K=V" in page
    assert program(capfd, "report", "quick", "--output", "page.html").out == "page.html\n"
    assert (workplace / "page.html").exists()
    assert main(["report", "quick", "--output", "quick"]) == 2
    assert capfd.readouterr().err == "twofold: error: quick: Is a directory\n"


@pytest.fixture
def quick_bench(monkeypatch):
    """Summing a quarter of a gigabyte is not what these tests are about."""
    monkeypatch.setattr("twofold.bench.runner.read_bandwidth", lambda _: 12.5)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)


@pytest.mark.usefixtures("quick_bench")
def test_bench_decode_prints_json_alone(capfd):
    arguments = ["bench", "decode", "--config", "run.yaml", "--context", "40", "--context", "20", "--repeats", "2"]
    arguments += ["--batch-size", "2", "--variant", "QKV", "--variant", "q-mqa", "--json"]
    output = program(capfd, *arguments)
    assert output.out.count("\n") == 1
    result = json.loads(output.out)
    assert (result["rounds"], result["dtype"], result["task"]) == (2, "float32", "decode")
    used = {(row["contender"], row["context"]): row["cache_bytes"] for row in result["rows"]}
    qkv, mqa = 2 * 2 * 2 * 16 * 4, 2 * 2 * 4 * 4
    assert used == {("QKV", 40): 40 * qkv, ("q-mqa", 40): 40 * mqa, ("QKV", 20): 20 * qkv, ("q-mqa", 20): 20 * mqa}
    assert {row["batch_size"] for row in result["rows"]} == {2}
    assert "decode at 20 tokens, batch 2: round 2 of 2" in output.err


@pytest.mark.usefixtures("quick_bench")
def test_bench_decode_prints_tables_and_json_last(capfd):
    arguments = ["--context", "40", "--repeats", "1", "--peer", "transformers-gpt2"]
    arguments += ["--cache-dtype", "int8", "--weights", "int8"]
    output = program(capfd, "bench", "decode", "--config", "run.yaml", *arguments)
    kinds = "float32 with linear layers in int8, a cache in int8"
    assert f"Decoding after 40 tokens, batch 1, {kinds}, 1 thread" in output.out
    rows = [line.split(" · ") for line in output.out.splitlines() if " · " in line and "KiB" in line]
    ours = ["QKV", "Q=K-V", "Q-K=V", "Q=K=V", "GQA-4", "MQA", "Q-GQA-4", "Q-MQA"]
    assert [name for name, _ in rows] == [name for name in [*ours, "transformers-gpt2"] for _ in range(2)]
    assert "The same run reads 12.5 GB/s" in output.out
    record = json.loads(output.out.splitlines()[-1])
    assert (record["dtype"], record["cache_dtype"], record["weights"]) == ("float32", "int8", "int8")


@pytest.mark.usefixtures("quick_bench")
@pytest.mark.parametrize("verb", ["decode", "prefill"])
def test_bench_measures_each_variant_by_torchs_attention_too(verb, capfd):
    arguments = ["--context", "20", "--repeats", "1", "--variant", "QKV", "--variant", "Q-MQA", "--peer", "torch"]
    output = program(capfd, "bench", verb, "--config", "run.yaml", *arguments, "--json")
    names = dict.fromkeys(row["contender"] for row in json.loads(output.out)["rows"])
    assert list(names) == ["QKV", "QKV, torch attention", "Q-MQA", "Q-MQA, torch attention"]
    assert "left out" not in output.err


@pytest.mark.usefixtures("quick_bench")
def test_bench_decode_measures_the_model_as_given_and_the_variants_that_fit(capfd):
    settings = ["--set", "model.num_attention_heads=2", "--set", "model.sliding_window=[8, null]"]
    arguments = ["bench", "decode", "--config", "run.yaml", "--context", "20", "--repeats", "1", "--json", *settings]
    output = program(capfd, *arguments, "--set", "model.sharing=[tied-kv, qkv]")
    names = ["mixed (as given)", "QKV", "Q=K-V", "Q-K=V", "Q=K=V", "MQA", "Q-MQA"]
    assert list(dict.fromkeys(row["contender"] for row in json.loads(output.out)["rows"])) == names
    assert [line.split(":")[1] for line in output.err.splitlines() if line.startswith("twofold: left out")] == [
        " left out variant 'GQA-4'",
        " left out variant 'Q-GQA-4'",
    ]


@pytest.mark.usefixtures("quick_bench")
def test_bench_names_the_peers_that_are_not_installed_or_do_not_fit(capfd, monkeypatch):
    arguments = ["bench", "prefill", "--config", "run.yaml", "--context", "20", "--repeats", "1", "--variant", "MQA"]
    monkeypatch.setattr("twofold.bench.peers._is_installed", lambda package: package != "x-transformers")
    output = program(capfd, *arguments, "--peer", "x-transformers", "--peer", "llama.cpp-q8_0")
    left_out = [line for line in output.err.splitlines() if line.startswith("twofold: left out")]
    assert left_out[0] == "twofold: left out x-transformers; to have it: pip install x-transformers"
    assert left_out[1].startswith("twofold: left out llama.cpp-q8_0: widths")
    assert [row["contender"] for row in json.loads(output.out.splitlines()[-1])["rows"]] == ["MQA"]


@pytest.mark.usefixtures("quick_bench")
def test_bench_prefill_writes_its_tables(capfd, workplace):
    (workplace / "model.yaml").write_text(json.dumps(MODEL), encoding="utf-8")
    arguments = ["bench", "prefill", "--config", "model.yaml", "--context", "20", "--repeats", "1", "--variant", "MQA"]
    output = program(capfd, *arguments, "--output", "results/here.md", "--json")
    page = (workplace / "results" / "here.md").read_text(encoding="utf-8")
    assert "**A prompt of 20 tokens, batch 1, float32, 1 thread**" in page
    assert "| MQA | " in page
    assert json.loads((workplace / "results" / "here.json").read_text(encoding="utf-8")) == json.loads(output.out)


def test_bench_memory_takes_peaks_apart(capfd):
    arguments = ["bench", "memory", "--config", "run.yaml", "--context", "40", "--variant", "Q-MQA"]
    output = program(capfd, *arguments)
    assert "Peak memory of a generation up to 40 tokens, batch 1, float32" in output.out
    assert "Users with 4,096 tokens each that fit in 4 GiB beside the weights in float32" in output.out
    result = json.loads(output.out.splitlines()[-1])
    assert [(row["contender"], row["cache"]) for row in result["rows"]] == [
        ("Q-MQA", "growing"),
        ("Q-MQA", "fixed"),
    ]
    assert list(result["users"]["Q-MQA"]) == ["float32", "bfloat16", "int8", "int4"]


def test_quickstart_shows_progress_and_prints_the_page(capfd, monkeypatch):
    """With stubs for what takes minutes."""
    calls = []

    def run_quickstart(output, *, seed, num_workers, on_metrics, on_phase):
        configs = quickstart_configs(seed)
        on_phase("training")
        last = {"step": configs["qkv"].train.steps, "loss": 3.0, "tokens_per_second": 1e4}
        on_metrics({slug: [last] for slug in configs})
        calls.append((str(output), seed, num_workers))

    monkeypatch.setattr("twofold.study.run_quickstart", run_quickstart)
    monkeypatch.setattr("twofold.report.write_report", lambda folder: folder / "report.html")
    output = program(capfd, "quickstart", "--output", "q", "--seed", "2", "--workers", "1")
    assert calls == [("q", 2, 1)]
    assert output.out == "q/report.html\n"
    assert output.err.splitlines()[0] == "training"
    assert "100%" in output.err

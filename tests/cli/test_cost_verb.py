"""`twofold cost`."""

import json
from fractions import Fraction

import pytest
import yaml

from twofold.cli import main
from twofold.spec import PAPER_VARIANTS

# Published with "Do Transformers Need Three Projections?" (arXiv 2606.04032), 300M model: parameters, MACs at 128 and
# 2,048 tokens, cache KiB per token in bfloat16, and the share saved.
PAPER = {
    "QKV": ("305,534,976", "39,476,789,248", "792,689,901,568", "80", "2,560", "0 %"),
    "Q=K-V": ("284,542,976", "36,792,434,688", "749,740,228,608", "80", "2,560", "0 %"),
    "Q-K=V": ("284,542,976", "36,792,434,688", "749,740,228,608", "40", "1,280", "50 %"),
    "Q=K=V": ("263,550,976", "34,108,080,128", "706,790,555,648", "40", "1,280", "50 %"),
}


def cost(capsys, *arguments):
    assert main(["cost", *arguments]) == 0
    return capsys.readouterr()


def cost_json(capsys, *arguments):
    output = cost(capsys, *arguments, "--json")
    return {row["name"]: row for row in json.loads(output.out)["variants"]}


@pytest.fixture
def yaml_file(tmp_path):
    def write(data):
        path = tmp_path / "given.yaml"
        path.write_text(data if isinstance(data, str) else yaml.safe_dump(data), encoding="utf-8")
        return str(path)

    return write


def test_the_table_shows_the_papers_figures(capsys):
    output = cost(capsys, "--preset", "gpt-300m")
    assert output.err == ""
    lines = [line.split() for line in output.out.splitlines()]
    for name, (parameters, macs_128, macs_2048, per_token, at_context, saved) in PAPER.items():
        assert [name, parameters, per_token, at_context, *saved.split()] in lines
        assert any(line[:2] == [name, macs_128] and line[-1] == macs_2048 for line in lines)
    assert any(line[0] == "Q-MQA" and line[-2:] == ["96.875", "%"] for line in lines if line)
    assert "learned positions end at 2,048 tokens" in output.out


@pytest.mark.parametrize(("dtype", "kib"), [("int8", 42.5), ("int4", 22.5)])
def test_a_quantised_cache_counts_its_scales(capsys, dtype, kib):
    """20 layers of 16 heads: (64 + 4) or (32 + 4) bytes for each of two tensors."""
    output = cost(capsys, "--preset", "gpt-300m", "--variant", "QKV", "--variant", "Q-K=V", "--dtype", dtype)
    lines = [line.split() for line in output.out.splitlines()]
    assert any(line[:1] == ["QKV"] and str(kib) in line for line in lines)
    assert any(line[:1] == ["Q-K=V"] and str(kib / 2) in line and "50" in line for line in lines)
    assert "a scale of 4 bytes" in output.out
    assert ("the last 32 in float32" in output.out) is (dtype == "int4")


def test_figures_are_aligned_to_the_right(capsys):
    lines = cost(capsys, "--preset", "gpt-300m", "--variant", "QKV", "--variant", "Q-MQA").out.splitlines()
    header = next(line for line in lines if line.startswith("variant") and "saved" in line)
    rows = [line for line in lines if line.startswith(("QKV", "Q-MQA")) and "%" in line]
    assert len({len(line.rstrip()) for line in [header, *rows]}) == 1


def test_columns_are_never_cut_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    output = cost(capsys, "--preset", "gpt-1.2b", "--sequence-length", "1000000", "--sequence-length", "2000000")
    assert "…" not in output.out
    assert any(line.startswith("QKV") and line.count(",") >= 10 for line in output.out.splitlines())


def test_json_has_exact_figures(capsys):
    rows = cost_json(capsys, "--preset", "gpt-300m", "--context", "1000", "--dtype", "float32")
    assert tuple(rows) == PAPER_VARIANTS
    row = rows["Q-MQA"]
    assert row["label"] == "Q-MQA"
    assert row["sharing"] == "tied-kv"
    assert row["num_key_value_heads"] == 1
    assert row["cache_bytes_per_token"] == {
        "tensor_bytes": 5120,
        "scale_bytes": 0,
        "recent_bytes": 0,
        "position_bytes": 0,
        "total": 5120,
    }
    assert row["cache_bytes_at_context"]["total"] == 5_120_000
    assert row["cache_reduction"] == "31/32"
    assert row["cache_reduction_percent"] == 96.875
    assert rows["QKV"]["parameters"]["total"] == 305_534_976
    assert {length: macs["total"] for length, macs in rows["QKV"]["macs"].items()} == {
        "128": 39_476_789_248,
        "512": 165_960_220_672,
        "1024": 353_395_277_824,
        "2048": 792_689_901_568,
    }


def test_variants_and_lengths_asked_for(capsys):
    rows = cost_json(capsys, "--preset", "gpt-tiny", "--variant", "tied-kv", "--sequence-length", "7")
    assert list(rows) == ["tied-kv"]
    assert list(rows["tied-kv"]["macs"]) == ["7"]


def test_a_model_of_its_own_kind_comes_first(capsys, yaml_file):
    path = yaml_file({"preset": "gpt-tiny", "sharing": {"every": 2, "value": "tied-kv", "otherwise": "qkv"}})
    rows = cost_json(capsys, "--config", path)
    assert tuple(rows) == ("mixed (as given)", *PAPER_VARIANTS)
    assert rows["mixed (as given)"]["cache_reduction"] == "1/4"
    assert rows["mixed (as given)"]["sharing"] == ["qkv", "tied-kv", "qkv", "tied-kv"]


def test_default_variants_that_do_not_fit_are_left_out_aloud(capsys):
    output = cost(capsys, "--preset", "gpt-tiny", "--set", "model.num_attention_heads=2", "--json")
    assert "GQA-4" not in output.out
    assert output.err.count("left out variant") == 2


@pytest.mark.parametrize("section", [True, False])
def test_a_file_may_hold_a_run_or_a_model(section, capsys, yaml_file):
    model = {"preset": "gpt-tiny", "max_position_embeddings": 300}
    path = yaml_file({"model": model, "train": {"steps": 3}} if section else model)
    rows = cost_json(capsys, "--config", path, "--set", "model.num_hidden_layers=2")
    assert rows["QKV"]["cache_bytes_per_token"]["total"] == 2 * 2 * 128 * 2


def test_a_model_alone_need_not_fit_the_default_data(capsys):
    cost(capsys, "--preset", "gpt-tiny", "--set", "model.max_position_embeddings=16")


def test_positions_of_unrotated_keys_are_shown(capsys):
    arguments = ["--preset", "llama-tiny", "--set", "model.sharing=tied-kv", "--set", "model.rope_mode=unrotated"]
    rows = cost_json(capsys, *arguments)
    assert rows["Q-K=V"]["cache_bytes_per_token"]["position_bytes"] == 4 * 4
    assert rows["QKV"]["cache_bytes_per_token"]["position_bytes"] == 0
    totals = [rows[name]["cache_bytes_at_context"]["total"] for name in ("Q-K=V", "QKV")]
    assert Fraction(rows["Q-K=V"]["cache_reduction"]) == 1 - Fraction(*totals) != Fraction(1, 2)
    assert "4 bytes of position" in cost(capsys, *arguments).out


def test_a_model_that_is_not_causal_has_no_cache(capsys):
    arguments = ["--preset", "gpt-tiny", "--set", "model.causal=false", "--variant", "(Q=K=V)+"]
    assert cost_json(capsys, *arguments)["(Q=K=V)+"]["cache_bytes_per_token"] is None
    assert "not causal" in cost(capsys, *arguments).out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which model? Give --preset"),
        (["--preset", "gpt-tiny", "--config", "x.yaml"], "give one of them"),
        (["--config", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["--preset", "gpt-tiny", "--set", "model.sharing=tied-vk"], "unknown sharing 'tied-vk'; did you mean 'tied-"),
        (
            ["--preset", "gpt-tiny", "--set", "model.num_attention_heads=3"],
            "128 is not a multiple of num_attention_heads 3",
        ),
        (
            ["--preset", "gpt-tiny", "--set", "model.num_key_value_heads=3"],
            "8 is not a multiple of num_key_value_heads 3",
        ),
        (
            ["--preset", "gpt-tiny", "--set", "model.sharing=tied-qk", "--set", "model.num_key_value_heads=2"],
            "must equal num_attention_heads 8; got 2",
        ),
        (["--preset", "gpt-tiny", "--set", "model.score_map=paper"], "is for non-causal attention"),
        (["--preset", "gpt-tiny", "--variant", "Q-MQAA"], "unknown variant 'Q-MQAA'; did you mean 'Q-MQA'"),
        (["--preset", "gpt-tiny", "--variant", "(Q=K-V)+"], "is for non-causal attention"),
        (["--preset", "gpt-tiny", "--dtype", "float61"], "dtype 'float61' is unknown; did you mean 'float16'"),
        (["--preset", "gpt-tiny", "--set", "sharing=tied-kv"], "write --set model.sharing=tied-kv"),
        (["--preset", "gpt-tiny", "--set", "modle.sharing=tied-kv"], "unknown setting 'modle'; did you mean 'model'"),
        (["--preset", "gpt-tiny", "--set", "model.sharing"], "must look like"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    assert main(["cost", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("twofold: error: ")
    assert output.err.count("\n") == 1
    assert message in output.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model:\n  preset: gpt-tiny\n  hiden_size: 3\n", "unknown setting 'hiden_size'; did you mean 'hidden_size'"),
        ("preset: gpt-tiny\nhiden_size: 3\n", "unknown setting 'hiden_size'; did you mean 'hidden_size'"),
        ("model: {preset: gpt-tiny}\ntrain: {stepz: 3}\n", "unknown setting 'train.stepz'; did you mean 'steps'"),
        ("model: [", "not valid YAML"),
        ("just text", "must hold a mapping"),
    ],
)
def test_mistakes_in_a_file_name_the_file(text, message, capsys, yaml_file):
    assert main(["cost", "--config", yaml_file(text)]) == 2
    error = capsys.readouterr().err
    assert "given.yaml" in error
    assert message in error
    assert error.count("\n") == 1

"""A user's mistakes: one clear line, exit code 2, and nothing left behind."""

import json
import shutil

import pytest

from tests.tiny_runs import MODEL, make_documents, write_text
from twofold.cli import main
from twofold.cli.options import load_run
from twofold.study import train_language_model


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return tmp_path_factory.mktemp("texts")


@pytest.fixture(scope="module")
def ready(tmp_path_factory, texts):
    """A folder with a text, a config and a finished run, to be copied by each test."""
    folder = tmp_path_factory.mktemp("ready")
    write_text(folder / "text.txt", make_documents())
    sections = {
        "model": MODEL,
        "data": {"source": "text.txt", "tokenizer": "bytes", "sequence_length": 16},
        "train": {"steps": 1, "batch_size": 2, "warmup_steps": 1},
    }
    (folder / "run.yaml").write_text(json.dumps(sections), encoding="utf-8")  # JSON is YAML
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWOFOLD_CACHE", str(texts))
        patch.chdir(folder)
        train_language_model(load_run(None, folder / "run.yaml", []), folder / "run", device="cpu")
    return folder


@pytest.fixture
def workplace(ready, texts, tmp_path, monkeypatch):
    shutil.copytree(ready, tmp_path / "w")
    monkeypatch.setenv("TWOFOLD_CACHE", str(texts))
    monkeypatch.chdir(tmp_path / "w")
    return tmp_path / "w"


@pytest.fixture
def refused(workplace, capfd):
    """Runs the program, expects one line and exit code 2, and that no file has changed; returns the line."""

    def run(*arguments):
        before = contents(workplace)
        capfd.readouterr()
        code = main(list(arguments))
        output = capfd.readouterr()
        assert (code, output.out) == (2, ""), output.err
        assert output.err.startswith("twofold: error: ")
        assert output.err.count("\n") == 1
        assert output.err.endswith("\n")
        assert contents(workplace) == before
        return output.err.strip().removeprefix("twofold: error: ")

    return run


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def settings(*changes):
    return [part for change in changes for part in ("--set", change)]


TRAIN = ("train", "--config", "run.yaml", "--output", "new/run", "--device", "cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["model.sharing=tied-kw"], "unknown sharing 'tied-kw'; did you mean 'tied-kv'? Use one of qkv (QKV), tied-qk"),
        (["model.sharing=KV"], "sharing 'KV' has been used both for"),
        (["model.hidden_size=18"], "hidden_size 18 is not a multiple of num_attention_heads 4"),
        (["model.num_key_value_heads=3"], "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        (["model.num_key_value_heads=-1"], "num_key_value_heads must be a whole number, at least 1; got -1"),
        (
            ["model.sharing=tied-qk", "model.num_key_value_heads=2"],
            "num_key_value_heads must equal num_attention_heads 4; got 2",
        ),
        (["model.score_map=paper"], "score_map 'paper' is for non-causal attention"),
        (["model.sharing=Q-K=V+"], "score_map 'paper' is for non-causal attention"),
        (["model.causal=false"], "which a model with causal: false has seen"),
        (
            ["model.vocab_size=100"],
            "the tokenizer has 257 tokens and the model a vocabulary of 100; set model.vocab_size=257",
        ),
        (["model.sharng=qkv"], "unknown setting 'model.sharng'; did you mean 'sharing'?"),
        (["modle.sharing=qkv"], "unknown setting 'modle'; did you mean 'model'?"),
        (["sharing=qkv"], "'sharing' belongs to model; write --set model.sharing=qkv"),
        (["train.steps"], "--set 'train.steps' must look like train.steps=100"),
        (["=3"], "--set '=3' must look like train.steps=100"),
        (["train.steps.more=3"], "'steps' is a value and has no settings inside"),
        (["train.steps=-3"], "steps must be at least 1; got -3"),
        (["train.steps=2.5"], "train.steps: input should be a valid integer"),
        (["train.steps=many"], "got 'many'"),
        (["train.learning_rate=-1"], "learning_rate must be finite and above 0; got -1.0"),
        (["train.learning_rate=.nan"], "learning_rate must be finite and above 0; got nan"),
        (["train.precision=fp16"], "got 'fp16'"),
        (["train.gradient_accumulation=3"], "batch_size 2 is not a multiple of gradient_accumulation 3"),
        (["data.sequence_length=64"], "sequence_length 64 is longer than the model's max_position_embeddings 32"),
        (["data.sequence_length=1"], "sequence_length must be at least 2; got 1"),
        (["data.source=folder"], "data source 'folder' is none of: wikipedia, hf:NAME, a file ending in"),
        (["data.source=folder.txt"], "folder.txt is a folder; give one file"),
        (["data.source=wikipedai"], "did you mean 'wikipedia'?"),
        (["data.source=none.txt"], "data file none.txt does not exist"),
        (["data.source="], "data.source: input should be a valid string"),
        (["data.tokenizer=bytse"], "did you mean 'bytes'?"),
        (["data.tokenizer=folder"], "folder folder holds no tokenizer"),
        (["data=5"], "data: input should be"),
    ],
    ids=str,
)
def test_settings(changes, message, refused, workplace):
    (workplace / "folder").mkdir()
    (workplace / "folder.txt").mkdir()
    assert message in refused(*TRAIN, *settings(*changes))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "data source 'empty.txt' is empty"),
        ("blank.txt", b" \n\n ", "data source 'blank.txt' is empty"),
        ("binary.txt", b"\x7fELF\x02\x01\xff\xfe\x80", "binary.txt is not UTF-8 text"),
        ("nul.txt", b"text\0text", "nul.txt is a binary file"),
        ("one.txt", b"one document<|endoftext|>one document", "needs at least 2"),
        ("short.txt", b"a<|endoftext|>b", "too few for one sequence of 16"),
        ("text.jsonl", b'{"text": "a"}\n{"texd": "b"}\n', "text.jsonl, line 2: no field 'text'; did you mean 'texd'?"),
        ("torn.jsonl", b'{"text": "a"}\n{"text": "b', "torn.jsonl, line 2: not valid JSON"),
        ("list.jsonl", b'["a"]', "list.jsonl, line 1: a row must be an object"),
        ("number.jsonl", b'{"text": 3}', "field 'text' must hold text; got int"),
        ("torn.txt.gz", b"\x1f\x8b\x08", "torn.txt.gz cannot be read"),
    ],
)
def test_texts(name, content, message, refused, workplace):
    (workplace / name).write_bytes(content)
    assert message in refused(*TRAIN, *settings(f"data.source={name}"))
    if "too few" not in message:  # a split in which every target counts may be short
        assert message in refused("eval", "--model", "run", "--source", name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("model: [1, 2", "bad.yaml is not valid YAML"),
        ("5", "bad.yaml must hold a mapping of settings"),
        ("", "bad.yaml must hold a mapping of settings"),
        ("model: 5", "bad.yaml: model: input should be"),
        ("model:", "bad.yaml: model: input should be"),
        ("modle: {hidden_size: 16}", "unknown setting 'modle'; did you mean 'model'?"),
        ("{}", "'model' is missing"),
        ("model: {preset: gpt-tinny}", "did you mean 'gpt-tiny'?"),
        ("{preset: gpt-tiny, hiden_size: 8}", "unknown setting 'model.hiden_size'; did you mean 'hidden_size'?"),
        ("hidden_size: 16", "'model.num_hidden_layers' is missing"),
        (b"\xff\xfe\x00", "bad.yaml cannot be read as text"),
    ],
)
def test_config_files(content, message, refused, workplace):
    (workplace / "bad.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in refused("train", "--config", "bad.yaml", "--output", "new/run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which model? Give --preset"),
        (["--preset", "gpt-tiny", "--config", "run.yaml"], "give one of them"),
        (["--config", "none.yaml"], "none.yaml does not exist"),
        (["--config", "run"], "run cannot be read as text"),
        (["--preset", "gpt-tinny"], "did you mean 'gpt-tiny'?"),
        (["--preset", "gpt-tiny", "--seed", "-1"], "--seed"),
    ],
    ids=str,
)
def test_ways_to_name_a_config(arguments, message, refused):
    assert message in refused("train", "--output", "new/run", *arguments)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("run", "run holds another run (id "),
        ("foreign", "foreign holds files that are no run (notes.txt, ...); choose another --output"),
        ("foreign/notes.txt", "foreign/notes.txt is a file; choose another --output"),
        ("foreign/notes.txt/run", "foreign/notes.txt/run: Not a directory"),
        ("", "holds files that are no run"),
    ],
)
def test_output_folders_of_train(output, message, refused, workplace):
    (workplace / "foreign").mkdir()
    (workplace / "foreign" / "notes.txt").write_text("mine", encoding="utf-8")
    arguments = ["train", "--config", "run.yaml", "--output", output, "--device", "cpu"]
    line = refused(*arguments, *settings("train.steps=2"))
    assert message in line
    if output == "run":
        assert "its config differs in train.steps); choose another --output" in line


@pytest.mark.parametrize("output", ["foreign", "foreign/notes.txt", "run"])
def test_output_folders_of_quickstart(output, refused, workplace):
    (workplace / "foreign").mkdir()
    (workplace / "foreign" / "notes.txt").write_text("mine", encoding="utf-8")
    assert "choose another --output" in refused("quickstart", "--output", output)


@pytest.mark.parametrize("name", ["gpu", "cuda:7", "CPU", ""])
@pytest.mark.parametrize(
    "arguments", [TRAIN, ("eval", "--model", "run"), ("generate", "--model", "run")], ids=lambda words: words[0]
)
def test_devices(arguments, name, refused):
    line = refused(*arguments, "--device", name)
    assert line.startswith(f"device '{name}' is none of this machine's: ")
    assert line.endswith("cpu")


def cut(run):
    weights = run / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def empty(run):
    (run / "model" / "model.safetensors").write_bytes(b"")


def without_weights(run):
    (run / "model" / "model.safetensors").unlink()


def without_config(run):
    (run / "model" / "config.json").unlink()


def torn_config(run):
    (run / "model" / "config.json").write_text('{"model_type"', encoding="utf-8")


def another_size(run):
    path = run / "model" / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "num_hidden_layers": 3}), encoding="utf-8")


def impossible_config(run):
    path = run / "model" / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "sharing": "tied-kw"}), encoding="utf-8")


def stock_gpt2(run):
    (run / "model" / "config.json").write_text('{"model_type": "gpt2", "n_embd": 8}', encoding="utf-8")


def without_model(run):
    shutil.rmtree(run / "model")


def torn_run(run):
    (run / "run.json").write_text("{", encoding="utf-8")


def without_tokenizer(run):
    (run / "model" / "tokenizer.json").unlink()


def torn_tokenizer(run):
    (run / "model" / "tokenizer.json").write_text("{", encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "the weights in run/model cannot be read"),
        (empty, "the weights in run/model cannot be read"),
        (without_weights, "run/model has no safetensors file"),
        (without_config, "run/model is not a model folder: it has no config.json"),
        (torn_config, "run/model/config.json is not JSON"),
        (another_size, "the weights in run/model do not fit its config.json: missing keys"),
        (impossible_config, "unknown sharing 'tied-kw'"),
        (stock_gpt2, "run/model holds a model of type 'gpt2', not a twofold model"),
        (without_model, "run/model is not a folder"),
        (torn_run, "run/run.json cannot be read as JSON"),
        (without_tokenizer, "has no tokenizer, so it cannot read"),
        (torn_tokenizer, "the tokenizer in run/model cannot be read"),
    ],
)
@pytest.mark.parametrize("verb", ["eval", "generate"])
def test_model_folders_that_are_damaged_or_not_ours(verb, damage, message, refused, workplace):
    damage(workplace / "run")
    assert message in refused(verb, "--model", "run", "--device", "cpu")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("none", "none is not a folder"),
        ("run.yaml", "run.yaml is not a folder"),
        (".", ". is not a model folder: it has no config.json"),
        ("", ". is not a model folder"),
    ],
)
@pytest.mark.parametrize("verb", ["eval", "generate"])
def test_models_that_are_none(verb, model, message, refused):
    assert message in refused(verb, "--model", model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "the prompt is empty; give some text with --prompt"),
        (["--prompt", "x" * 32], "the prompt's 32 tokens and 1 new ones exceed the model's 32 learned positions"),
        (["--prompt", "é" * 400], "the prompt's 800 tokens and 1 new ones exceed"),
        (
            ["--max-new-tokens", "100"],
            "the prompt's 14 tokens and 100 new ones exceed the model's 32 learned positions",
        ),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--temperature", "-1"], "--temperature"),
        (["--temperature", "nan"], "--temperature"),
        (["--temperature", "warm"], "--temperature"),
        (["--top-k", "-1"], "--top-k"),
        (["--seed", "-1"], "--seed"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_generate_cannot_write(arguments, message, refused):
    assert message in refused("generate", "--model", "run", "--device", "cpu", *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval"], "--model"),
        (["eval", "--model", "run", "--batch-size", "0"], "--batch-size"),
        (["eval", "--model", "run", "--cache-dtype", "int44"], "cache dtype 'int44' is unknown; did you mean 'int4'?"),
        (["generate", "--model", "run", "--cache-dtype", "float32"], "Use int8 or int4, or leave it out"),
        (["eval", "--model", "run", "--weights", "int88"], "weights of 'int88' are unknown; did you mean 'int8'?"),
        (["generate", "--model", "run", "--weights", "int4"], "Use int8, or leave it out"),
        (["bench", "decode", "--weights", "q8_0"], "weights of 'q8_0' are unknown"),
        (["eval", "--model", "run", "--source", "run"], "data source 'run' is none of"),
        (["eval", "--model", "run", "--source", "hf:"], "lacks a name"),
        (["eval", "--model", "run", "--source", ""], "data source '' is none of"),
        (["report"], "FOLDER"),
        (["report", "none"], "none is not a quickstart folder: it does not exist"),
        (["report", "run"], "run is not a quickstart folder: it has no quickstart.json"),
        (["quickstart", "--workers", "0"], "--workers"),
        (["quickstart", "--seed", "-1"], "--seed"),
        (["bench", "speed"], "No such command 'speed'"),
        (["bench", "decode", "--config", "run.yaml", "--variant", "Q-GQB"], "Q-GQB"),
        (["bench", "decode", "--config", "run.yaml", "--variant", "GQA-3"], "num_attention_heads 4 is not a multiple"),
        (["bench", "decode", "--config", "run.yaml", "--context", "-3"], "--context"),
        (["bench", "decode", "--config", "run.yaml", *settings("model.causal=false")], "does not generate"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_other_verbs(arguments, message, refused):
    assert message in refused(*arguments)


def test_a_text_that_changed_after_the_run(refused, workplace):
    write_text(workplace / "text.txt", make_documents(seed=3))
    assert "text.txt is no longer what run was trained on" in refused("eval", "--model", "run", "--device", "cpu")

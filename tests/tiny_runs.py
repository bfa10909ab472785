"""Texts and runs so small that training them takes a second; shared by the tests of train, eval, study and cli."""

import random

from twofold.data import END_OF_TEXT, prepare_text
from twofold.spec import DataConfig, ModelConfig, RunConfig, TrainConfig

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "dog", "ran", "far", "from", "old", "house", "sea"]

MODEL = {
    "vocab_size": 257,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}


def make_documents(number=24, seed=0, longest=12):
    """Documents of unequal lengths, so that sequences have unequal numbers of targets."""
    chooser = random.Random(seed)
    return [
        f"{index} " + " ".join(chooser.choices(WORDS, k=chooser.randint(1, longest if index % 3 else 2)))
        for index in range(number)
    ]


def write_text(path, documents):
    path.write_text(END_OF_TEXT.join(documents), encoding="utf-8")
    return path


def make_run(source, model=None, data=None, **train):
    """A run over a text file, with some settings of each part changed."""
    rhythm = {"steps": 6, "batch_size": 4, "warmup_steps": 2, "evaluate_every": 100, "checkpoint_every": 100}
    return RunConfig(
        model=ModelConfig(**{**MODEL, **(model or {})}),
        data=DataConfig(
            **{
                "source": str(source),
                "tokenizer": "bytes",
                "sequence_length": 16,
                "validation_fraction": 0.2,
                **(data or {}),
            }
        ),
        train=TrainConfig(**{**rhythm, "log_every": 1, "learning_rate": 1e-2, **train}),
    )


def prepare(tmp_path, documents, **data):
    """Tokenised documents."""
    source = write_text(tmp_path / "text.txt", documents)
    return prepare_text(make_run(source, data=data).data, tmp_path / "cache")

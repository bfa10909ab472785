"""Transformers' own Trainer trains our models and resumes."""

import pytest
import torch
from transformers import DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments

from tests.hf.small import END_OF_TEXT, VOCABULARY, make_config, make_tokenizer
from twofold.hf import TwofoldForCausalLM, load_model, wrap_tokenizer


class Losses(TrainerCallback):
    """Notes the loss of each step."""

    def __init__(self):
        self.by_step = {}

    def on_log(self, args, state, control, logs=None, **kwargs):  # noqa: ARG002
        if "loss" in logs:
            self.by_step[state.global_step] = logs["loss"]


def make_trainer(folder, variant, steps):
    torch.manual_seed(0)
    model = TwofoldForCausalLM(make_config(variant))
    tokenizer = wrap_tokenizer(make_tokenizer(), 96, END_OF_TEXT)
    texts = torch.randint(1, VOCABULARY, (8, 12)).tolist()
    losses = Losses()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            save_steps=2,
            logging_steps=1,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=1,
        ),
        train_dataset=[{"input_ids": text} for text in texts],
        eval_dataset=[{"input_ids": text} for text in texts[:2]],
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[losses],
    )
    return trainer, losses


@pytest.mark.parametrize("variant", ["relative", "mixed"])
def test_trains_and_resumes(variant, tmp_path):
    whole, losses = make_trainer(tmp_path / "whole", variant, 4)
    whole.train()
    assert sorted(losses.by_step) == [1, 2, 3, 4]
    half, _ = make_trainer(tmp_path / "half", variant, 2)
    half.train()
    assert half.evaluate()["eval_loss"] > 0
    assert half.predict(half.eval_dataset).predictions.shape == (2, 12, VOCABULARY)  # logits, and no cache
    rest, rest_losses = make_trainer(tmp_path / "half", variant, 4)
    rest.train(resume_from_checkpoint=True)
    assert rest_losses.by_step == {step: losses.by_step[step] for step in (3, 4)}
    loaded, tokenizer = load_model(tmp_path / "half" / "checkpoint-4")
    assert loaded.config.spec == rest.model.config.spec
    assert tokenizer is not None
    assert torch.equal(loaded.lm_head.weight, rest.model.lm_head.weight)

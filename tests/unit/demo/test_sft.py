"""Supervised training of the demos: what is learned is in the exported folder, and answers come out of it."""

import logging
import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybrid_gkd.demo import models
from hybrid_gkd.demo.gpu_demo import RECIPES, ModelRecipe, _batches, held_out_accuracy, make_data, make_word_tokenizer
from hybrid_gkd.demo.models import SFTRecipe
from hybrid_gkd.demo.sft import SFT, encode_samples, single_process, train_sft
from hybrid_gkd.errors import TrainingError

CPU = torch.device("cpu")
TRAINING = SFTRecipe(max_steps=300, batch_size=8, learning_rate=1e-2, warmup_steps=5, stop_at=1.0, max_tokens=400)
SHAPE = ModelRecipe(hidden_size=64, num_layers=1, intermediate_size=128, init_seed=1, training=TRAINING)


@pytest.fixture(scope="module")
def tokenizer():
    return make_word_tokenizer(replace(RECIPES["cpu"], vocab_size=600), seed=0)


@pytest.fixture
def folder(tokenizer, tmp_path):
    models.make_model(SHAPE, tokenizer, 0, intermediate_size=128).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
def test_digits_are_tokens_of_their_own_and_the_chat_template_is_what_is_trained(tokenizer):
    ids = tokenizer("507 apples").input_ids
    assert tokenizer.convert_ids_to_tokens(ids)[:3] == ["5", "0", "7"]
    assert tokenizer.decode(ids) == "507 apples"
    messages = [{"role": "user", "content": "Who?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == models.prompt_text("Who?")


@pytest.mark.slow
def test_training_makes_answers_sure_and_the_exported_model_gives_them(tokenizer, folder, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    rows = [{"prompt": f"{n} apples?", "answer": f"{n} + {n}\n#### {2 * n}"} for n in (2, 30, 41)]
    samples = encode_samples(rows, tokenizer)
    with single_process(CPU):
        sft = SFT(folder, TRAINING, device=CPU)
        before = sft.step(samples).item()
        assert sft.confident_fraction(samples) == 0
        steps = train_sft(sft, "model", iter(lambda: samples, None), samples)
        assert steps < TRAINING.max_steps
        first, *_, last = [record.getMessage() for record in caplog.records if "of at most" in record.getMessage()]
        assert first.startswith("model: step 1 of at most 300, loss ")
        assert "left" not in first
        assert re.search(rf"step {steps} of .* s, at most \d+ s left$", last)
        assert sft.confident_fraction(samples) == 1
        assert sft.tokens == (steps + 1) * sum(s.num_tokens for s in samples)
        assert sft.step(samples).item() < before / 10
        sft.export(tmp_path / "trained")
    asked = [row | {"held_out_template": row is rows[0]} for row in rows]
    wrong = {"prompt": rows[0]["prompt"], "answer": "#### 5", "held_out_template": True}
    right = held_out_accuracy(tmp_path / "trained", [*asked, wrong], "cpu")
    assert right == {"held_out_accuracy": 0.75, "held_out_template_accuracy": 0.5}


@pytest.mark.slow
def test_the_loss_does_not_depend_on_the_cut_and_is_that_of_a_plain_forward(tokenizer, folder):
    rows = make_data(replace(RECIPES["cpu"], num_train=3, num_val=2), 0)[0]
    samples = encode_samples(rows, tokenizer)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for row, sample in zip(rows, samples, strict=True):
        ids = loaded(models.prompt_text(row["prompt"]) + row["answer"] + models.END, return_tensors="pt").input_ids
        assert ids.shape[1] == sample.num_tokens
        n = sample.num_trained
        logprobs = plain(ids).logits[0, -n - 1 : -1].log_softmax(-1)
        total -= logprobs.gather(1, ids[0, -n:, None]).sum().item()
        count += n
    for max_tokens in (200, 10_000):
        with single_process(CPU):
            loss = SFT(folder, replace(TRAINING, max_tokens=max_tokens), device=CPU).step(samples).item()
        assert loss == pytest.approx(total / count, rel=1e-4)


@pytest.mark.slow
def test_a_model_is_exported_in_the_type_that_it_was_stored_in(tokenizer, tmp_path):
    models.make_model(SHAPE, tokenizer, 0, intermediate_size=128).bfloat16().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with single_process(CPU):
        sft = SFT(tmp_path / "model", TRAINING, device=CPU)
        assert {p.dtype for p in sft.model.parameters()} == {torch.float32}
        sft.export(tmp_path / "model")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto").dtype == torch.bfloat16


def test_batches_are_the_same_whoever_makes_them(tokenizer, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    recipe = replace(RECIPES["cpu"], teacher=replace(SHAPE, training=replace(TRAINING, max_steps=3)))
    here, beside = (list(_batches(recipe, recipe.teacher, tokenizer, 0, device)) for device in ("cpu", "cuda"))
    assert [len(batch) for batch in here] == [TRAINING.batch_size] * 3
    tokens = [[s.tokens.tolist() for batch in each for s in batch] for each in (here, beside)]
    assert tokens[0] == tokens[1]
    assert len({tuple(sample) for sample in tokens[0]}) > 2 * TRAINING.batch_size  # every step has new texts


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_training(tokenizer, folder):
    samples = encode_samples(make_data(replace(RECIPES["cpu"], num_train=2, num_val=2), 0)[0], tokenizer)
    with single_process(CPU):
        sft = SFT(folder, TRAINING, device=CPU)
        with torch.no_grad():
            next(iter(sft.model.parameters())).fill_(float("nan"))
        with pytest.raises(TrainingError, match="teacher: the loss of step 1 is nan"):
            train_sft(sft, "teacher", iter([samples]), samples)

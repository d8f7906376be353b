"""The reward model: its scores are transformers' own, and a folder that has none is refused by name. CPU, one rank."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hybrid_gkd.errors import ConfigError, HybridGKDError, ModelError
from hybrid_gkd.launch import inputs
from hybrid_gkd.launch.checks import Facts
from hybrid_gkd.models.spec import student_spec
from hybrid_gkd.models.tokenizer import load_tokenizer
from hybrid_gkd.offload.needs import plan_memory, trained_models
from hybrid_gkd.student.reward_model import RewardModel
from hybrid_gkd.testing import make_tiny_model, single_process_group, tiny_config
from hybrid_gkd.types import RewardText, Task

CPU = torch.device("cpu")
CLASSIFIERS = ("Qwen2ForSequenceClassification", "Qwen2ForTokenClassification")


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("student"))


def make_config(student, path, *overrides):
    return tiny_config(
        "distillation.enabled=false", "actor_rollout_ref.rollout.n=2", "reward_model.enable=true",
        f"reward_model.model.path={path}", "data.max_prompt_length=32", "data.max_response_length=32", *overrides,
        model=student,
    )  # fmt: skip


def phases(config, spec):
    """Phase -> owner -> bytes on a GPU."""
    return plan_memory(config, trained_models(config, spec), "cuda").phases(None)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_scores_of_packed_texts_are_those_of_transformers(architecture, student, tmp_path):
    """Also of a text that ends in padding, which a sequence classifier looks past."""
    folder = make_tiny_model(tmp_path, seed=3, architecture=architecture)
    padding = load_tokenizer(str(folder)).pad_token_id
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 256, length, np.int32) for length in (5, 1, 17, 40)]
    ids.append(np.append(ids[0], np.int32(padding)))
    texts = [RewardText(index=7 + number, token_ids=each) for number, each in enumerate(ids)]
    with single_process_group():
        model = RewardModel(make_config(student, folder), device=CPU)
        found = model.compute_scores(((*texts[:2], texts[4]), (), tuple(texts[2:4])))
        assert all(not parameter.requires_grad or parameter.grad is None for parameter in model.parameters())
    plain = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()
    assert len(found) == len(texts)
    for text in texts:
        with torch.no_grad():
            logits = plain(torch.from_numpy(text.token_ids.astype(np.int64))[None]).logits
        assert found[text.index] == pytest.approx(logits.flatten()[-1].item(), rel=1e-4, abs=1e-5)
    assert (found[7] == pytest.approx(found[11], rel=1e-5)) == (architecture == CLASSIFIERS[0])


def examine(student, path, *overrides):
    """Run the preflight check of the reward model."""
    config = make_config(student, path, *overrides)
    prompt = Task(
        index=0, token_ids=np.zeros(3, np.int32), text="a", messages=[{"role": "user", "content": "a"}]
    )
    facts = Facts(config, tokenizer=load_tokenizer(str(student)), train_prompts=[prompt])
    return inputs.reward_model(facts), facts.reward_texts


def without_head(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def with_labels(folder):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = {str(number): f"LABEL_{number}" for number in range(3)}
    config |= {"id2label": names, "label2id": {name: int(number) for number, name in names.items()}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.parametrize(
    ("architecture", "spoil", "parts"),
    [
        ("Qwen2ForCausalLM", lambda folder: None, ["must be a classifier", "Qwen2ForCausalLM"]),
        (CLASSIFIERS[0], with_labels, ["must have one label", "3"]),
        (CLASSIFIERS[0], without_head, ["no score.weight in", "model.safetensors"]),
        (CLASSIFIERS[1], lambda folder: (folder / "model.safetensors").unlink(), ["has no weights"]),
    ],
)
def test_a_folder_without_a_reward_model_is_refused_before_anything_is_loaded(
    architecture, spoil, parts, student, tmp_path
):
    folder = make_tiny_model(tmp_path / "reward", architecture=architecture)
    spoil(folder)
    with pytest.raises(ModelError) as caught:
        examine(student, folder)
    for part in ["reward_model.model.path", str(folder), *parts]:
        assert part in str(caught.value)


@pytest.mark.slow
def test_a_context_that_is_too_short_is_refused_and_an_explicit_limit_is_kept(student, tmp_path):
    folder = make_tiny_model(tmp_path, architecture=CLASSIFIERS[0], positions=48)
    with pytest.raises(ConfigError, match=r"data\.max_response_length: .*need 64 .*the reward model .* 48"):
        examine(student, folder)
    with pytest.raises(ConfigError, match=r"reward_model\.max_length: .* has 48 positions .*; got 64"):
        examine(student, folder, "reward_model.max_length=64")
    said, texts = examine(student, folder, "reward_model.max_length=40")
    assert texts.max_length == 40
    assert "reads the student's tokens, at most 40" in said


@pytest.mark.slow
def test_a_head_that_is_missing_is_never_made_up(student, tmp_path):
    """Where the check cannot look, as at a model of the hub, loading refuses it."""
    folder = make_tiny_model(tmp_path, architecture=CLASSIFIERS[0])
    without_head(folder)
    with single_process_group(), pytest.raises(ModelError, match=r"reward_model\.model\.path.*missing.*score\.weight"):
        RewardModel(make_config(student, folder), device=CPU)


@pytest.mark.slow
def test_another_tokenizer_or_template_encodes_texts_anew(student, tmp_path):
    same = make_tiny_model(tmp_path / "same", architecture=CLASSIFIERS[0])
    other = make_tiny_model(tmp_path / "other", architecture=CLASSIFIERS[0], extra_tokens=("<|b|>",))
    assert examine(student, same)[1].own is None
    said, texts = examine(student, other)
    assert texts.own is not None
    assert "again for its tokenizer" in said
    tokenizer = load_tokenizer(str(same))
    tokenizer.chat_template = "{{ raise_exception('users alone') if messages[-1]['role'] != 'user' }}"
    tokenizer.save_pretrained(same)
    with pytest.raises(HybridGKDError, match=r"reward_model\.model\.path: the chat template rejects it: users alone"):
        examine(student, same)


@pytest.mark.slow
def test_it_is_on_the_device_in_its_own_phase_only(student, tmp_path):
    folder = make_tiny_model(tmp_path, architecture=CLASSIFIERS[0])
    config = make_config(student, folder)
    held = phases(config, student_spec(config))
    assert {phase for phase, owners in held.items() if "reward_model_params" in owners} == {"reward_model"}
    weights = load_file(folder / "model.safetensors")
    assert held["reward_model"]["reward_model_params"] == 2 * sum(weight.numel() for weight in weights.values())
    config = make_config(student, folder, "reward_model.enable=false", "reward.answer_key=answer")
    assert "reward_model" not in phases(config, student_spec(config))

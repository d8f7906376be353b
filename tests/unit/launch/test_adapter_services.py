"""Checks before a run whose teachers are LoRA adapters of one model: services, plan, and adapters that do not fit."""

import json
import shutil

import pytest
from adapters import make_adapter, make_adapters

from hybrid_gkd.config import run_teachers
from hybrid_gkd.config.loading import load_config
from hybrid_gkd.errors import HybridGKDError
from hybrid_gkd.launch.preflight import check_all
from hybrid_gkd.testing import make_tiny_model

pytestmark = pytest.mark.slow
MODELS, PATH = "distillation.teacher_models", "model.lora_adapter_path"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_adapters(tmp_path_factory.mktemp("adapters"))
    make_tiny_model(folder / "wide", hidden=96)
    make_adapter(folder / "wide", folder / "of-wide", seed=1, r=2, target_modules=["q_proj"])
    make_adapter(folder / "base", folder / "head", seed=1, r=2, target_modules=["lm_head"])
    make_adapter(folder / "base", folder / "embedding", seed=1, r=2, target_modules=["embed_tokens"])
    make_adapter(folder / "base", folder / "high", seed=1, r=513, target_modules=["q_proj"])
    make_adapter(
        folder / "base", folder / "pattern", seed=1, r=2, target_modules=["q_proj", "v_proj"],
        rank_pattern={"v_proj": 4},
    )  # fmt: skip
    (shutil.copytree(folder / "a", folder / "nothing") / "adapter_config.json").unlink()
    rows = [{"prompt": f"What is {i}?", "data_source": "abc"[i % 3]} for i in range(9)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def config(folder, *overrides):
    given = [f"{MODELS}.{name}.model.path={folder}/base" for name in "abc"]
    given += [f"{MODELS}.{name}.{PATH}={folder}/{name}" for name in "ab"]
    given += [f"{MODELS}.{name}.backend=hf" for name in "abc"]
    return load_config([
        f"actor_rollout_ref.model.path={folder}/base", f"data.train_files={folder}/train.jsonl", *given,
        "data.train_batch_size=9", "data.max_prompt_length=32", "data.max_response_length=16", "trainer.device=cpu",
        f"trainer.default_local_dir={folder}/out", "actor_rollout_ref.rollout.name=hf",
        *(each.format(folder) for each in overrides),
    ])  # fmt: skip


def services(folder, *overrides):
    teachers = run_teachers(config(folder, *overrides))
    return [(teacher.service, teacher.adapter, len(teacher.adapters)) for teacher in teachers]


def test_teachers_of_one_model_share_a_service_unless_its_settings_differ(folder):
    assert services(folder) == [("teacher a", "a", 2), ("teacher a", "b", 0), ("teacher a", None, 0)]
    own = [f"{MODELS}.a.chat_template=x", f"{MODELS}.b.num_microbatches=3", f"{MODELS}.c.request_timeout=9"]
    assert services(folder, *own) == services(folder)
    other = services(folder, f"{MODELS}.b.dtype=float32")
    assert other == [("teacher a", "a", 1), ("teacher b", "b", 1), ("teacher a", None, 0)]
    none = [f"{MODELS}.{name}.{PATH}=null" for name in "ab"]
    assert services(folder, *none) == [("teacher a", None, 0), ("teacher b", None, 0), ("teacher c", None, 0)]
    given = [f"{MODELS}.b.server_ip=host", f"{MODELS}.b.{PATH}=null", f"{MODELS}.b.adapter=x"]
    assert services(folder, *given)[1] == ("teacher b", "x", 0)


def test_the_plan_has_one_service_and_says_why_another_is_not_shared(folder):
    facts = check_all(config(folder, f"{MODELS}.c.dtype=float32"))
    lines = [line for line in str(facts.plan).splitlines() if line.startswith("teacher")]
    assert [line.partition(", key")[0] for line in lines] == [
        f"teacher a: started by this run with the adapter {folder}/a",
        f"teacher b: served by teacher a with the adapter {folder}/b",
        "teacher c: started by this run, not served by teacher a (other dtype)",
    ]
    assert set(facts.local_teachers) == {"teacher a", "teacher c"}
    hashes = [facts.settings[f"{MODELS}.{name}.model.path (hash of the weights)"] for name in "abc"]
    assert len(set(hashes)) == 3


@pytest.mark.parametrize(("overrides", "part"), [
    (["b.{path}={{}}/nothing"], "b.{path}: {}/nothing: must be a PEFT folder with adapter_config.json"),
    (["b.{path}={{}}/of-wide"], "b.{path}: {}/of-wide: {}/of-wide/adapter_model.safetensors does not match the model"),
    (["b.{path}={{}}/head"], "b.{path}: {}/head: the adapter's target_modules: the output head (lm_head) cannot have"),
    (["b.{path}={{}}/embedding"], "only linear layers can have adapters, but model.embed_tokens is not linear"),
    (["b.{path}={{}}/high", "b.backend=vllm"], "b.{path}: {}/high: the adapter's rank must be at most 512 with vLLM"),
    (["b.{path}={{}}/pattern", "b.backend=vllm"], "{}/pattern: an adapter with rank_pattern or alpha_pattern needs"),
    (["b.server_ip=host"], "b.{path}: must be null with distillation.teacher_models.b.server_ip"),
    (["b.adapter=x"], "b.adapter: needs a running service (server_ip); the folder of an adapter is distillation."),
    (["b.model.path={{}}/a"], "b.model.path: the folder has a LoRA adapter but no model"),
])  # fmt: skip
def test_an_adapter_that_cannot_be_served_is_refused_by_its_key(folder, overrides, part):
    with pytest.raises(HybridGKDError) as caught:
        check_all(config(folder, *(f"{MODELS}.{each.format(path=PATH)}" for each in overrides)))
    assert part.replace("{path}", PATH).replace("{}", str(folder)) in str(caught.value)
    assert "actor_rollout_ref.teacher" not in str(caught.value)

"""One service for several LoRA adapters of one model: engines, the service's command, and a run with three teachers."""

import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
from adapters import make_adapters
from documented import ROOT
from transformers import AutoModelForCausalLM

from hybrid_gkd.compat.vllm.versions import vllm_available
from hybrid_gkd.config.loading import load_config
from hybrid_gkd.errors import ConfigError, ModelError, TeacherMismatch
from hybrid_gkd.launch.preflight import check_all
from hybrid_gkd.models.tokenizer import load_tokenizer, num_token_ids, tokenizer_hash
from hybrid_gkd.teacher.engines.engine_table import load_scoring_engine, weights_fingerprint
from hybrid_gkd.teacher.engines.options import EngineOptions
from hybrid_gkd.teacher.server.local import TeacherProcess
from hybrid_gkd.teacher_client import TeacherClient
from hybrid_gkd.types import Reading

TIMEOUT = 300.0  # seconds; ends a test that hangs
TOLERANCE = 1e-4  # of both engines in float32, as in test_scoring_engines.py
MODELS = {None: "base", "a": "a-merged", "b": "b-merged"}
needs_vllm = pytest.mark.skipif(not vllm_available(), reason="vLLM is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_adapters(tmp_path_factory.mktemp("adapters"))


def make_readings(seed, count=3):
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, 250, rng.integers(12, 40), dtype=np.int32) for _ in range(count)]
    return [Reading(token_ids=each, positions=np.arange(5, len(each))) for each in ids]


def score_in_turns(folder, backend):
    """Requests of all adapters alternate, so that vLLM's batches mix them and the other engine sorts them."""
    engine = load_scoring_engine(EngineOptions(
        ckpt_path=str(folder / "base"), backend=backend, device="cpu", max_model_len=64, n_logprobs=9,
        adapters=tuple((name, str(folder / name)) for name in ("b", "a")),
    ))  # fmt: skip
    for seed in range(4):
        for name in MODELS:
            engine.add((seed, name), make_readings(seed), 9, 1.0, None, name)
    found = {}
    while engine.num_tokens:
        found |= dict(engine.step())
    return engine.info, found


def check_scores(found, reading, logits):
    """Compare the scores of a reading with the log-softmax of a merged model's logits [L, V]."""
    expected = logits[reading.positions - 1].double().log_softmax(-1).numpy()
    top = -np.sort(-expected, axis=1)[:, :9]
    np.testing.assert_allclose(np.take_along_axis(expected, found.ids, 1), top, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(found.logprobs, top, rtol=0, atol=TOLERANCE)
    chosen = expected[np.arange(len(top)), reading.token_ids[reading.positions]]
    np.testing.assert_allclose(found.sampled_logprobs, chosen, rtol=0, atol=TOLERANCE)
    return expected


def merged_logits(folder, path, readings):
    """Logits [L, V] of each reading by the shortest way there is."""
    model = AutoModelForCausalLM.from_pretrained(folder / path, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(input_ids=torch.from_numpy(each.token_ids[None].astype(np.int64))).logits[0] for each in readings]


@pytest.mark.parametrize("backend", ["hf", pytest.param("vllm", marks=needs_vllm)])
def test_each_adapter_scores_as_the_merged_model(backend, folder):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:  # vLLM changes its process
        info, found = pool.submit(score_in_turns, folder, backend).result(TIMEOUT)
    assert [each.name for each in info.adapters] == ["b", "a"]
    assert len({info.weights, *(each.weights for each in info.adapters)}) == 3
    seen = {}
    for name, path in MODELS.items():
        readings = [reading for seed in range(4) for reading in make_readings(seed)]
        all_scores = [scores for seed in range(4) for scores in found[seed, name]]
        for scores, reading, logits in zip(all_scores, readings, merged_logits(folder, path, readings), strict=True):
            seen[name] = check_scores(scores, reading, logits)
    assert all(np.abs(seen[name] - seen[None]).max() > 0.1 for name in "ab")  # the adapters matter


def test_a_service_by_hand_serves_each_adapter_by_its_name(folder, tmp_path):
    adapters = tuple((name, str(folder / name)) for name in "ab")
    options = EngineOptions(
        ckpt_path=str(folder / "base"), backend="hf", device="cpu", max_model_len=64, adapters=adapters
    )
    tokenizer, readings = load_tokenizer(str(folder / "base")), make_readings(7)
    needs = {"tokenizer_hash": tokenizer_hash(tokenizer), "tokenizer_size": num_token_ids(tokenizer)}
    service = TeacherProcess(options.ckpt_path, log_path=tmp_path / "log", options=options.command_line())
    with service as teacher:
        teacher.wait_ready()

        def connect(adapter):
            size = num_token_ids(tokenizer)
            return TeacherClient([teacher.address], topk=9, vocab_size=size, keys=teacher.keys, adapter=adapter)

        for name, path in MODELS.items():
            with connect(name) as client:
                served = client.handshake(**needs, max_sequence_length=50)
                found = [future.result(TIMEOUT) for future in client.submit(readings)]
            assert served.weights == weights_fingerprint(options, "hf", dict(adapters).get(name))
            for scores, reading, logits in zip(found, readings, merged_logits(folder, path, readings), strict=True):
                expected = logits[reading.positions - 1, :].log_softmax(-1).numpy()
                chosen = expected[np.arange(len(expected)), reading.token_ids[reading.positions]]
                np.testing.assert_allclose(scores.sampled_logprobs, chosen, rtol=0, atol=TOLERANCE)
        with connect("c") as client, pytest.raises(TeacherMismatch, match="has a, b, the student needs c"):
            client.handshake(**needs, max_sequence_length=50)
        status = run_module("hybrid_gkd.teacher", "status", "--addr", teacher.address, "--keys", str(teacher.keys))
        assert [line.split()[1] for line in status.stdout.splitlines() if line.startswith("adapter ")] == ["a", "b"]


def test_a_store_of_scores_tells_the_adapter_from_the_model(folder, tmp_path):
    rows = [{"prompt": f"What is {i} + {i}?", "response": f"It is {2 * i}."} for i in range(3)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    shutil.copytree(folder / "base", tmp_path / "student")
    tokenizer = load_tokenizer(str(tmp_path / "student"))
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}<|a|>{{ m['content'] }}{{ eos_token }}{% else %}"
        "{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "student")
    command = [
        "score", "answers.jsonl", "--student=student", f"--ckpt-path={folder / 'base'}", "--backend=hf", "--device=cpu",
        "--topk=9", "--out=store", "data.max_prompt_length=32", "data.max_response_length=24",
    ]  # fmt: skip
    own = f"actor_rollout_ref.teacher.model.lora_adapter_path={folder / 'a'}"
    done = run_module("hybrid_gkd.teacher", *command, own, cwd=tmp_path)
    assert "3 completions by base with adapter teacher" in done.stdout, done.stdout + done.stderr
    assert ", 3 of them new" in done.stdout
    done = run_module("hybrid_gkd.teacher", *command, cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(r"store has scores of base with adapter teacher \(.*, and would get those of base \(", done.stderr)


def run_module(module, *arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.parametrize(("adapters", "text"), [
    ([("a", "nowhere")], "--adapters a: nowhere: must be a PEFT folder with adapter_config.json"),
    ([("a", "x"), ("a", "y")], "--adapters a: must be one folder, 2 are given"),
])  # fmt: skip
def test_an_engine_with_an_unusable_adapter_is_not_loaded(folder, adapters, text):
    options = EngineOptions(ckpt_path=str(folder / "base"), backend="hf", device="cpu", adapters=tuple(adapters))
    with pytest.raises(ModelError, match=text):
        load_scoring_engine(options)


def test_a_run_with_three_teachers_starts_one_service_and_notices_another_adapter(folder, tmp_path):
    """Teachers a and b are adapters, the third is the model itself."""
    shutil.copytree(folder / "b", tmp_path / "b")
    rows = [{"prompt": f"What is {i}?", "data_source": ("a", "b", "default")[i % 3]} for i in range(9)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    models, run = "distillation.teacher_models", tmp_path / "out"
    overrides = [
        *(f"{models}.{name}.model.path={folder}/base" for name in "abc"),
        *(f"{models}.{name}.backend=hf" for name in "abc"),
        f"{models}.a.model.lora_adapter_path={folder}/a", f"{models}.b.model.lora_adapter_path={tmp_path}/b",
        f"{models}.c.key=default", f"actor_rollout_ref.model.path={folder}/b-merged", "trainer.logger=[]",
        f"data.train_files={tmp_path}/train.jsonl", "data.train_batch_size=9", "data.max_prompt_length=32",
        "data.max_response_length=8", "distillation.topk=16", "trainer.device=cpu", "actor_rollout_ref.rollout.name=hf",
        f"trainer.default_local_dir={run}", "trainer.total_training_steps=2", "trainer.save_freq=1",
    ]  # fmt: skip
    done = run_module("hybrid_gkd", *overrides, "trainer.total_training_steps=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (at,) = run.rglob("metrics.jsonl")
    assert [file.name for file in (at.parent / "logs").glob("teacher*")] == ["teacher_a.log"]
    row = next(row for row in map(json.loads, at.read_text(encoding="utf-8").splitlines()) if "actor/kl_loss" in row)
    assert all(row[f"teacher/{key}/token_fraction"] > 0 for key in ("a", "b", "default"))
    shutil.copytree(folder / "a", tmp_path / "b", dirs_exist_ok=True)
    key = r"distillation\.teacher_models\.b\."
    with pytest.raises(ConfigError, match=rf"(?s){key}allow_teacher_change: .*{key}model\.path \(hash of the"):
        check_all(load_config(overrides, config_name="gkd"))

"""docs/results.md from stored runs: the page, the choice of settings, and runs that fail or are stopped."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch.nn import functional as F

import hybrid_gkd
from hybrid_gkd.config.loading import load_config
from hybrid_gkd.demo.folders import DemoPaths
from hybrid_gkd.reporting.metric_table import METRICS
from hybrid_gkd.testing import make_tokenizer

sys.path.insert(0, str(Path(hybrid_gkd.__file__).parents[1] / "benchmarks"))
import results  # type: ignore[import-not-found]
import results_compress
import results_report
from results import Run, Setting

TITLES = {
    "many": ("Many prompts", {"many-opd": "distillation", "many-grpo": "GRPO"}),
    "few": ("Few prompts", {"few-opd": "distillation"}),
    "compress": ("A smaller model", {"compress-opd": "distillation"}),
}
HEAD = {
    "models": "abc", "device": "CPU", "code": "123", "date": "2026-01-01", "setting": "rate 0.001, mini-batch 32",
    "overrides": "", "teacher": "38M parameters, 85.0 % right", "student": "6M parameters, 12.0 % right",
}  # fmt: skip
SETTING = Setting(1e-3, 32)


def stored(file, points, metric="val/accuracy", **head):
    """Store a run, in a file NAME-seed-SEED.csv, with values of the metric at (minutes, answer tokens)."""
    name, _, seed = file.stem.partition("-seed-")
    rows = [{"step": i, "minutes": m, "answer_tokens": t, metric: value} for i, (m, t, value) in enumerate(points)]
    results.store(file.with_stem(f"{name}-{seed}"), HEAD | {"run": name, "seed": seed} | head, rows)


def make_settings(folder, **changes):
    fields = {"paths": DemoPaths.under(folder), "device": "cpu", "steps": 6, "results": folder / "stored"}
    return results.Settings(**fields | changes)


@pytest.mark.slow
def test_the_page_has_a_table_and_a_picture_per_regime_and_facts_per_folder(tmp_path):
    stored(tmp_path / "many-opd-seed-0.csv", [(0, 0, 0.1), (2, 1e6, 0.5), (4, 2e6, 0.9)])
    stored(tmp_path / "many-opd-seed-1.csv", [(0, 0, 0.1), (2, 1e6, 0.5), (4, 2e6, 0.7)])
    stored(tmp_path / "few-opd-seed-0.csv", [(0, 0, 0.1), (1, 4e6, 0.3)], together=2)
    other, search = tmp_path / "compress", {"searched": "1", "setting": "rate 3"}
    stored(other / "compress-opd-seed-0.csv", [(0, 0, 0.3), (1, 1e6, 0.2)], "val/forward_kl", models="x")
    stored(other / "search" / "compress-opd-seed-0.csv", [(0, 0, 0.3), (1, 1e6, 0.25)], "val/forward_kl", **search)
    stored(tmp_path / "search" / "many-opd-seed-0.csv", [(0, 0, 0.1), (1, 1e6, 0.4)], **search)
    stored(tmp_path / "few-opd-seed-1.csv", [(0, 0, 0.1), (1, 4e6, 0.3)], together=2, setting="rate 5")
    stored(tmp_path / "peers" / "many-opd-seed-0.csv", [(0, 0, 0.1), (7, 1e6, 0.6)], models="y")
    (tmp_path / "empty").mkdir()
    for name in ("about", "few", "more", "compress/about", "empty/about", "peers/many"):
        (tmp_path / f"{name}.md").write_text(f"Words of {name}.\n", encoding="utf-8")
    results_report.report(tmp_path, TITLES, tmp_path)
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    setting = HEAD["setting"]
    parts = [
        "Words of about.", "1 or 2 runs at a time on each; teacher 38M parameters, 85.0 % right; student 6M",
        "### Many prompts", "![Accuracy by minutes and by tokens](results_many.svg)",
        f"| distillation | 2 | 80.0 (70.0 to 90.0) | 4.00 (4.00 to 4.00) | 2.00 (2.00 to 2.00) | {setting} |",
        "### Few prompts", "Words of few.",
        f"| 2 | 30.0 (30.0 to 30.0) | 1.00 (1.00 to 1.00) | 4.00 (4.00 to 4.00) | {setting} or rate 5",
        "Settings are the best of a [search](search/README.md)",
        "Words of compress/about.", "models x;",
        "![Divergence by minutes and by tokens](results_compress.svg)",
        f"| distillation | 1 | 0.2000 | 1.00 | 1.00 | {setting} |",
        "[search](compress/search/README.md)",
        "models y;", "Words of peers/many.", "![Accuracy by minutes and by tokens](results_peers_many.svg)",
        "Words of more.",
    ]  # fmt: skip
    places = [page.find(part) for part in parts]
    assert -1 not in places, parts[places.index(-1)]
    assert places == sorted(places)
    for folder, end in ((tmp_path, "rate 3: 40.0"), (other, "rate 3: 0.2500")):
        assert f"| distillation | 1 | {end} |" in (folder / "search" / "README.md").read_text(encoding="utf-8")
    assert "GRPO" not in page  # it has no runs
    assert "Words of empty" not in page
    for picture, label in (
        ("many", "accuracy on"), ("few", "accuracy on"), ("peers_many", "accuracy on"),
        ("compress", "KL(teacher, student)"),
    ):  # fmt: skip
        assert label in (tmp_path / f"results_{picture}.svg").read_text(encoding="utf-8")


def test_what_cannot_be_compared_or_read_is_refused(tmp_path):
    def write():
        results_report.report(tmp_path, TITLES, tmp_path)

    with pytest.raises(SystemExit, match="no runs are stored"):
        write()
    points = [(0, 0, 0.1), (2, 1e6, 0.5)]
    stored(tmp_path / "many-opd-seed-0.csv", points)
    stored(tmp_path / "many-opd-seed-1.csv", points, models="other")
    with pytest.raises(SystemExit, match="several models cannot be compared: abc, other"):
        write()
    stored(tmp_path / "many-opd-seed-1.csv", points, run="many-unknown")
    with pytest.raises(SystemExit, match="runs that the list does not have: many-unknown"):
        write()
    (tmp_path / "many-opd-1.csv").write_text("step\n1\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"many-opd-1\.csv is no stored run"):
        write()
    assert not (tmp_path / "results.md").exists()


@pytest.mark.parametrize(
    ("name", "metric", "best"), [("few-opd", "val/accuracy", 2), ("compress-opd", "val/forward_kl", 1)]
)
def test_the_best_setting_of_the_search_is_chosen(tmp_path, name, metric, best):
    settings = results.RUNS[name][1].settings
    assert results.chosen(name, tmp_path) == settings[0]
    for setting, end in zip(settings[1:], (0.2, 0.4), strict=False):
        file = Run(name, setting, searched=True).file(tmp_path)
        rows = [{"step": 0, "minutes": 0, "answer_tokens": 0, metric: 0.3},
                {"step": 1, "minutes": 1, "answer_tokens": 1, metric: end}]  # fmt: skip
        results.store(file, HEAD | {"run": name, "seed": 0}, rows)
    assert results.chosen(name, tmp_path) == settings[best]
    wanted = results.wanted("run", [name, "many-grpo"], [0, 1], tmp_path)
    assert [(run.name, run.seed) for run in wanted] == [(each, seed) for seed in (0, 1) for each in (name, "many-grpo")]
    assert wanted[0].setting == settings[best]
    assert len(results.wanted("search", [name], [0, 1], tmp_path)) == len(settings)


def test_a_run_that_would_be_made_otherwise_now_is_missing(tmp_path):
    run, settings = Run("many-grpo", SETTING), make_settings(tmp_path)
    assert not results.is_stored(run, settings)
    now = " ".join(results.overrides_of(run, settings))
    results.store(run.file(settings.results), HEAD | {"run": run.name, "seed": 0, "overrides": now},
                  [{"step": 0, "minutes": 0, "answer_tokens": 0, "val/accuracy": 0.1}])  # fmt: skip
    assert results.is_stored(run, settings)
    assert not results.is_stored(run, make_settings(tmp_path, overrides=("data.seed=1",)))
    assert not results.is_stored(run, make_settings(tmp_path, steps=7))
    assert not results.is_stored(Run("many-grpo", Setting(1e-4, 32)), settings)


def test_minutes_and_tokens_are_those_of_training_steps():
    metrics = [{"step": 0, "val/accuracy": 0.1}] + [
        {"step": i, "timing/step": 30.0, "response_length/mean": 10.0, "actor/loss": 1.0, "perf/mfu": 0.1}
        for i in range(1, 201)
    ]
    metrics[100]["val/accuracy"] = 0.5
    rows = results.curve(metrics, batch=(2, 2), written=(0.0, 0))
    assert rows[0] == {"step": 0, "val/accuracy": 0.1, "minutes": 0.0, "answer_tokens": 0.0}
    assert rows[100]["minutes"] == 50
    assert rows[100]["answer_tokens"] == 4000
    assert "perf/mfu" not in rows[1]
    thin = results.thinned(rows)
    assert len(thin) < 80
    assert [row["step"] for row in thin if "val/accuracy" in row] == [0, 100]
    assert {name for name in results_report.COLUMNS if "/" in name} <= METRICS.keys()


def test_minutes_of_a_teachers_completion_count_when_it_is_first_used():
    rows = [
        {"step": i, "timing/step": 60.0, "response_length/mean": 10.0, "training/given_fraction": 1.0}
        for i in range(5)
    ]  # fmt: skip
    found = results.curve(rows, batch=(4, 1), written=(30.0, 10))
    assert [row["minutes"] for row in found] == [0, 3, 6, 8, 9]  # 4, 4 and 2 of them for half a minute each
    half = results.curve([row | {"training/given_fraction": 0.5} for row in rows], batch=(4, 1), written=(30.0, 10))
    assert [row["minutes"] for row in half] == [0, 2, 4, 6, 8]


def test_a_teachers_completion_with_a_line_separator_is_one_row(tmp_path):
    settings = make_settings(tmp_path)
    for file in (settings.paths.train, settings.written.with_suffix(".prompts.jsonl")):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text('{"prompt": "a"}\n', encoding="utf-8")
    written = {"prompt": "a", "given": "one\u2028two\x85three"}
    settings.written.write_text(json.dumps(written, ensure_ascii=False) + "\n", encoding="utf-8")
    settings.written.with_suffix(".seconds").write_text("0.5\n", encoding="utf-8")
    run = Run("many-sft_teacher", results.RUNS["many-sft_teacher"][1].settings[0])
    results.write_prompts([run], settings)
    assert json.loads(settings.prompts(run).read_text(encoding="utf-8")) == written


def test_a_prompt_with_a_given_completion_has_no_drawn_ones():
    rows = [
        {"step": i, "timing/step": 60.0, "response_length/mean": 10.0, "training/given_fraction": given}
        for i, given in enumerate((0.0, 1.0, 0.5, 0.0))
    ]  # fmt: skip
    found = results.curve(rows, batch=(4, 8), written=(30.0, 100))
    assert [row["answer_tokens"] for row in found] == [0, 40, 220, 540]  # 4, 2 + 16 and 32 completions
    assert [row["minutes"] for row in found] == [0, 3, 5, 6]


def test_a_run_that_cannot_be_made_here_says_what_it_needs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results.importlib.util, "find_spec", lambda name: None)
    results.train_missing([Run("many-trl", SETTING)], make_settings(tmp_path), time.monotonic() + 60)
    assert capsys.readouterr().out == "many-trl 0: skipped: needs TRL, which is not installed (pip install trl)\n"


WHOLE = """import json, pathlib
for step in (0, 1):
    row = {"step": step, "timing/step": 6.0, "response_length/mean": 2.0, "val/accuracy": 0.5}
    print(json.dumps(row), file=open(pathlib.Path(FOLDER, "metrics.jsonl"), "a"))"""
"""A program that comes to its end."""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Names of runs -> Python code that they are to be, with the name FOLDER; filled by the test."""
    programs = {}
    monkeypatch.setattr(results, "LOOK_EVERY", 0.1)
    monkeypatch.setattr(results, "run_command", lambda run, settings, folder: [
        sys.executable, "-c", f"FOLDER = {str(folder)!r}\n{programs[run.name]}"
    ])  # fmt: skip
    for folder in ("teacher", "student"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.safetensors").write_bytes(b"weights")
    sizes = {"parameters": 5_640_000, "held_out_accuracy": 0.125}
    (tmp_path / "demo.json").write_text(json.dumps({"teacher": sizes, "student": sizes}), encoding="utf-8")
    return programs


@pytest.mark.slow
def test_a_run_that_fails_does_not_keep_the_others_and_leaves_its_log(tmp_path, programs, capsys):
    programs |= {"many-opd": "print('no such thing'); raise SystemExit(3)", "many-grpo": WHOLE}
    programs["few-opd"] = "import time; time.sleep(600)"
    settings = make_settings(tmp_path, together=2)
    runs = [Run(name, SETTING) for name in ("many-opd", "many-grpo")]
    with pytest.raises(SystemExit, match=r"^failed: many-opd 0$"):
        results.train_missing(runs, settings, time.monotonic() + 300)
    results.train_missing([Run("few-opd", SETTING)], settings, time.monotonic() + 1)
    (run,) = results_report.read_all(settings.results)
    assert run.name == "many-grpo"
    assert run.points("minutes", "val/accuracy") == [(0.0, 0.5), (0.1, 0.5)]
    assert run.end("answer_tokens") == 64  # 2 tokens of each of 4 x 8 answers
    assert run.head["student"] == "5.64M parameters, 12.5 % right"
    out, failure = capsys.readouterr().out, "many-opd 0: failed with exit code 3: \nno such thing"
    assert out.count(failure) == 2  # once more when the others have ended
    assert "many-grpo 0: step 1, 0.10 minutes of training: val/accuracy 0.5" in out
    assert "few-opd 0: stopped before its end" in out
    assert sorted(file.name for file in settings.results.glob("*.log")) == ["few-opd-0.log", "many-opd-0.log"]


@pytest.mark.slow
def test_a_run_that_failed_beside_others_is_trained_when_they_have_ended(tmp_path, programs):
    settings = make_settings(tmp_path, together=2)
    needed = settings.results / "many-grpo-0.csv"
    fails = f"import pathlib\nif not pathlib.Path({str(needed)!r}).exists(): exit(3)\n"
    programs |= {"many-grpo": WHOLE, "many-opd": f"{fails}{WHOLE}"}
    runs = [Run(name, SETTING) for name in ("many-opd", "many-grpo")]
    results.train_missing(runs, settings, time.monotonic() + 300)
    assert [run.name for run in results_report.read_all(settings.results)] == ["many-grpo", "many-opd"]
    assert all(results.is_stored(run, settings) for run in runs)


def test_a_student_that_is_trained_again_replaces_the_one_before(tmp_path, programs):
    programs["compress-opd"] = f"""{WHOLE}
pathlib.Path(FOLDER, "huggingface").mkdir()
pathlib.Path(FOLDER, "huggingface", NAME).touch()"""
    settings, run = make_settings(tmp_path), Run("compress-opd", SETTING)
    settings.written.parent.mkdir()
    results.write_rows(settings.prompts(run), [])
    code = programs["compress-opd"]
    for name in ("first", "second"):
        programs["compress-opd"] = f"NAME = {name!r}\n{code}"
        assert results.train(run, settings, 0, time.monotonic() + 300, threading.Event())
    assert [file.name for file in settings.student_of(run).iterdir()] == ["second"]


@pytest.mark.slow
def test_a_run_that_is_stopped_is_not_stored_and_leaves_no_process(tmp_path, programs):
    file, over = tmp_path / "child", threading.Event()
    programs["many-opd"] = f"""{WHOLE}
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(FOLDER, "child").write_text(str(child.pid))
pathlib.Path(FOLDER, "child").rename({str(file)!r})
time.sleep(600)"""
    over.wait = lambda seconds: (time.sleep(0.05), file.exists())[1]  # type: ignore[method-assign]
    settings = make_settings(tmp_path)
    assert results.train(Run("many-opd", SETTING), settings, 0, time.monotonic() + 300, over) is False
    assert results_report.read_all(settings.results) == []
    child, deadline = int(file.read_text(encoding="utf-8")), time.monotonic() + 60
    while psutil.pid_exists(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(child)


def test_a_machine_without_git_can_store_runs(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert results.commit() == "unknown"


def test_models_of_other_runs_are_refused(tmp_path, programs):
    settings = make_settings(tmp_path)
    results.check_models(settings)
    stored(settings.results / "many-opd-seed-0.csv", [(0, 0, 0.1)])
    stored(settings.results / "search" / "many-opd-seed-0.csv", [(0, 0, 0.1)], models="searched")
    with pytest.raises(SystemExit, match=r"holds runs of other models \(abc, searched, here [0-9a-f]{12}\)"):
        results.check_models(settings)


def test_training_files_have_the_prompts_and_completions_of_their_runs(tmp_path):
    rows = [{"prompt": f"p{i}", "answer": f"a{i}"} for i in range(600)]
    settings = make_settings(tmp_path, steps=1000)
    results.write_rows(settings.paths.train, rows)
    settings.written.parent.mkdir()
    results.write_rows(settings.written.with_suffix(".prompts.jsonl"), rows)
    results.write_rows(settings.written, [row | {"given": "teacher's"} for row in rows[:590]])
    settings.written.with_suffix(".seconds").write_text("0.5\n", encoding="utf-8")
    runs = [Run(name, SETTING) for name in ("many-opd", "few-sft_data", "many-off_policy")]
    settings.prompts(runs[0]).write_text('{"prompt": "of fewer steps"}\n', encoding="utf-8")
    results.write_prompts(runs, settings)
    files = [settings.prompts(run).read_text(encoding="utf-8").splitlines() for run in runs]
    assert [len(lines) for lines in files] == [600, 512, 590]
    assert [json.loads(lines[1]).get("given") for lines in files] == [None, "a1", "teacher's"]
    assert [results.seconds_written(run, settings) for run in runs] == [(0.0, 0), (0.0, 0), (0.5, 590)]


@pytest.mark.parametrize("change", ["killed", "more steps"])
def test_completions_of_the_teacher_are_written_anew_unless_their_time_is_known(tmp_path, monkeypatch, change):
    rows = [{"prompt": f"p{i}", "answer": f"a{i}"} for i in range(6)]
    settings = make_settings(tmp_path)
    settings.written.parent.mkdir()
    for name in ("written.jsonl", "written.jsonl.json", "written.jsonl.rejected"):
        (settings.written.parent / name).write_text("{}\n", encoding="utf-8")
    results.write_rows(settings.written.with_suffix(".prompts.jsonl"), rows[:3])
    if change != "killed":
        settings.written.with_suffix(".seconds").write_text("0.5\n", encoding="utf-8")

    def start(command, **how):
        assert [file.name for file in settings.written.parent.iterdir()] == ["written.prompts.jsonl"]
        results.write_rows(settings.written, [row | {"given": "teacher's"} for row in rows])
        states = iter((None, None, 0))
        return SimpleNamespace(poll=lambda: next(states), returncode=0)

    monkeypatch.setattr(results.subprocess, "Popen", start)
    monkeypatch.setattr(results, "stop", lambda process: None)
    found = results.write_completions(rows, Run("many-off_policy", SETTING), settings)
    assert len(found) == 6
    assert 0 < float(settings.written.with_suffix(".seconds").read_text(encoding="utf-8")) < 0.5
    assert results.write_completions(rows, Run("many-off_policy", SETTING), settings) == found


def test_a_signal_ends_the_teacher_that_writes(tmp_path, monkeypatch, request):
    popen, before, started = subprocess.Popen, signal.getsignal(signal.SIGTERM), []

    def unexpected(*_):
        raise TimeoutError

    def start(command, **how):
        started.append(popen([sys.executable, "-c", "import time; time.sleep(600)"], **how))
        request.addfinalizer(started[0].kill)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return started[0]

    request.addfinalizer(lambda: signal.signal(signal.SIGTERM, before))
    signal.signal(signal.SIGTERM, unexpected)  # the default would end the tests
    monkeypatch.setattr(results.subprocess, "Popen", start)
    with pytest.raises(SystemExit):
        results.write_completions([], Run("many-off_policy", SETTING), make_settings(tmp_path))
    assert started[0].poll() is not None


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_run_of_the_program_has_a_configuration_that_loads(tmp_path, device):
    settings = make_settings(tmp_path, device=device, steps=100)
    found = {}
    for name, (regime, method) in results.RUNS.items():
        if method.how == "program":
            run = Run(name, method.settings[0])
            config = load_config(results.program_overrides(run, settings, tmp_path), config_name="gpu_demo")
            found[name] = " ".join(results.overrides_of(run, settings)) + f"{regime.prompts} {method.given}"
            assert config.trainer.total_training_steps == round(100 * run.setting.length), name
            assert config.actor_rollout_ref.actor.optim.lr == run.setting.rate, name
            assert (config.data.response_key is not None) == (method.given is not None), name
            assert config.has_reward == (not name.startswith("compress")), name
            alone = name.endswith(("sft_data", "sft_teacher", "sft_teacher_long", "grpo"))  # without a teacher
            assert config.distillation.enabled == (not alone or name == "compress-sft_teacher"), name
            answers = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
            expected = config.mini_batch_size if name == "many-opd_fresh" else {"cuda": 256, "cpu": 32}[device]
            assert answers == expected or name.startswith("compress"), name
    assert len(set(found.values())) == len(found)


def tiny_llama(layers, seed, vocab_size=31):
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(
            vocab_size=vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=layers,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.5,
        )).eval()  # fmt: skip


def test_a_model_without_layers_is_the_model_of_the_other_layers():
    model, kept = tiny_llama(5, seed=0), tiny_llama(3, seed=1)
    weights = model.state_dict()
    for new, old in enumerate((0, 2, 4)):
        layer = {key.removeprefix(f"model.layers.{old}."): value for key, value in weights.items()
                 if key.startswith(f"model.layers.{old}.")}  # fmt: skip
        kept.model.layers[new].load_state_dict(layer)
    rest = {key: value for key, value in weights.items() if ".layers." not in key}
    assert kept.load_state_dict(rest, strict=False).unexpected_keys == []
    results_compress.drop_layers(model, [1, 3])
    ids = torch.arange(14).view(2, 7)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, kept(ids).logits, rtol=0, atol=0)
        assert torch.equal(model.generate(ids, max_new_tokens=4), kept.generate(ids, max_new_tokens=4))  # with a cache
    assert model.config.num_hidden_layers == 3


def test_a_comparison_is_over_the_completions_up_to_their_ends():
    """Two prompts of different lengths, the shorter one padded on the left; completions of 2 and 4 tokens."""
    first, second, end = tiny_llama(2, seed=0), tiny_llama(2, seed=1), 30
    prompts, completions = [[5, 6, 7], [8, 9]], [[3, end], [4, 1, 2, 11]]
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    batch = SimpleNamespace(input_ids=torch.tensor([[5, 6, 7], [0, 8, 9]]), attention_mask=mask)
    rows = torch.tensor([[5, 6, 7, 3, end, end, end], [0, 8, 9, 4, 1, 2, 11]])
    judge = object.__new__(results_compress.Judge)
    judge.encoded, judge.ends = [batch], [end]
    kl, nll, same = judge.compare(first, second, [rows])
    found = []
    for prompt, completion in zip(prompts, completions, strict=True):
        for i, token in enumerate(completion):
            ids = torch.tensor([prompt + completion[:i]])
            with torch.inference_mode():
                p, q = (F.softmax(model(ids).logits[0, -1].double(), dim=-1) for model in (first, second))
            found.append(((p * (p / q).log()).sum(), -q[token].log(), (p.argmax() == q.argmax()).double()))
    expected = torch.tensor(found, dtype=torch.float64).mean(0).tolist()
    assert [kl, nll, same] == pytest.approx(expected, rel=1e-4)
    assert judge.compare(first, first, [rows])[::2] == pytest.approx((0, 1), abs=1e-6)


def test_a_teacher_does_not_differ_from_itself_where_its_tokenizer_has_no_padding(monkeypatch):
    monkeypatch.setattr(results_compress, "MAX_NEW_TOKENS", 3)
    tokenizer = make_tokenizer()
    tokenizer.pad_token, tokenizer.padding_side = None, "left"
    teacher = tiny_llama(1, seed=0, vocab_size=len(tokenizer))
    judge = results_compress.Judge(teacher, tokenizer, ["a", "longer"], [tokenizer.eos_token_id])
    forward, perplexity, same, reverse = judge.measure(teacher)
    assert [forward, reverse, same] == pytest.approx([0, 0, 100], abs=1e-6)
    assert perplexity > 1
    assert len(judge.greedy(teacher)) == 2

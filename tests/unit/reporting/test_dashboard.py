import base64
import http.server
import itertools
import json
import logging
import re
import threading

import pytest

from hybrid_gkd.config.loading import load_config, to_yaml
from hybrid_gkd.ppo.best import LOWEST
from hybrid_gkd.ppo.trainer import COMPARED
from hybrid_gkd.reporting import dashboard
from hybrid_gkd.reporting import wandb_tracker as wandb_module
from hybrid_gkd.reporting.dashboard import REPORTED, SECTIONS, plan_panels, reports
from hybrid_gkd.reporting.metric_table import METRICS

REWARDED = ("reward.answer_key=answer", "actor_rollout_ref.rollout.n=2")


def run_config(*overrides):
    return load_config([
        "data.train_files=a.jsonl", "actor_rollout_ref.model.path=student",
        "actor_rollout_ref.teacher.model.path=teacher", *overrides,
    ])  # fmt: skip


def shown(run=None):
    return {name for panels in plan_panels(run).values() for panel in panels for name in panel.metrics}


def test_no_panel_shows_a_metric_that_does_not_exist():
    for panels in SECTIONS.values():
        for panel in panels:
            for name in panel.metrics:
                start = name.rstrip("*") if name[-1] in "/*" else None
                assert name in METRICS or (start and any(each.startswith(start) for each in METRICS)), name
    for start in REPORTED:
        assert any(name.startswith(start) for name in METRICS), start


def test_a_panel_has_metrics_of_one_unit():
    for panel in itertools.chain(*plan_panels().values()):
        assert len({METRICS[name][0] for name in panel.metrics}) == 1, panel.title


def test_the_phases_that_are_stacked_do_not_overlap():
    def stacked(*overrides):
        panels = itertools.chain(*plan_panels(run_config(*overrides)).values())
        return next(panel.metrics for panel in panels if panel.title == "Step time by phase")

    assert "timing/gen" in stacked()
    pools = ("actor_rollout_ref.hybrid_engine=false", "rollout.n_gpus_per_node=1")
    assert "timing/wait_prev_gen" in stacked(*pools)
    assert "timing/gen" not in stacked(*pools)
    assert "timing/gen" in shown(run_config(*pools))


def test_every_metric_has_a_panel_and_the_headline_ones_have_one_by_name():
    assert shown() == set(METRICS)
    named = {name for panels in SECTIONS.values() for panel in panels for name in panel.metrics}
    headline = {*COMPARED, "val/accuracy", "val/forward_kl", "val/response_length"}
    headline |= {"timing/step", "perf/tokens_per_second", "teacher/hidden_fraction", "response_length/mean"}
    assert headline <= named


@pytest.mark.slow
def test_a_run_has_panels_of_what_it_can_report():
    distils, learns = run_config(), run_config(*REWARDED, "distillation.enabled=false")
    assert shown(distils) == {name for name in METRICS if reports(distils, name)}
    assert not {"reward/mean", "timing/reward"} & shown(distils)
    assert "val/accuracy" not in shown(distils)
    assert {"actor/kl_loss", "teacher/latency_p95", "timing/wait_prev_teacher"} <= shown(distils)
    assert not {"actor/kl_loss", "teacher/latency_p95", "timing/wait_prev_teacher"} & shown(learns)
    assert {"reward/mean", "actor/pg_clipfrac"} <= shown(learns)
    assert "Teacher" not in plan_panels(learns)
    both = run_config(*REWARDED, "distillation.use_task_rewards=true", "data.val_files=b.jsonl")
    assert {"reward/mean", "timing/reward", "actor/kl_loss", "val/forward_kl"} <= shown(both)
    several = ("actor_rollout_ref.rollout.val_kwargs.n=4", "actor_rollout_ref.rollout.val_kwargs.temperature=1")
    assert "val/pass@k" in shown(run_config("data.val_files=b.jsonl", *REWARDED, *several)) - shown(both)
    assert not {name for name in shown(run_config("trainer.device=cpu")) if name.startswith("memory/")}


def test_the_list_of_runs_has_the_best_of_what_a_validation_measures():
    measured = dashboard.NAMES_OF[dashboard.SOURCES].rpartition("/")[2].strip("()").split("|")
    best = {name: "min" if name in LOWEST else "max" for name in measured}
    assert best == {name: wandb_module.BEST[f"val/{name}"] for name in measured}


@pytest.mark.slow
def test_the_device_of_a_run_that_left_it_open_is_the_one_of_its_last_start(tmp_path):
    file, starts = tmp_path / "config.yaml", tmp_path / "starts.jsonl"
    file.write_text(to_yaml(run_config()), encoding="utf-8")
    assert dashboard.load_run(file).trainer.device == "auto"
    rows = [{"start": 1.0, "loaded": {"device": "cuda"}}, {"start": 2.0, "loaded": {"device": "cpu"}}, {"ready": 3.0}]
    starts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert not {name for name in shown(dashboard.load_run(file)) if name.startswith("memory/")}
    file.write_text(to_yaml(run_config("trainer.device=cuda")), encoding="utf-8")
    assert dashboard.load_run(file).trainer.device == "cuda"


ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
PPO = (*REWARDED, "distillation.enabled=false")
SWITCHED_ON = {  # what is switched on -> what then has a panel, all names that begin so, and only then
    "a critic": ((*PPO, "algorithm.adv_estimator=gae"), [
        "critic/", "timing/values", "timing/update_critic", "memory/critic_update/critic_params_gb",
        "memory/update/critic_optimizer_state_gb", "perf/copy/critic_",
    ]),
    "a reference policy": ((f"{ACTOR}.use_kl_loss=true",), [
        "actor/ref_kl", "timing/ref", "memory/reference/ref_params_gb", "memory/rollout/ref_params_gb",
        "perf/copy/ref_params_",
    ]),
    "a reference policy in the rewards": (
        (*PPO, "algorithm.adv_estimator=remax", "algorithm.use_kl_in_reward=true"), ["reward/kl", "timing/ref"],
    ),
    "adapters": (("actor_rollout_ref.model.lora_rank=8",), ["memory/update/frozen_", "perf/copy/frozen_params_"]),
    "a schedule": (
        ("distillation.distillation_loss_coef_schedule=linear", "distillation.use_task_rewards=true", *REWARDED),
        ["actor/distillation/coef"],
    ),
    "a reward from the teacher": (("distillation.as_reward=true", f"{ROLLOUT}.n=2"), ["reward/teacher"]),
    "greedy answers": ((*PPO, "algorithm.adv_estimator=remax"), ["reward/greedy"]),
    "a reward model": (
        ("distillation.enabled=false", f"{ROLLOUT}.n=2", "data.val_files=b.jsonl", "reward_model.enable=true",
         "reward_model.model.path=judge"),
        ["reward/<name>", "timing/reward_model", "val/reward_model", "memory/reward_model/reward_model_params_gb",
         "perf/copy/reward_model_params_"],
    ),
    "rewards in processes": ((*PPO, "reward.name=math"), ["reward/failures"]),
    "rewards by data source": ((*PPO, "reward.name=by_data_source"), ["reward/<name>/mean"]),
    "importance weights": (("algorithm.rollout_is_threshold=2",), ["actor/importance/mean", "actor/importance/kl"]),
    "token weights": (("distillation.token_weights=position",), ["actor/distillation/selected_fraction"]),
    "another tokenizer": (("distillation.cross_tokenizer=map",), ["teacher/tokens/span_fraction"]),
    "rejection": (
        ("algorithm.rollout_rs=token_k2", "algorithm.rollout_rs_threshold=2"), ["actor/importance/rejected"],
    ),
    "rewards of held-out answers": (("data.val_files=b.jsonl", "reward.answer_key=answer"), ["val/accuracy"]),
    "restarts": (("trainer.max_restarts=1",), ["reliability/", "timing/snapshot"]),
    "separate pools": (
        ("actor_rollout_ref.hybrid_engine=false", "rollout.n_gpus_per_node=1"), ["timing/wait_prev_gen"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SWITCHED_ON)
def test_what_is_not_switched_on_has_no_panel(what):
    overrides, starts = SWITCHED_ON[what]
    distils, switched_on = shown(run_config()), shown(run_config(*overrides))
    for start in starts:
        names = {name for name in METRICS if name.startswith(start)}
        assert names, start
        assert names <= switched_on
        assert not names & distils


def test_a_run_of_adapters_has_no_reference_model():
    """Its reference policy is below the adapters."""
    run = run_config("actor_rollout_ref.model.lora_rank=8", f"{ACTOR}.use_kl_loss=true")
    assert {"actor/ref_kl", "timing/ref"} <= shown(run)
    assert not [name for name in shown(run) if "ref_params" in name]


def test_a_run_on_given_completions_alone_has_no_panel_of_its_own_completions():
    own = {"training/staleness", "response_length/clip_ratio", "response/repeated_fraction", "response/ended_fraction"}
    given = ("data.response_key=answer", "actor_rollout_ref.rollout.end_repetitions=8")
    assert own <= shown(run_config(*given))
    assert not own & shown(run_config(*given, "distillation.enabled=false"))


def test_stored_scores_are_not_compared_with_in_validations():
    run = run_config("data.response_key=answer", "data.val_files=b.jsonl", "actor_rollout_ref.teacher.cache=store")
    assert {"val/forward_kl", "val/reverse_kl"} <= shown(run)
    run.actor_rollout_ref.teacher.model.path = None
    assert not {"val/forward_kl", "val/reverse_kl"} & shown(run)


def test_what_a_reward_model_says_of_held_out_answers_is_no_accuracy():
    given = ("reward_model.enable=true", "reward_model.model.path=judge", "data.val_files=b.jsonl")
    assert "val/accuracy" not in shown(run_config(*given))
    assert {"val/accuracy", "val/reward_model"} <= shown(run_config(*given, "reward.functions={model: 1, length: 1}"))


@pytest.mark.slow
def test_the_last_section_has_what_is_seldom_looked_at():
    for overrides in ((), *(overrides for overrides, _ in SWITCHED_ON.values())):
        rest = {name for panel in plan_panels(run_config(*overrides))[dashboard.REST] for name in panel.metrics}
        assert rest <= {"training/global_step", "training/epoch", "timing/elapsed", "val/num_prompts"}


@pytest.mark.slow
def test_the_specification_is_printed_without_a_login(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    assert dashboard.main(["--project", "p", "--entity", "e", "--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert (found["entity"], found["project"], found["displayName"]) == ("e", "p", dashboard.NAME)
    sections = found["spec"]["section"]["panelBankConfig"]["sections"]
    names = ["Learning", "Samples", *list(plan_panels())[1:], "Configuration"]
    assert [section["name"] for section in sections] == names
    drawn = [panel["config"] for section in sections for panel in section["panels"] if "metrics" in panel["config"]]
    assert {name for config in drawn for name in config["metrics"]} == METRICS.keys() - dashboard.NAMES_OF.keys()
    patterns = [config["metricRegex"] for config in drawn if "metricRegex" in config]
    for name in ("val/pass@4", "val/org/math/accuracy"):
        assert [bool(re.fullmatch(pattern, name)) for pattern in patterns].count(True) == 1
    assert [c["plotType"] for c in drawn if c["chartTitle"] == "Step time by phase"] == ["stacked-area"]


@pytest.mark.slow
def test_a_server_that_is_away_costs_a_run_its_workspace_and_nothing_else(monkeypatch, tmp_path, caplog, capsys):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(dashboard, "API_SECONDS", 1)
    caplog.set_level(logging.INFO)
    (tmp_path / "config.yaml").write_text(to_yaml(run_config()), encoding="utf-8")
    wandb_module.create_workspace("team", "project", tmp_path, "cpu")
    assert "cannot create the wandb workspace: " in caplog.text
    assert "python -m hybrid_gkd.reporting.dashboard --project project --entity team" in caplog.text
    assert dashboard.main(["--project", "project", "--entity", "team"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


class Server(http.server.ThreadingHTTPServer):
    """Keeps views of one project as a server of wandb does: what it answers is what wandb and its library ask for."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.views = {}

    @property
    def shown(self):
        """(type, name, titles of the panels) of each view."""
        found = []
        for view in self.views.values():
            titles = set(re.findall(r'"chartTitle": ?"([^"]*)"', view["spec"]))
            found.append((view["type"], view["displayName"], titles))
        return found

    def answer(self, query, given):
        if "upsertView" in query:
            number = given.get("id") or base64.b64encode(f"View:{len(self.views)}".encode()).decode()
            project = {"id": "p", "name": given["projectName"], "entityName": given["entityName"]}
            times = {"createdAt": "2026-01-01T00:00:00Z", "updatedAt": "2026-01-01T00:00:00Z"}
            self.views[number] = {**times, **given, "id": number, "project": project, "user": None}
            return {"upsertView": {"view": self.views[number], "inserted": True}}
        if "allViews" in query:
            kind, name = given.get("kind", given.get("viewType")), given.get("viewName")
            views = [view for view in self.views.values() if view["type"] == kind and name in (None, view["name"])]
            return {"project": {"allViews": {"edges": [{"node": view} for view in views]}}}
        if "internalId" in query:
            return {"project": {"id": "p", "internalId": "UHJvamVjdEludGVybmFsSWQ6MQ=="}}
        if "models(" in query:
            project = {"id": "p", "name": "project", "entityName": "team", "createdAt": "2026-01-01T00:00:00Z"}
            edges = [{"node": {**project, "isBenchmark": False, "user": None}, "cursor": ""}]
            return {"models": {"edges": edges, "pageInfo": {"endCursor": None, "hasNextPage": False}}}
        if "view(" in query:
            return {"view": self.views[given["reportId"]]}
        who = {"id": "u", "entity": "team", "username": "u", "email": "", "flags": "{}", "teams": {"edges": []}}
        return {"viewer": who}


class Answers(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path != "/graphql":  # wandb's own metrics
            self.send_error(404)
            return
        asked = json.loads(sent)
        answer = json.dumps({"data": self.server.answer(asked["query"], asked.get("variables") or {})}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass


@pytest.mark.slow
def test_the_workspace_and_the_report_are_made_once_and_then_brought_up_to_date(monkeypatch, tmp_path, caplog, capsys):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        (tmp_path / "config.yaml").write_text(to_yaml(run_config(*PPO)), encoding="utf-8")
        wandb_module.create_workspace("team", "project", tmp_path, "cpu")
        [(kind, name, titles)] = server.shown
        assert (kind, name) == ("project-view", dashboard.NAME)
        assert "PPO" not in titles
        assert not any(title.startswith("GPU memory") for title in titles)
        address = f"http://127.0.0.1:{server.server_port}/team/project"
        assert f"wandb workspace of the project project: {address}" in caplog.text
        wandb_module.create_workspace("team", "project", tmp_path, "cuda")
        assert server.shown == [(kind, name, titles)]  # the user's own by now
        for _ in range(2):
            assert dashboard.main(["--project", "project", "--entity", "team"]) == 0, capsys.readouterr().err
        workspace, report = server.shown
        assert [workspace[:2], report[:2]] == [("project-view", dashboard.NAME), ("runs", dashboard.NAME)]
        assert {"Held-out divergence", "GPU memory at the start of phase publish"} <= workspace[2] & report[2]
        assert "val/generations" in list(server.views.values())[1]["spec"]
        server.shutdown()

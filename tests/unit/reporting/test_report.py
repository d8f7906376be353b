from pathlib import Path

import pytest

from hybrid_gkd.reporting.final_table import final_table
from hybrid_gkd.testing import tiny_config

GKD = ["actor_rollout_ref.teacher.model.path=unused", "data.val_files=unused"]
PPO = ["distillation.enabled=false", "actor_rollout_ref.rollout.n=2", "reward.answer_key=answer"]
BOTH = ["distillation.use_task_rewards=true", *GKD, *PPO[1:]]


def table(overrides, first=None, last=None, **options):
    """Label -> value."""
    config = tiny_config(*overrides)
    text = final_table(config, **{"steps": 80, "wall_seconds": 59.6} | options, first=first or {}, last=last or {})
    lines = text.splitlines()
    assert len({len(lines[0]), len(lines[-1])}) == 1
    return {label: value.strip() for label, value in (line.strip().split("  ", 1) for line in lines[1:-1])}


def test_full_table():
    run = Path("outputs/gkd/demo")
    found = table(
        [*GKD, "reward.answer_key=answer"], wall_seconds=3725.4, teacher_accuracy=0.9,
        first={"val/accuracy": 0.025, "val/forward_kl": 2.5, "val/reverse_kl": 3.5, "actor/kl_loss": 1.23456},
        last={"val/accuracy": 0.875, "val/forward_kl": 0.125, "val/reverse_kl": 0.25, "actor/kl_loss": 0.01234},
        checkpoint=run / "global_step_80", huggingface=run / "global_step_80" / "huggingface",
        metrics=run / "metrics.jsonl", report=Path("/outputs/a run/report.html"), config_file=run / "config.yaml",
    )  # fmt: skip
    assert found == {
        "held-out accuracy: teacher": "90.0%",
        "held-out accuracy: student before": "2.5%",
        "held-out accuracy: student after": "87.5%",
        "val/forward_kl, before and after": "2.5000 -> 0.1250",
        "val/reverse_kl, before and after": "3.5000 -> 0.2500",
        "actor/kl_loss, first and last step": "1.2346 -> 0.0123",
        "training steps": "80",
        "wall time": "1:02:05",
        "checkpoint": "outputs/gkd/demo/global_step_80",
        "Hugging Face folder": "outputs/gkd/demo/global_step_80/huggingface",
        "metrics": "outputs/gkd/demo/metrics.jsonl",
        "report, to open in a browser": "file:///outputs/a%20run/report.html",
        "resolved configuration": "outputs/gkd/demo/config.yaml",
    }


def test_a_validation_without_training_says_so():
    validated = {"val/forward_kl": 0.125, "val/num_prompts": 256.0}
    found = table([*GKD, "trainer.val_only=true"], steps=0, last=validated)
    assert list(found.items())[:4] == [
        ("validated, not trained (trainer.val_only)", "unused"), ("val/forward_kl", "0.125"),
        ("val/num_prompts", "256"), ("training steps", "0"),
    ]  # fmt: skip
    resumed = table([*GKD, "trainer.val_only=true"], steps=40, last=validated, checkpoint=Path("global_step_40"))
    assert resumed["validated, not trained (trainer.val_only)"] == "global_step_40"


def test_the_best_checkpoint_has_a_line_where_one_is_asked_for():
    asked = [*GKD, "trainer.best_metric=val/forward_kl"]
    found = table(asked, best=(0.25, 7, Path("runs/global_step_7")))
    assert found["best checkpoint by val/forward_kl"] == "0.2500 after step 7: runs/global_step_7"
    assert table(asked)["best checkpoint by val/forward_kl"] == "—"


@pytest.mark.parametrize(
    "reward",
    ["reward.functions={custom: 1.0, length: 0.5}", "reward.custom_reward_function.path=f.py", "reward.name=length"],
)
def test_a_mean_of_rewards_that_may_be_negative_is_no_percentage(reward):
    own = ["reward.custom_reward_function.path=f.py"] if "custom:" in reward else []
    found = table([*PPO, GKD[1], reward, *own], first={"val/accuracy": -0.1016}, last={"val/accuracy": 1.5})
    assert list(found.items())[:2] == [("held-out reward: student before", "-0.1016"),
                                       ("held-out reward: student after", "1.5000")]  # fmt: skip


def test_what_is_unknown_is_a_dash():
    found = table([*GKD, "reward.answer_key=answer"], last={"val/forward_kl": 0.125, "val/accuracy": 0.5})
    assert found["wall time"] == "1:00"
    assert table(GKD, resumed=True)["wall time of this start"] == "1:00"
    assert found["val/forward_kl, before and after"] == "— -> 0.1250"
    assert found["checkpoint"] == "—"
    assert "held-out accuracy: student before" not in found


@pytest.mark.parametrize(
    ("overrides", "computed", "labels"),
    [
        (GKD, ["actor/kl_loss"], ["actor/kl_loss, first and last step"]),
        (PPO, ["actor/kl_loss", "reward/mean"], ["reward/mean, first and last step"]),
        ([*BOTH], ["reward/mean", "actor/kl_loss", "val/reward_model", "val/accuracy"], [
            "held-out accuracy: student before", "held-out accuracy: student after",
            "val/reward_model, before and after", "actor/kl_loss, first and last step",
            "reward/mean, first and last step",
        ]),
        (GKD, [], []),
    ],
    ids=["distillation", "PPO", "task rewards", "no step"],
)  # fmt: skip
def test_only_results_that_were_computed_have_a_line(overrides, computed, labels):
    values = dict.fromkeys(computed, 0.5)
    found = list(table(overrides, first=values, last=values))
    assert found[: found.index("training steps")] == labels

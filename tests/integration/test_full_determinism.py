"""Two runs of the same seeds have the same metrics to the last digit, with vLLM and a teacher of their own."""

import json

import pytest
from test_command_line import arguments, run, world  # noqa: F401 (a fixture)

from hybrid_gkd.compat.vllm.versions import vllm_available

STEPS = 6


def curves(folder):
    """Return the metrics of all steps without those of time, memory and the service."""
    measured = ("timing/", "perf/", "memory/", "teacher/", "time")
    rows = (json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines())
    return [{name: value for name, value in row.items() if not name.startswith(measured)} for row in rows]


@pytest.mark.skipif(not vllm_available(), reason="vLLM is not installed")
def test_two_runs_of_the_same_seeds_are_equal_to_the_last_digit(world, tmp_path):  # noqa: F811
    found = []
    for name in ("one", "two"):
        overrides = (
            "actor_rollout_ref.actor.fsdp_config.full_determinism=true", f"trainer.total_training_steps={STEPS}",
            f"trainer.experiment_name={name}", "trainer.save_freq=0",
        )
        code, _, errors = run(arguments(world, tmp_path, *overrides))
        assert code == 0, errors
        found.append(curves(tmp_path / "hybrid_gkd" / name))
    assert found[0] == found[1]
    assert {"actor/kl_loss", "actor/grad_norm", "val/forward_kl"} <= set().union(*found[0])
    assert len({row["actor/kl_loss"] for row in found[0] if "actor/kl_loss" in row}) == STEPS

"""benchmarks/endurance.py in short: a run continues after each loss. CPU, real processes."""

import sys
from pathlib import Path

import pytest

import hybrid_gkd

sys.path.insert(0, str(Path(hybrid_gkd.__file__).parents[1] / "benchmarks"))
import endurance


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_a_run_continues_after_a_loss_of_ray_of_its_worker_and_of_its_teacher(capsys):
    parts = ["control store", "teacher's broker", "worker"]
    assert endurance.main(["--kills", "3", "--parts", *parts]) == 0
    _, _, *rows, lost = capsys.readouterr().out.splitlines()
    assert sorted(row.split(" | ")[:2] for row in rows) == [[f"| {part}", "1"] for part in parts]
    assert lost.startswith("reliability/restarts=2, ")

"""benchmarks/endurance.py in short. CPU, real processes."""

import math
import sys
from pathlib import Path

import pytest

import hybrid_gkd

sys.path.insert(0, str(Path(hybrid_gkd.__file__).parents[1] / "benchmarks"))
import endurance

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")


def test_a_run_with_losses_ends_like_an_undisturbed_one_and_leaves_nothing(capsys):
    parts = ["driver", "teacher's broker"]
    code, text = endurance.main(["kills", "--kills=2", "--steps=40", "--parts", *parts]), capsys.readouterr().out
    assert code == 0, text
    _, _, *rows, lost, end = text.splitlines()
    assert sorted(row.split(" | ")[:2] for row in rows) == [[f"| {part}", "1"] for part in parts]
    assert lost.startswith("reliability/restarts=1, ")
    assert end == "weights, optimizer state and losses as undisturbed, nothing left behind"


def test_a_soak_measures_every_process(capsys, monkeypatch):
    monkeypatch.setattr(endurance, "SAMPLE_SECONDS", 0.2)
    monkeypatch.setattr(endurance, "MEMORY_BOUND", math.inf)  # of the first steps, which allocate
    code, text = endurance.main(["soak", "--steps=60"]), capsys.readouterr().out
    assert code == 0, text
    named = {line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| ")}
    assert named >= {*endurance.PARTS, "report", "guard", "timing/step", "gkd/metrics.jsonl", "Ray's logs"}


def test_growth_is_per_1000_steps_and_leaves_out_the_beginning():
    points = [(step, 100.0 if step < 200 else 0.003 * step) for step in range(0, 1000, 50)]
    assert endurance.growth(points, 1000) == pytest.approx(3.0)
    assert math.isnan(endurance.growth(points[:6], 1000))

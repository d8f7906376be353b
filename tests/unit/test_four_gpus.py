"""Figures of benchmarks/four_gpus.py."""

import json
import sys
from pathlib import Path

import hybrid_gkd

sys.path.insert(0, str(Path(hybrid_gkd.__file__).parents[1] / "benchmarks"))
import four_gpus  # type: ignore[import-not-found]


def test_figures_of_a_resumed_run_are_not_those_of_the_steps_before(tmp_path):
    rows = [
        {"step": step, "timing/gen": seconds, "perf/tokens_per_second": 8 / seconds}
        for step, seconds in enumerate((9.0, 1.0, 1.0, 2.0, 4.0), start=1)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    assert "gen 3.00," in four_gpus.step_figures(tmp_path, after=3)
    assert "gen 2.00," in four_gpus.step_figures(tmp_path)  # without the first two

from pathlib import Path

from hybrid_gkd.reporting.final_table import final_table


def test_full_table():
    run = Path("outputs/gkd/demo")
    table = final_table(
        steps=80,
        wall_seconds=3725.4,
        teacher_accuracy=0.9,
        student_accuracy_before=0.025,
        student_accuracy_after=0.875,
        kl_first=1.23456,
        kl_last=0.01234,
        checkpoint=run / "global_step_80",
        huggingface=run / "global_step_80" / "huggingface",
        metrics=run / "metrics.jsonl",
        config=run / "config.yaml",
    )
    rows = dict(line.strip().split("  ", 1) for line in table.splitlines()[1:-1])
    assert {label: value.strip() for label, value in rows.items()} == {
        "held-out accuracy: teacher": "90.0%",
        "held-out accuracy: student before": "2.5%",
        "held-out accuracy: student after": "87.5%",
        "actor/kl_loss, first and last step": "1.2346 -> 0.0123",
        "training steps": "80",
        "wall time": "1:02:05",
        "checkpoint": "outputs/gkd/demo/global_step_80",
        "Hugging Face folder": "outputs/gkd/demo/global_step_80/huggingface",
        "metrics": "outputs/gkd/demo/metrics.jsonl",
        "resolved configuration": "outputs/gkd/demo/config.yaml",
    }


def test_what_is_unknown_is_a_dash():
    lines = final_table(steps=3, wall_seconds=59.6).splitlines()
    assert sum(line.endswith("  —") for line in lines) == 7
    assert any(line.endswith("  — -> —") for line in lines)
    assert any(line.endswith("  1:00") for line in lines)
    assert len({len(lines[0]), len(lines[-1])}) == 1

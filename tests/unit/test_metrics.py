from pathlib import Path

import pytest

from hybrid_gkd.metrics import METRICS, check_names, markdown_table


def test_every_metric_is_documented():
    for name, metric in METRICS.items():
        assert name.count("/") >= 1, name
        assert metric.description, name
        assert "|" not in metric.description + metric.unit, f"{name}: breaks the table of docs/metrics.md"


def test_check_names_accepts_the_table():
    check_names(METRICS)
    check_names({})


def test_check_names_names_every_stranger():
    with pytest.raises(AssertionError, match="actor/kl_lost, zzz"):
        check_names({"zzz": 1.0, "actor/kl_lost": 1.0, "actor/kl_loss": 1.0})


def test_docs_page_is_the_table():
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text() == markdown_table(), "run: python -m hybrid_gkd.metrics > docs/metrics.md"

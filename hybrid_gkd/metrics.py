"""`python -m hybrid_gkd.metrics > docs/metrics.md`: the table of reporting/metric_table.py as text."""

from hybrid_gkd.reporting.metric_table import markdown_table

if __name__ == "__main__":
    print(markdown_table(), end="")

"""Output of a run: metrics, trackers, trace, report, final table."""

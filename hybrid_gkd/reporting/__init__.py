"""What a run shows: metrics, trackers, trace, final table."""

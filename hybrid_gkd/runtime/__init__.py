"""Intervals of time, what is waited for, files, processes and imports: what every room may use."""

"""Commands and the start of a run: preflight checks, assembly, training, shutdown."""

"""Faster paths through vLLM, each for the versions that it was tried with."""

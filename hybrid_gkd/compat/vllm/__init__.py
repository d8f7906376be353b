"""vLLM: differences between versions and devices, loading, and fast paths for rollouts."""

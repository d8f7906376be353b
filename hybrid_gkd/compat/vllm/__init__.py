"""vLLM: what differs between its versions and devices, and how it is loaded."""

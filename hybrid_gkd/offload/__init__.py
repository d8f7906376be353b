"""Device memory by phase of a training step, and host copies of offloaded tensors."""

"""Rollout engines and the publication of weights to them."""

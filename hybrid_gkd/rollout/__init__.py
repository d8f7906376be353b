"""Rollout engines, and the ways in which weights reach them."""

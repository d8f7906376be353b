"""Engines that score sequences."""

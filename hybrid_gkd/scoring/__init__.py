"""Scorers: samples in, signals out."""

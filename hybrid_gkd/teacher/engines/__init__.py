"""Scoring engines of the teacher service."""

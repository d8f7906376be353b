"""Implementation of `hybrid_gkd/teacher_client.py`."""

"""The teacher service: broker, workers and their supervisor."""

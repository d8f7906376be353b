"""The teacher service: broker, workers, and who watches them."""

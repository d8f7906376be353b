"""hybrid_gkd: on-policy distillation of a student language model on a hybrid engine."""

__version__ = "0.1.0"

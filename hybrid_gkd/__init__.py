"""hybrid_gkd: on-policy distillation of a student language model on a hybrid engine."""

from hybrid_gkd.search_path import arrange

__version__ = "0.1.0"
arrange()

"""hybrid_gkd: on-policy distillation of a student language model on a hybrid engine."""

from hybrid_gkd.search_path import arrange, is_own_program
from hybrid_gkd.standard_streams import prepare

__version__ = "0.1.0"
arrange()
if is_own_program():
    prepare()

"""The configuration: its sections (schema.py), their rules (rules.py), and the loading of YAML files (loading.py).

Exports what other folders use of these files. Does not import torch.
"""

from hybrid_gkd.config.actor_rollout_ref import (
    ActorConfig,
    CheckpointConfig,
    CriticConfig,
    FSDPConfig,
    ModelConfig,
    OptimConfig,
    PolicyLossConfig,
    RolloutConfig,
    ScheduleConfig,
    TeacherConfig,
    ValKwargs,
)
from hybrid_gkd.config.learning import (
    ADV_ESTIMATORS,
    CUSTOM,
    MODEL,
    REWARD_MODEL_PATH,
    AlgorithmConfig,
    CustomRewardFunction,
    DistillationConfig,
    KLCtrlConfig,
    OverlongBufferConfig,
    RewardConfig,
    RewardModelConfig,
    rejection_bounds,
)
from hybrid_gkd.config.schema import (
    BATCHES_AHEAD,
    Config,
    DataConfig,
    TrainerConfig,
    WandbConfig,
    prompts_per_update,
    updates_per_step,
)
from hybrid_gkd.config.teachers import (
    DEFAULT_TEACHER,
    NAMED,
    UNNAMED,
    RunTeacher,
    distillation_terms,
    has_several_teachers,
    run_teachers,
    summed_teachers,
)

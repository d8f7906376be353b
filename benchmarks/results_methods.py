"""Methods, regimes and settings that benchmarks/results.py compares."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MINI_BATCH_DIVISOR = {"cuda": 1, "cpu": 16}
"""Rollouts on a CPU have fewer prompts, of which the mini-batches of a setting are a part."""
VALIDATIONS = 5
"""Validations of a run after the first; each takes seconds that train nothing."""
FEW = 512
"""Prompts of the regime with few."""
TOP_K = 64
"""The teacher's candidates in runs whose method has no other number; the recipe has more since those were stored."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Hyperparameters that the search chooses."""

    rate: float
    mini_batch: int
    """Tasks of an optimizer step."""
    length: float = 1.0
    """Training steps as a fraction of those of the other runs."""

    def __str__(self) -> str:
        length = "" if self.length == 1 else f", {self.length:g} as long"
        return f"rate {self.rate:g}, mini-batch {self.mini_batch}{length}"

    @property
    def slug(self) -> str:
        """For the name of a file."""
        return f"{self.rate:g}-{self.mini_batch}-{self.length:g}"

    def overrides(self, steps: int, device: str) -> list[str]:
        """Configuration of a run that would have so many training steps at length 1."""
        mini_batch = max(1, self.mini_batch // MINI_BATCH_DIVISOR[device])
        return [
            f"{ACTOR}.optim.lr={self.rate:g}", f"{ACTOR}.ppo_mini_batch_size={mini_batch}",
            f"trainer.total_training_steps={max(1, round(self.length * steps))}",
        ]  # fmt: skip


def grid(
    rates: tuple[float, ...], mini_batches: tuple[int, ...], lengths: tuple[float, ...] = (1.0,)
) -> tuple[Setting, ...]:
    """All combinations; the first is taken where no search is stored."""
    return tuple(Setting(*each) for each in itertools.product(rates, mini_batches, lengths))


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way to train a student."""

    title: str
    overrides: str = ""
    """Overrides of config/gpu_demo.yaml."""
    given: str | None = None
    """Source of given completions: "data", "teacher", or None."""
    settings: tuple[Setting, ...] = grid((5e-4, 1e-3, 3e-4), (32, 16))
    search_fraction: float = 1 / 3
    """Length of a run of the search."""
    how: str = "program"
    """"program" or "trl"."""
    trl: str = "{}"
    """Further settings of TRL, JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Prompts and the student at the start, for all of its methods."""

    title: str
    overrides: str = ""
    prompts: int | None = None
    """None: all that there are."""
    kept: bool = False
    """Whether the student of a finished run is kept beside the models, for measurements."""
    methods: dict[str, Method]


SFT_COSINE = f"{ACTOR}.optim_sft.lr_scheduler_type=cosine {ACTOR}.optim_sft.lr_warmup_steps_ratio=0.1"
SFT, GIVEN = "distillation.enabled=false", "data.response_key=given"
GRPO = Method(
    title="GRPO", overrides=f"distillation.enabled=false data.train_batch_size=${{by_device:32,4}} {ROLLOUT}.n=8",
    settings=grid((3e-5, 1e-5, 3e-6), (32, 8)),  # at 1e-4 all rewards are lost within 60 steps
)  # fmt: skip


def sampled_at(temperature: float) -> Method:
    """On-policy distillation whose completions are drawn at another temperature than 1."""
    return Method(
        title=f"on-policy, temperature {temperature}", overrides=f"{ROLLOUT}.temperature={temperature}",
        settings=grid((1e-3, 5e-4, 2e-3), (16,)),
    )  # fmt: skip


def with_256_candidates(method: Method) -> Method:
    """The method with as many candidates as the recipe, four times those of the others (`TOP_K`)."""
    return replace(
        method, title=f"{method.title}, 256 candidates", overrides=f"{method.overrides} distillation.topk=256".strip()
    )


VLLM = {"use_vllm": True, "vllm_mode": "colocate"}
"""TRL's vLLM in the process of its trainer."""
REVERSE = "distillation.loss_mode=reverse_kl distillation.candidates=union"
OPD = Method(title="on-policy distillation", settings=grid((1e-3, 5e-4, 3e-4), (32, 16)))
OPD_FEW = replace(OPD, settings=grid((1e-3, 3e-4, 1e-4), (16, 32)))
MANY = {
    "opd": OPD,
    "opd_256": with_256_candidates(OPD),
    "opd_fresh": Method(
        title="on-policy distillation, new completions for each optimizer step", settings=grid((1e-3,), (32,), (8.0,)),
        overrides="data.train_batch_size=${by_device:32,2}",
    ),
    "opd_diverse": sampled_at(1.3),
    "opd_reverse": Method(title="on-policy distillation, reverse KL", overrides=REVERSE),
    "opd_rewards": Method(
        title="on-policy distillation with rewards", settings=grid((5e-4, 1e-3, 3e-4), (8, 16)),
        overrides="distillation.use_task_rewards=true distillation.distillation_loss_coef=0.3 "
        f"distillation.distillation_loss_coef_schedule=cosine data.train_batch_size=${{by_device:64,8}} {ROLLOUT}.n=4",
    ),
    "sft_teacher": Method(title="SFT on the teacher's completions", overrides=f"{SFT} {GIVEN}", given="teacher"),
    "sft_teacher_long": Method(
        title="SFT on the teacher's completions, four passes", overrides=f"{SFT} {GIVEN}", given="teacher",
        settings=grid((1e-3, 5e-4, 3e-4), (64, 32), (4.0,)),
    ),
    "sft_data": Method(title="SFT on the data's solutions", overrides=f"{SFT} {GIVEN}", given="data"),
    "off_policy": Method(title="off-policy distillation", overrides=GIVEN, given="teacher"),
    "mixed": Method(
        title="half on-policy, half off-policy", given="teacher",
        overrides=f"{GIVEN} distillation.on_policy_fraction=0.5",
    ),
    "grpo": GRPO,
    "trl": Method(
        title="TRL's on-policy distillation", how="trl", settings=grid((1e-3, 5e-4, 3e-4), (32,)), trl=json.dumps(VLLM)
    ),
}
LENGTHS = (1.0, 0.3)
"""Supervised training needs fewer passes over few prompts, which only runs of their whole length show."""
FEW_METHODS = {
    "opd": OPD_FEW,
    "opd_256": with_256_candidates(OPD_FEW),
    "opd_diverse": sampled_at(1.3),
    "opd_hot": sampled_at(1.6),
    "opd_diverse_256": with_256_candidates(sampled_at(1.3)),
    "sft_opd": Method(  # the warm start is the best SFT of this regime
        title="SFT on the data, then on-policy", given="data",
        settings=grid((3e-4, 1e-3, 1e-4), (16, 32)), search_fraction=0.6,
        overrides=f"{GIVEN} distillation.on_policy_fraction=1 trainer.warmup_steps_sft=${{by_device:33,10}} "
        f"{ACTOR}.optim_sft.lr=1e-4 {SFT_COSINE}",
    ),
    "opd_reverse": replace(MANY["opd_reverse"], settings=grid((3e-4, 1e-4, 5e-4), (32, 16))),
    "opd_rewards": replace(MANY["opd_rewards"], settings=grid((1e-3, 3e-4, 1e-4), (4, 8))),
    **{
        name: replace(MANY[name], settings=grid((1e-4, 3e-4, 3e-5), (32,), LENGTHS), search_fraction=1.0)
        for name in ("sft_teacher", "sft_data", "off_policy")
    },
    "mixed": replace(MANY["mixed"], settings=grid((1e-3, 3e-4, 1e-4), (16, 32))),
    "grpo": GRPO,
    "trl": MANY["trl"],
}
WARM_METHODS = {
    "opd": Method(title="then on-policy distillation", overrides=f"{GIVEN} distillation.on_policy_fraction=1"),
    "opd_reverse": Method(
        title="then on-policy distillation, reverse KL",
        overrides=f"{GIVEN} distillation.on_policy_fraction=1 {REVERSE}",
    ),
    "sft_teacher": Method(title="then more SFT", overrides=f"{SFT} {GIVEN}"),
    # Its batches have an eighth of the prompts: a warm start on as many completions takes eight times as many steps.
    "grpo": replace(
        GRPO, title="then GRPO", settings=grid((1e-5, 3e-5, 3e-6), (32, 8), (2.3,)),
        overrides=f"{GRPO.overrides} {GIVEN} distillation.on_policy_fraction=1 "
        "trainer.warmup_steps_sft=${by_device:160,32}",
    ),
}
COMPRESS_SETTINGS = grid((6e-4, 3e-4, 1e-3), (128,))
"""Mini-batches of 32 ended on-policy distillation higher after as many tokens, and each step costs the host 0.13 s."""
COMPRESS_METHODS = {
    "opd": replace(OPD, settings=COMPRESS_SETTINGS),
    "off_policy": replace(MANY["off_policy"], settings=COMPRESS_SETTINGS),
    # As many minutes as on-policy distillation takes, at the best rate of the search.
    "off_policy_long": replace(
        MANY["off_policy"], title="off-policy distillation, seven passes", settings=grid((1e-3,), (128,), (1.7,))
    ),
    # A warm start that lasts as long as the run, so that the teacher measures the divergence in validations.
    "sft_teacher": Method(
        title=MANY["sft_teacher"].title, given="teacher", settings=grid((6e-4, 3e-4, 1e-4), (128,), (0.5, 0.15)),
        search_fraction=1.0,
        overrides=f"{GIVEN} trainer.warmup_steps_sft=${{trainer.total_training_steps}} {SFT_COSINE} "
        f"{ACTOR}.optim_sft.lr=${{{ACTOR}.optim.lr}}",
    ),
    # At on-policy distillation's rate, as many steps as take the same time on an H200.
    "trl": Method(
        title=MANY["trl"].title, how="trl", settings=grid((6e-4,), (128,), (0.3,)),
        trl=json.dumps(VLLM | {"vllm_gpu_memory_utilization": 0.15, "gradient_accumulation_steps": 4}),
    ),
}
REGIMES = {
    "many": Regime(title="Many prompts", methods=MANY),
    "few": Regime(title="512 prompts", prompts=FEW, methods=FEW_METHODS),
    "warm": Regime(
        title="Warm start on the teacher's completions",
        overrides=f"trainer.warmup_steps_sft=${{by_device:20,4}} {ACTOR}.optim_sft.lr=5e-4 {SFT_COSINE}",
        methods={name: replace(method, given="teacher") for name, method in WARM_METHODS.items()},
    ),
    # Another task: its models come from results_compress.py, and its runs are stored in a folder of their own.
    "compress": Regime(
        title="A pretrained model without some of its layers", kept=True, methods=COMPRESS_METHODS,
        overrides=f"reward.answer_key=null data.max_prompt_length=256 data.max_response_length=256 "
        f"data.train_batch_size=${{by_device:1024,8}} {ROLLOUT}.max_num_seqs=${{by_device:1024,8}} "
        f"{ROLLOUT}.val_kwargs.temperature=1 "
        f"{ACTOR}.ppo_max_token_len_per_gpu=${{by_device:32768,4096}} data.filter_overlong_prompts=true",
    ),
}
RUNS = {f"{key}-{name}": (regime, method) for key, regime in REGIMES.items() for name, method in regime.methods.items()}
ON_DEMO = [name for name, (regime, _) in RUNS.items() if regime is not REGIMES["compress"]]
"""Runs with the models of gpu_demo."""

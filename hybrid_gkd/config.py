"""Configuration: one dataclass per section, then YAML, then dotted overrides, then checks.

`load_config` merges the dataclass defaults with one YAML file and with ``dotted.key=value`` overrides
(OmegaConf structured configs, so unknown keys and wrong types are errors), checks what fields demand
of each other, and returns plain dataclasses. Every problem is a ConfigError of the form
``<dotted.key>: <rule>; got <value>``. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from hybrid_gkd.errors import ConfigError
from hybrid_gkd.imports import is_import_path

CONFIG_DIR = Path(__file__).resolve().parent.parent / "config"

TOPK_MODES = ("forward_kl", "reverse_kl", "jsd")
"""Losses on the teacher's candidates."""
SAMPLED_TOKEN_MODES = ("k1", "k2", "k3")
"""Losses on the sampled token."""
BATCHES_AHEAD = {"sync": 0, "one_step_off": 1, "two_step_off": 2}
"""trainer.scheduler -> how many batches generation is ahead of the update, and so the largest staleness."""

TEACHER_PORT = 15555
"""Of a teacher service, unless another one is given."""


@dataclass
class DataConfig:
    """Prompts for training and validation."""

    train_files: Any = MISSING
    """File or list of files (.jsonl, .json, .parquet, .csv) or hub data sets `org/name[:config][:split]`."""
    val_files: Any = None
    """Like train_files; null switches validation off."""
    prompt_key: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    max_prompt_length: int = 1024
    """Tokens, chat template included."""
    max_response_length: int = 1024
    """Tokens that the student may generate."""
    train_batch_size: int = 128
    """Prompts per training step, over all workers."""
    shuffle: bool = True
    """A new order every epoch; false keeps the order of the files."""
    seed: int = 0
    """Seed of the order."""
    filter_overlong_prompts: bool = False
    """Leave out prompts above max_prompt_length (their number is logged) instead of applying truncation."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What to do with a prompt above max_prompt_length: refuse the data, or cut the named part."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the tokenizer's chat template, e.g. {enable_thinking: false}."""


@dataclass
class ModelConfig:
    """The student."""

    path: str = MISSING
    """Hugging Face folder or hub id of a causal language model."""
    tokenizer_path: str | None = None
    """Folder or hub id of the tokenizer; null takes `path`."""
    trust_remote_code: bool = False
    """Run model code that comes with the folder."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a quarter slower."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's config.json to replace, e.g. {attention_dropout: 0.0}."""


@dataclass
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the two moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled weight decay, on matrices only (not on biases and norms)."""
    lr_warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up, until the last step of the run."""
    min_lr_ratio: float = 0.0
    """Share of the peak at which linear and cosine end."""


@dataclass
class FSDPConfig:
    """How the student is sharded and where it waits while it is not its turn (FSDP2)."""

    param_offload: bool = False
    """Keep parameters on the host while the rollout engine has the GPU (no effect on the CPU, nor in a pool without
    the engine)."""
    optimizer_offload: bool = False
    """Keep optimizer state on the host outside of the optimizer step (no effect on the CPU)."""
    reshard_after_forward: bool = True
    """Free a block's gathered parameters after its forward pass; false trades memory for a single gather for all
    micro-batches that are trained together, instead of two for each."""
    model_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the master weights, of the Adam state and of the gradients' sum over micro-batches; the compute type is
    bf16 on GPUs, fp32 on the CPU. With bf16 that sum is rounded after every micro-batch, so that the result depends
    slightly on the cut."""
    fsdp_size: int = -1
    """Workers that share one copy of the weights; -1 = all. Smaller: hybrid sharding, the weights are sharded
    within groups of this size and replicated across them (less traffic between nodes, more memory)."""


@dataclass
class CheckpointConfig:
    """What a checkpoint holds besides what a resume needs."""

    save_hf_model: bool = True
    """Also write a Hugging Face folder (`huggingface/`), which transformers and vLLM load."""


@dataclass
class ActorConfig:
    """The update of the student."""

    ppo_mini_batch_size: int | None = None
    """Prompts per optimizer step; null takes data.train_batch_size (one exactly on-policy step per rollout)."""
    use_dynamic_bsz: bool = True
    """Micro-batches by token count; false: by number of sequences."""
    ppo_max_token_len_per_gpu: int = 16384
    """Tokens (prompt and response) in one packed micro-batch."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Sequences in one micro-batch when use_dynamic_bsz is false."""
    use_torch_compile: bool = False
    """Compile the decoder blocks: the first update takes longer, the others are faster and need less memory."""
    ppo_epochs: int = 1
    """Passes over each rollout."""
    grad_clip: float = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it, with .inf none."""
    clip_ratio: float = 0.2
    """Clip range of PPO's probability ratio."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


@dataclass
class ValKwargs:
    """Sampling in validation."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Nucleus mass."""
    top_k: int = -1
    """-1 keeps the whole vocabulary."""


@dataclass
class EngineKwargs:
    """Arguments handed to an engine as they are."""

    vllm: dict[str, Any] = field(default_factory=dict)
    """For `vllm.LLM(...)`; wins over what this program would choose."""


@dataclass
class RolloutConfig:
    """Generation."""

    name: Literal["auto", "vllm", "hf"] = "auto"
    """Engine: vllm, hf (transformers, slow), or auto = vllm where it is installed."""
    n: int = 1
    """Responses per prompt."""
    temperature: float = 1.0
    """Sampling temperature in training."""
    top_p: float = 1.0
    """Nucleus mass; below 1 the samples are no longer drawn from the student's own distribution."""
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    tensor_model_parallel_size: int = 1
    """Workers that share one copy of the engine's weights."""
    gpu_memory_utilization: float | None = None
    """Share of the GPU's memory for the engine's weights and KV cache; null takes what is free when the engine is
    built, less what stays on the GPU beside it, and no more than max_num_seqs full sequences need (printed by
    --dry-run)."""
    free_cache_engine: bool = True
    """Release the engine's weights and KV cache during the update (vLLM sleep mode, GPUs only)."""
    enforce_eager: bool = False
    """No CUDA graphs: faster start, slower generation."""
    max_num_batched_tokens: int = 8192
    """Tokens in one engine step."""
    max_num_seqs: int = 256
    """Sequences generated at the same time per engine."""
    max_model_len: int | None = None
    """Longest sequence of the engine; null takes prompt limit + response limit."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the engine's weights; auto = bfloat16 on GPUs, float32 on the CPU."""
    seed: int = 0
    """Seed of the sampling; every sequence gets its own from it."""
    update_weights_bucket_megabytes: int = 512
    """Weights gathered at once when they are published, MiB in the engine's type; smaller takes less memory."""
    verify_weights: bool = False
    """After every publish, compare all of the engine's weights with the actor's; a difference ends the run."""
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)
    engine_kwargs: EngineKwargs = field(default_factory=EngineKwargs)


@dataclass
class TeacherModelConfig:
    """The model of a teacher that this run starts itself."""

    path: str | None = None
    """Hugging Face folder or hub id; its tokenizer must be the student's."""


@dataclass
class TeacherConfig:
    """The teacher service."""

    server_ip: str | None = None
    """Address of a running service; null starts one on this machine for the length of the run. Several services of
    one model, separated by commas, share the work; the others take over from one that fails. Each may be host:port."""
    server_port: int | None = None
    """Their port where server_ip names none, null for 15555; or that of a local service, null for any that is free."""
    keys: str | None = None
    """Folder with this client's keys (python -m hybrid_gkd.teacher keys), for services that were started with keys."""
    n_server_workers: int = 8
    """Requests in flight."""
    num_microbatches: int = 8
    """Sequences in one request at most; long ones travel in smaller groups."""
    overlap_rollout: bool = True
    """Send a sequence as soon as it is finished; false waits for the whole rollout."""
    connect_timeout: float = 20.0
    """Seconds for the handshake with a given server."""
    start_timeout: float = 900.0
    """Seconds for a local service to load its model."""
    request_timeout: float = 600.0
    """Seconds until a request, retries included, must be answered."""
    max_retries: int = 3
    """Further attempts for a request that was not answered or not answered well."""
    backend: Literal["auto", "vllm", "hf"] = "auto"
    """Scoring engine of a local service; auto = vllm where it is installed."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where a local service runs; auto = where the workers run: on GPUs that no worker needs, else sharing theirs."""
    tensor_model_parallel_size: int = 1
    """GPUs of a local service."""
    gpu_memory_utilization: float | None = None
    """Share of the GPU's memory for a local vLLM service; null takes 0.9 of GPUs of its own, and what the model needs
    to score where it shares them with the workers (printed by --dry-run)."""
    max_model_len: int | None = None
    """Longest sequence a local service scores; null takes prompt limit + response limit + 1."""
    model: TeacherModelConfig = field(default_factory=TeacherModelConfig)

    @property
    def endpoints(self) -> list[str]:
        """host:port of every given service; empty where server_ip has an empty entry."""
        hosts = [host.strip() for host in (self.server_ip or "").split(",")]
        port = TEACHER_PORT if self.server_port is None else self.server_port
        return [host if ":" in host or not host else f"{host}:{port}" for host in hosts]


@dataclass
class ActorRolloutRefConfig:
    """Student, rollout engine and teacher."""

    hybrid_engine: bool = True
    """Student and rollout engine take turns on the same GPUs; false gives the engine a pool of its own (section
    rollout), where it generates while the student is updated (trainer.scheduler one_step_off or two_step_off)."""
    nccl_timeout: float = 600.0
    """Seconds that any collective, and any call to a worker, may take before the run ends with an error. A generation
    may take longer: it is the time that a worker may say nothing in it (with rollout.name=hf, one batch)."""
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)


@dataclass
class DistillationConfig:
    """The distillation loss."""

    enabled: bool = True
    """false trains with PPO on the rule reward and needs no teacher."""
    loss_mode: Literal["forward_kl", "reverse_kl", "jsd", "mixed", "k1", "k2", "k3"] = "forward_kl"
    """Divergence between teacher and student, see docs/losses.md: on the teacher's candidates (forward_kl,
    reverse_kl, jsd), a weighted sum (mixed), or an estimate from the sampled token (k1, k2, k3)."""
    beta: float = 0.5
    """Weight of the teacher in jsd's mixture; 0 is forward_kl and 1 is reverse_kl."""
    mixed_weights: dict[str, float] = field(default_factory=dict)
    """Weights of loss_mode=mixed, e.g. {forward_kl: 0.5, reverse_kl: 0.5}; of any mode but k1."""
    use_policy_gradient: bool = False
    """Minimise the mean of k1, k2 or k3 over what the student samples, by PPO's clipped loss: the negative advantage of
    the sampled token is the value plus its slope in the student's log-probability. false: the value is the loss."""
    topk: int = 64
    """Teacher candidates per position."""
    tail: Literal["bucket", "none", "renormalise"] = "bucket"
    """The vocabulary outside the top-k: one bucket, left out, or removed from both distributions."""
    temperature: float = 1.0
    """Temperature at which both distributions are compared."""
    distillation_loss_coef: float = 1.0
    """Factor of the loss."""
    use_task_rewards: bool = False
    """Add PPO's policy loss on the rule reward."""
    loss_max_clamp: float | None = None
    """Limit a token's divergence to plus or minus this, nats. A token beyond it has no gradient any more. With
    use_policy_gradient it is the advantage that is limited. actor/distillation/clamp_share says how many tokens are."""


@dataclass
class AlgorithmConfig:
    """Advantages of PPO, and importance weights."""

    adv_estimator: Literal["grpo"] = "grpo"
    """Reward relative to the other responses to the same prompt."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation."""
    rollout_is_threshold: float | None = None
    """Weight the loss of stale responses: each token by how much likelier the present weights make the response up to
    it than the weights that wrote it, this much at most (at least 1, e.g. 2). null: no weights. Costs a forward pass.
    Of distillation and PPO alike; with a trainer.scheduler other than sync."""


@dataclass
class CustomRewardFunction:
    """A reward function of your own."""

    path: str | None = None
    """Python file with a function `f(response: str, answer: str) -> float`."""
    name: str = "compute_score"
    """Name of the function."""


@dataclass
class RewardConfig:
    """Rule reward: what PPO trains on and what validation reports."""

    name: Literal["exact_match", "gsm8k"] = "exact_match"
    """exact_match compares the stripped response; gsm8k compares the last number."""
    answer_key: str | None = None
    """Column with the right answer (dotted for nested ones, e.g. reward_model.ground_truth)."""
    custom_reward_function: CustomRewardFunction = field(default_factory=CustomRewardFunction)


@dataclass
class TrainerConfig:
    """The run."""

    scheduler: Literal["sync", "one_step_off", "two_step_off"] = "sync"
    """How far generation runs ahead of the update: sync = not at all; one_step_off, two_step_off = one or two batches,
    so that the teacher has that long to score; responses then come from weights up to one or two steps old."""
    total_epochs: int = 1
    """Passes over the prompts."""
    total_training_steps: int | None = None
    """Steps; null takes total_epochs. Wins over total_epochs where both are given."""
    project_name: str = "hybrid_gkd"
    """Project in wandb, folder under default_local_dir."""
    experiment_name: str = "gkd"
    """Run name in wandb, folder under the project."""
    logger: list[str] = field(default_factory=lambda: ["console", "jsonl", "wandb"])
    """Any of console, jsonl, wandb, and classes of your own: my_module:MyTracker or path/to/file.py:MyTracker."""
    nnodes: int = 1
    """Machines of the Ray cluster."""
    n_gpus_per_node: int = 1
    """Workers per machine, one GPU each (on the CPU: worker processes)."""
    save_freq: int = -1
    """Steps between checkpoints; -1 saves only at the end, 0 never."""
    test_freq: int = -1
    """Steps between validations; -1 validates only before and after training."""
    val_before_train: bool = True
    """Validate the untrained student first."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto continues from the newest checkpoint of this experiment; resume_path from resume_from_path."""
    resume_from_path: str | None = None
    """A `global_step_N` folder."""
    default_local_dir: str = "outputs"
    """Where run folders go: <default_local_dir>/<project_name>/<experiment_name>."""
    max_actor_ckpt_to_keep: int | None = 2
    """Older checkpoints are removed; null keeps all."""
    balance_batch: bool = True
    """Give each worker the same work, long sequences counting more per token; false: contiguous slices."""
    log_val_generations: int = 8
    """Sample generations logged with each validation."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto = cuda where a GPU is visible."""
    seed: int = 0
    """Seed of the trainer's random states."""


@dataclass
class RolloutPoolConfig:
    """The rollout engine's own pool of workers, with actor_rollout_ref.hybrid_engine=false."""

    nnodes: int = 1
    """Machines of the pool."""
    n_gpus_per_node: int | None = None
    """Workers per machine, one GPU each (on the CPU: worker processes), beside those of trainer.n_gpus_per_node."""


@dataclass
class RayInitConfig:
    """Connection to Ray."""

    address: str | None = None
    """Address of a running cluster; null starts one on this machine for the length of the run."""
    num_cpus: int | None = None
    """CPUs that a local cluster offers; null takes all."""


@dataclass
class Config:
    """The whole configuration."""

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rollout: RolloutPoolConfig = field(default_factory=RolloutPoolConfig)
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)

    @property
    def world_size(self) -> int:
        """Number of workers that train."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def rollout_world_size(self) -> int:
        """Number of workers that generate: the same ones with a hybrid engine."""
        return self.rollout.nnodes * (self.rollout.n_gpus_per_node or 0) or self.world_size

    @property
    def workers_per_node(self) -> int:
        """Workers on one machine, all pools together."""
        return self.trainer.n_gpus_per_node + (self.rollout.n_gpus_per_node or 0)

    @property
    def shard_size(self) -> int:
        """Workers that share one copy of the student's weights."""
        size = self.actor_rollout_ref.actor.fsdp_config.fsdp_size
        return self.world_size if size == -1 else size

    @property
    def max_sequence_length(self) -> int:
        """Tokens of the longest possible prompt with its longest response."""
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def mini_batch_size(self) -> int:
        """Prompts per optimizer step."""
        return self.actor_rollout_ref.actor.ppo_mini_batch_size or self.data.train_batch_size

    @property
    def run_dir(self) -> Path:
        """Folder of this run's checkpoints, metrics and logs."""
        trainer = self.trainer
        return Path(trainer.default_local_dir).expanduser().absolute() / trainer.project_name / trainer.experiment_name


def load_config(
    overrides: list[str] | None = None, *, config_name: str | None = None, config_path: str | Path = CONFIG_DIR
) -> Config:
    """Merge defaults, `<config_path>/<config_name>.yaml` (if a name is given) and dotted overrides; check.

    Raises:
        ConfigError: unknown key, wrong type, missing file, or a rule between fields is broken.
    """
    merged = OmegaConf.structured(Config)
    if config_name is not None:
        merged = _merge(merged, _read_yaml(Path(config_path), config_name))
    for override in overrides or []:
        merged = _merge(merged, _parse_override(override), key=override.partition("=")[0])
    OmegaConf.register_resolver("demo", _demo_path, replace=True)
    try:
        config = OmegaConf.to_object(merged)
    except MissingMandatoryValue as error:
        raise ConfigError(_full_key(error), "must be given", show_value=False) from None
    except OmegaConfBaseException as error:
        raise ConfigError(_full_key(error), _reason(error), show_value=False) from None
    assert isinstance(config, Config)
    _normalise(config)
    check_config(config)
    return config


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML; `load_config` reads it back to the same values."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def to_dict(config: Config) -> dict[str, Any]:
    """The resolved configuration as nested dictionaries of plain values."""
    return dataclasses.asdict(config)


def _read_yaml(folder: Path, name: str) -> DictConfig:
    file = folder / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    if not file.is_file():
        names = ", ".join(sorted(p.stem for p in folder.glob("*.yaml"))) or "none"
        raise ConfigError("--config-name", f"must name a YAML file in {folder} (there: {names})", name)
    try:
        loaded = OmegaConf.load(file)
    except Exception as error:  # yaml's own error types are not part of OmegaConf's interface
        raise ConfigError("--config-name", f"{file} is not valid YAML: {error}", show_value=False) from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError("--config-name", f"{file} must hold a mapping of sections", show_value=False)
    return loaded


def _parse_override(override: str) -> DictConfig:
    key, equals, _ = override.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key.lstrip("+")):
        raise ConfigError(override, "overrides have the form dotted.key=value", show_value=False)
    try:
        return OmegaConf.from_dotlist([override.lstrip("+")])
    except Exception as error:  # the value is parsed as YAML, which has its own error types
        raise ConfigError(key, f"the value is not valid YAML: {error}", override) from None


def _merge(base: Any, extra: DictConfig, key: str = "") -> Any:
    try:
        return OmegaConf.merge(base, extra)
    except ConfigKeyError as error:
        unknown = _full_key(error)
        close = difflib.get_close_matches(unknown, _all_keys(base), n=1, cutoff=0.6)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError(unknown, f"there is no such key{hint}", show_value=False) from None
    except OmegaConfBaseException as error:
        named = error.full_key or key or "config"
        raise ConfigError(str(named), _reason(error), show_value=False) from None
    except TypeError as error:  # a part of a list, for example
        raise ConfigError(key or "config", str(error), show_value=False) from None


def _all_keys(node: Any, prefix: str = "") -> list[str]:
    keys: list[str] = []
    for key in node:
        full = f"{prefix}{key}"
        keys.append(full)
        value = None if OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key) else node[key]
        if isinstance(value, DictConfig):
            keys += _all_keys(value, f"{full}.")
    return keys


def _full_key(error: OmegaConfBaseException) -> str:
    return str(error.full_key or error.key or "config")


def _reason(error: OmegaConfBaseException) -> str:
    reason = str(error.msg or error).splitlines()[0]
    if "is not a ListConfig" in reason:
        return "must be a list: items in brackets, with commas between them"
    return reason


def _demo_path(part: str) -> str:
    """`${demo:student}` in YAML: where the demo keeps its student; nothing is built here."""
    from hybrid_gkd.demo.sorting import DemoPaths, demo_dir

    return str(getattr(DemoPaths.under(demo_dir()), part))


def _normalise(config: Config) -> None:
    arr = config.actor_rollout_ref
    for section, name in (
        (arr.model, "path"), (arr.model, "tokenizer_path"), (arr.teacher.model, "path"), (arr.teacher, "keys")
    ):
        value = getattr(section, name)
        if isinstance(value, str):  # the shell leaves the ~ behind a = alone
            setattr(section, name, os.path.expanduser(value))
    for name in ("train_files", "val_files"):
        value = getattr(config.data, name)
        files = [value] if isinstance(value, str) else (value or [])
        if not isinstance(files, list) or not all(isinstance(file, str) and file for file in files):
            raise ConfigError(f"data.{name}", "must be a file or a list of files", value)
        setattr(config.data, name, files)


def check_config(config: Config) -> None:
    """Check what the types cannot: ranges, and what fields demand of each other. Raises ConfigError."""
    _check_ranges(config)
    arr, data, trainer = config.actor_rollout_ref, config.data, config.trainer
    if not data.train_files:
        raise ConfigError("data.train_files", "must name at least one file", data.train_files)
    if arr.actor.ppo_max_token_len_per_gpu < config.max_sequence_length and arr.actor.use_dynamic_bsz:
        raise ConfigError(
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
            "must be at least data.max_prompt_length + data.max_response_length "
            f"({data.max_prompt_length} + {data.max_response_length} = {config.max_sequence_length})",
            arr.actor.ppo_max_token_len_per_gpu,
        )
    if not arr.actor.use_dynamic_bsz and arr.actor.ppo_micro_batch_size_per_gpu is None:
        raise ConfigError(
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "must be given when use_dynamic_bsz is false", None
        )
    if config.mini_batch_size > data.train_batch_size:
        raise ConfigError(
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            f"must be at most data.train_batch_size ({data.train_batch_size})",
            arr.actor.ppo_mini_batch_size,
        )
    if arr.rollout.max_model_len is not None and arr.rollout.max_model_len < config.max_sequence_length:
        raise ConfigError(
            "actor_rollout_ref.rollout.max_model_len",
            f"must be at least data.max_prompt_length + data.max_response_length ({config.max_sequence_length})",
            arr.rollout.max_model_len,
        )
    _check_pools(config)
    fsdp_size = arr.actor.fsdp_config.fsdp_size
    if fsdp_size != -1 and (fsdp_size < 1 or config.world_size % fsdp_size):
        raise ConfigError(
            "actor_rollout_ref.actor.fsdp_config.fsdp_size",
            "must be -1 or divide the number of workers "
            f"(trainer.nnodes * trainer.n_gpus_per_node = {config.world_size})",
            fsdp_size,
        )
    if arr.rollout.name == "hf" and arr.rollout.tensor_model_parallel_size > 1:
        raise ConfigError(
            "actor_rollout_ref.rollout.tensor_model_parallel_size", "must be 1 with rollout.name=hf",
            arr.rollout.tensor_model_parallel_size,
        )
    if (trainer.resume_mode == "resume_path") != (trainer.resume_from_path is not None):
        raise ConfigError(
            "trainer.resume_from_path", "goes together with trainer.resume_mode=resume_path", trainer.resume_from_path
        )
    unknown = [n for n in trainer.logger if n not in ("console", "jsonl", "wandb") and not is_import_path(n)]
    if unknown:
        raise ConfigError("trainer.logger", "may hold console, jsonl and wandb", unknown[0])
    _check_importance(config)
    if config.distillation.enabled:
        _check_distillation(config)
    else:
        _check_ppo(config)


def _check_pools(config: Config) -> None:
    arr, own = config.actor_rollout_ref, config.rollout.n_gpus_per_node
    if arr.hybrid_engine and own is not None:
        raise ConfigError("rollout.n_gpus_per_node", "goes together with actor_rollout_ref.hybrid_engine=false", own)
    if not arr.hybrid_engine and own is None:
        raise ConfigError("rollout.n_gpus_per_node", "must be given with actor_rollout_ref.hybrid_engine=false", None)
    if config.rollout_world_size % arr.rollout.tensor_model_parallel_size:
        section = "trainer" if own is None else "rollout"
        raise ConfigError(
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
            "must divide the number of workers "
            f"({section}.nnodes * {section}.n_gpus_per_node = {config.rollout_world_size})",
            arr.rollout.tensor_model_parallel_size,
        )


def _check_importance(config: Config) -> None:
    threshold, rollout = config.algorithm.rollout_is_threshold, config.actor_rollout_ref.rollout
    if threshold is None:
        return
    key = "algorithm.rollout_is_threshold"
    if threshold < 1:
        raise ConfigError(key, "must be at least 1, the weight of a response that is not stale", threshold)
    if config.trainer.scheduler == "sync":
        raise ConfigError(key, "has no effect with trainer.scheduler=sync, where no response is stale", threshold)
    if rollout.top_p != 1 or rollout.top_k != -1:
        raise ConfigError(
            key, "needs responses of the student's own distribution: actor_rollout_ref.rollout.top_p=1 and top_k=-1",
            threshold,
        )


def _check_distillation(config: Config) -> None:
    teacher = config.actor_rollout_ref.teacher
    if teacher.server_ip is None and teacher.model.path is None:
        raise ConfigError(
            "actor_rollout_ref.teacher.model.path",
            "a teacher is needed: give a model to start one, or server_ip and server_port of a running one",
            None,
        )
    if teacher.server_ip is not None and teacher.server_port == 0:
        raise ConfigError("actor_rollout_ref.teacher.server_port", "must be given together with server_ip", 0)
    endpoints = teacher.endpoints
    if teacher.server_ip is not None and (
        len(set(endpoints)) < len(endpoints) or not all(
            re.fullmatch(r"[^\s:/]+:\d+", end) and 0 < int(end.rpartition(":")[2]) < 65536 for end in endpoints
        )
    ):
        raise ConfigError(
            "actor_rollout_ref.teacher.server_ip", "must be host, host:port, or several of them, all different, "
            "separated by commas", teacher.server_ip,
        )
    if teacher.server_ip is None and (teacher.max_model_len or math.inf) <= config.max_sequence_length:
        raise ConfigError(
            "actor_rollout_ref.teacher.max_model_len",
            "must be above data.max_prompt_length + data.max_response_length "
            f"({config.max_sequence_length}): vLLM scores a sequence by generating one token more",
            teacher.max_model_len,
        )
    if teacher.keys is not None and teacher.server_ip is None:
        raise ConfigError("actor_rollout_ref.teacher.keys", "is for a running service (server_ip)", teacher.keys)
    if config.trainer.scheduler != "sync" and not teacher.overlap_rollout:
        raise ConfigError(
            "actor_rollout_ref.teacher.overlap_rollout",
            f"must be true with trainer.scheduler={config.trainer.scheduler}, which is for a teacher that scores while "
            "the next batch is generated", False,
        )
    _check_loss(config)
    if config.distillation.use_task_rewards:
        _check_ppo(config)


def _check_loss(config: Config) -> None:
    """Combinations of losses that would teach nothing, or something else than they say."""
    loss = config.distillation
    weights = loss.mixed_weights
    if (loss.loss_mode == "mixed") != bool(weights):
        raise ConfigError("distillation.mixed_weights", "goes together with distillation.loss_mode=mixed", weights)
    for name, weight in weights.items():
        if name not in (*TOPK_MODES, *SAMPLED_TOKEN_MODES) or name == "k1" or not 0 < weight < math.inf:
            raise ConfigError(
                "distillation.mixed_weights",
                f"must give {', '.join(TOPK_MODES)}, k2 or k3 finite weights above 0", f"{name}: {weight}",
            )
    sampled = loss.loss_mode in SAMPLED_TOKEN_MODES
    if loss.loss_mode == "k1" and not loss.use_policy_gradient:
        raise ConfigError(
            "distillation.use_policy_gradient",
            "must be true with distillation.loss_mode=k1: as a loss, its expected gradient is 0", False,
        )
    if loss.use_policy_gradient and not sampled:
        raise ConfigError(
            "distillation.use_policy_gradient",
            "needs a value of the sampled token: distillation.loss_mode k1, k2 or k3, "
            f"not {loss.loss_mode}, whose exact gradient is known", True,
        )
    if sampled and loss.tail != "bucket":
        raise ConfigError(
            "distillation.tail", f"has no effect with distillation.loss_mode={loss.loss_mode}; leave it at bucket",
            loss.tail,
        )
    if loss.topk == 1 and loss.tail == "renormalise" and not set(weights) & set(SAMPLED_TOKEN_MODES):
        raise ConfigError(
            "distillation.topk",
            "must be at least 2 with distillation.tail=renormalise, which makes a single candidate certain for teacher "
            "and student alike", loss.topk,
        )
    sampling_temperature = config.actor_rollout_ref.rollout.temperature
    if (loss.use_policy_gradient or loss.use_task_rewards) and loss.temperature != sampling_temperature:
        raise ConfigError(
            "distillation.temperature",
            f"must be actor_rollout_ref.rollout.temperature ({sampling_temperature}) with a policy loss, which is "
            "about the policy that the responses were sampled from", loss.temperature,
        )


def _check_ppo(config: Config) -> None:
    if config.reward.answer_key is None:
        raise ConfigError("reward.answer_key", "task rewards need the column with the right answers", None)
    if config.actor_rollout_ref.rollout.n < 2:
        raise ConfigError(
            "actor_rollout_ref.rollout.n", "group-relative advantages need at least 2 responses per prompt",
            config.actor_rollout_ref.rollout.n,
        )


_POSITIVE = """
data.max_prompt_length data.max_response_length data.train_batch_size actor_rollout_ref.nccl_timeout
actor_rollout_ref.actor.ppo_mini_batch_size actor_rollout_ref.actor.ppo_max_token_len_per_gpu
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu actor_rollout_ref.actor.ppo_epochs
actor_rollout_ref.actor.grad_clip actor_rollout_ref.actor.clip_ratio actor_rollout_ref.actor.optim.lr
actor_rollout_ref.actor.optim.eps actor_rollout_ref.rollout.n
actor_rollout_ref.rollout.tensor_model_parallel_size actor_rollout_ref.rollout.max_num_batched_tokens
actor_rollout_ref.rollout.max_num_seqs actor_rollout_ref.rollout.temperature
actor_rollout_ref.rollout.update_weights_bucket_megabytes
actor_rollout_ref.teacher.n_server_workers actor_rollout_ref.teacher.num_microbatches
actor_rollout_ref.teacher.connect_timeout actor_rollout_ref.teacher.start_timeout
actor_rollout_ref.teacher.request_timeout actor_rollout_ref.teacher.tensor_model_parallel_size
actor_rollout_ref.teacher.max_model_len distillation.topk distillation.temperature
distillation.distillation_loss_coef distillation.loss_max_clamp trainer.total_epochs trainer.total_training_steps
trainer.nnodes trainer.n_gpus_per_node trainer.max_actor_ckpt_to_keep rollout.nnodes rollout.n_gpus_per_node
ray_init.num_cpus
""".split()
_NOT_NEGATIVE = """
actor_rollout_ref.actor.optim.weight_decay actor_rollout_ref.actor.optim.lr_warmup_steps
actor_rollout_ref.rollout.val_kwargs.temperature actor_rollout_ref.teacher.max_retries
actor_rollout_ref.rollout.seed data.seed trainer.seed trainer.log_val_generations
""".split()
_MAY_BE_INFINITE = "actor_rollout_ref.actor.grad_clip"
_SHARES = """
actor_rollout_ref.actor.optim.min_lr_ratio actor_rollout_ref.rollout.gpu_memory_utilization
actor_rollout_ref.teacher.gpu_memory_utilization distillation.beta
""".split()


def _check_finite(node: Any, prefix: str = "") -> None:
    for entry in dataclasses.fields(node):
        value, key = getattr(node, entry.name), f"{prefix}{entry.name}"
        if dataclasses.is_dataclass(value):
            _check_finite(value, f"{key}.")
        elif isinstance(value, float) and not math.isfinite(value) and key != _MAY_BE_INFINITE:
            raise ConfigError(key, "must be finite", value)


def _check_ranges(config: Config) -> None:
    _check_finite(config)

    def value_of(key: str) -> Any:
        node: Any = config
        for part in key.split("."):
            node = getattr(node, part)
        return node

    def require(keys: list[str], rule: str, holds: Any) -> None:
        for key in keys:
            value = value_of(key)
            if value is not None and not holds(value):
                raise ConfigError(key, rule, value)

    require(_POSITIVE, "must be above 0", lambda value: value > 0)
    require(_NOT_NEGATIVE, "must be at least 0", lambda value: value >= 0)
    require(_SHARES, "must be between 0 and 1", lambda value: 0 <= value <= 1)
    require(
        ["actor_rollout_ref.rollout.top_p", "actor_rollout_ref.rollout.val_kwargs.top_p"],
        "must be above 0 and at most 1", lambda value: 0 < value <= 1,
    )
    require(
        ["actor_rollout_ref.actor.optim.betas"], "must be at least 0 and below 1 each",
        lambda value: all(0 <= beta < 1 for beta in value),
    )
    seeds = ["actor_rollout_ref.rollout.seed", "data.seed", "trainer.seed"]
    require(seeds, "must be below 2**32", lambda value: value < 2**32)
    require(["trainer.save_freq", "trainer.test_freq"], "must be -1, 0 or more", lambda value: value >= -1)
    require(["actor_rollout_ref.teacher.server_port"], "must be a port, 0 to 65535", lambda value: 0 <= value < 65536)
    require(
        ["actor_rollout_ref.rollout.top_k", "actor_rollout_ref.rollout.val_kwargs.top_k"],
        "must be -1 or above 0", lambda value: value == -1 or value > 0,
    )
    require(
        ["trainer.project_name", "trainer.experiment_name"], "must be a plain folder name",
        lambda value: bool(value) and value not in (".", "..") and "/" not in value,
    )

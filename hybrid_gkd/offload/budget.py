"""The memory of each phase on a GPU, predicted from the residency table, the offload keys and the model specs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hybrid_gkd.compat.vllm.versions import vllm_available
from hybrid_gkd.config import ActorConfig, Config, CriticConfig, FSDPConfig
from hybrid_gkd.errors import ConfigError
from hybrid_gkd.models.spec import ModelSpec, critic_spec, model_spec, reward_model_spec
from hybrid_gkd.offload.residency import FROZEN, MODEL_OWNERS, RESIDENCY

GIB = 2**30
SLEEPING_ENGINE_BYTES = 2 * GIB
"""Of vLLM while it sleeps: CUDA context, graphs, NCCL buffers (measured: 0.8 to 1.6 GiB)."""
BESIDE_ENGINE_BYTES = 6 * GIB
"""Left free beside the rollout engine: CUDA context, NCCL buffers, kernels, buckets of weights on their way."""
ENGINE_WORKSPACE_BYTES = 8 * GIB
"""Of the rollout engine beside weights and KV cache: activations of its largest step, logits, CUDA graphs."""
KV_BLOCK_TOKENS = 128
"""At most; the KV cache of a sequence is a whole number of blocks."""
TEACHER_TOKENS = 32768
"""KV cache of a vLLM teacher that shares a GPU, at least: four engine steps, so that one is filled while another is
scored."""
HF_TEACHER_TOKENS, HF_TEACHER_LOGITS_TOKENS = 16384, 2048
"""Of one forward pass of a teacher with backend=hf, and of one that gives the logits of all rows at once; unless a
single sequence is longer."""
TEACHER_WORKSPACE_BYTES = 6 * GIB
"""Activations of one engine step, logits of 1024 positions and their top-k, CUDA context."""
LARGEST_SHARE = 0.92
"""vLLM's own default for a card of its own."""
ENGINE_OWNERS = ("engine_weights", "kv_cache")
UPDATES = {"actor": ("update", "optimizer_step"), "critic": ("critic_update", "critic_optimizer_step")}
"""Model -> its phases with gradients, the one with activations first."""


@dataclass(frozen=True)
class TrainedModel:
    """What a model that is trained holds on each device."""

    name: str
    """Of `MODEL_OWNERS`."""
    spec: ModelSpec
    section: ActorConfig | CriticConfig
    shard_size: int
    device: str

    @property
    def fsdp(self) -> FSDPConfig:
        return self.section.fsdp_config

    @property
    def itemsize(self) -> int:
        """Bytes of a master weight."""
        return {"fp32": 4, "bf16": 2}[self.fsdp.model_dtype]

    @property
    def master(self) -> float:
        """Bytes of the weights that are trained; gradients take as much, the optimizer state twice that."""
        return self.itemsize * self.spec.trained_parameters / self.shard_size

    @property
    def frozen(self) -> dict[str, float]:
        """Memory owner -> bytes of the weights below LoRA adapters, in the type of the computation."""
        itemsize = 2 if self.device == "cuda" else 4
        return {FROZEN: itemsize * self.spec.parameters / self.shard_size} if self.spec.adapter_parameters else {}

    @property
    def owners(self) -> dict[str, float]:
        """Memory owner -> bytes."""
        params, state = MODEL_OWNERS[self.name]
        return {params: self.master, state: 2 * self.master, **self.frozen}

    @property
    def moves(self) -> dict[str, bool]:
        """Memory owner -> whether it may leave a device that it shares."""
        params, state = MODEL_OWNERS[self.name]
        offload = self.fsdp.param_offload
        return {params: offload, state: self.fsdp.optimizer_offload, **dict.fromkeys(self.frozen, offload)}

    @property
    def staying(self) -> float:
        """Bytes of the owners that never leave."""
        return sum(size for name, size in self.owners.items() if not self.moves[name])

    @property
    def gathered(self) -> int:
        """Bytes of gathered parameters during the update, in bf16: FSDP2 makes a copy on a single GPU too.

        With `reshard_after_forward` that is the root group alone; a group of blocks or two is not counted.
        """
        reshards = self.fsdp.reshard_after_forward
        return 2 * (self.spec.embedding_parameters if reshards else self.spec.parameters)


def trained_models(config: Config, spec: ModelSpec, device: str = "cuda") -> list[TrainedModel]:
    """The student, whose spec is given, and the critic where there is one."""
    models = [TrainedModel("actor", spec, config.actor_rollout_ref.actor, config.shard_size, device)]
    if config.uses_critic:
        critic, section = critic_spec(config, spec), config.resolved_critic
        models.append(TrainedModel("critic", critic, section, config.critic_shard_size, device))
    return models


def never_trained_models(config: Config, spec: ModelSpec) -> dict[str, ModelSpec]:
    """Memory owner -> spec of the reference and the reward model, where the run has them. `spec` is the student's."""
    specs = {"reward_model_params": reward_model_spec(config)} if config.uses_reward_model else {}
    if config.has_reference_model:
        model, specs["ref_params"] = config.ref_model, spec
        if config.actor_rollout_ref.ref.model.path is not None:
            trust, override = model.trust_remote_code, model.override_config
            specs["ref_params"] = model_spec(model.path, trust_remote_code=trust, override_config=override)
    return specs


def never_trained_bytes(config: Config, models: Mapping[str, ModelSpec], device: str) -> dict[str, float]:
    """Memory owner -> bytes of such models on each device, in the type of the computation."""
    itemsize = 2 if device == "cuda" else 4
    return {owner: itemsize * each.parameters / config.shard_size for owner, each in models.items()}


def engine_dtype(config: Config, device: str) -> str:
    """Type of the rollout engine's weights and KV cache on "cuda" or "cpu"; left open, that of the actor's compute."""
    automatic, dtype = "bfloat16" if device == "cuda" else "float32", config.actor_rollout_ref.rollout.dtype
    return automatic if dtype == "auto" else dtype


def engine_bytes(config: Config, spec: ModelSpec, device: str) -> tuple[float, float]:
    """Of the rollout engine's weights, and of one token in its KV cache, on each device."""
    itemsize = 4 if engine_dtype(config, device) == "float32" else 2
    ranks = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    return itemsize * spec.parameters / ranks, itemsize / 2 * spec.kv_bytes_per_token / ranks


def _largest_micro_batch(config: Config, section: ActorConfig | CriticConfig, prompts: int | None = None) -> int:
    """Tokens of the largest micro-batch of so many prompts (None: a whole batch) that there can be on a GPU, if no
    sequence alone is larger."""
    longest, prompts = config.max_sequence_length, prompts or config.data.train_batch_size
    whole = longest * math.ceil(prompts * config.actor_rollout_ref.rollout.n / config.world_size)
    if section.use_dynamic_bsz:
        return min(whole, section.ppo_max_token_len_per_gpu or whole)
    return min(whole, longest * (section.ppo_micro_batch_size_per_gpu or 1))


def _activations(config: Config, model: TrainedModel) -> int:
    """Bytes of a model's largest micro-batch: all blocks' in an update, one block's in a forward pass."""
    kept = _largest_micro_batch(config, model.section, model.section.ppo_mini_batch_size)
    kept *= model.spec.activation_bytes_per_token
    loss, section = config.distillation, config.algorithm
    passes = config.has_advantages or config.uses_reference or section.compares_logprobs or loss.use_policy_gradient
    if not passes and not config.data.val_files:  # distilled, and no more: there are no log-probabilities to compute
        return kept
    return max(kept, _largest_micro_batch(config, model.section) * model.spec.forward_bytes_per_token)


def _largest_reward_batch(config: Config) -> int:
    """Tokens of the reward model's largest micro-batch, of texts as long as the student's."""
    section, actor = config.reward_model, config.actor_rollout_ref.actor
    texts = math.ceil(config.data.train_batch_size * config.actor_rollout_ref.rollout.n / config.world_size)
    whole = texts * min(config.max_sequence_length, section.max_length or config.max_sequence_length)
    return min(whole, section.forward_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu)


def _model_owners(
    config: Config, spec: ModelSpec, device: str, never_trained: Mapping[str, ModelSpec]
) -> tuple[dict[str, float], dict[str, bool]]:
    """Memory owner -> bytes of the models on each device, and whether it may leave a device that it shares."""
    owners, moves, models = dict[str, float](), dict[str, bool](), trained_models(config, spec, device)
    for model in models:
        owners |= model.owners
        moves |= model.moves
    others = never_trained_bytes(config, never_trained, device)
    owners, moves = owners | others, moves | dict.fromkeys(others, True)
    if not config.actor_rollout_ref.hybrid_engine and len(models) == 1 and not others:  # it makes room for nobody
        moves |= dict.fromkeys({"actor_params", FROZEN} & owners.keys(), False)
    return owners, moves


def phase_bytes(
    config: Config, spec: ModelSpec, *, device: str, total_bytes: int | None
) -> dict[str, dict[str, float]]:
    """Phase -> owner -> bytes on each device ("cuda", or "cpu", where nothing moves).

    Activations are those of the largest possible micro-batch, at least: a model may keep more. That is one of a
    mini-batch, or of a forward pass over the whole batch (values, log-probabilities, rewards). Without `total_bytes`,
    the memory of one GPU, the KV cache and the teacher, which are shares of it, are left out.
    """
    arr, models = config.actor_rollout_ref, trained_models(config, spec, device)
    hybrid, engine_weights = arr.hybrid_engine, engine_bytes(config, spec, device)[0]
    others = never_trained_models(config, spec)
    owners, moves = _model_owners(config, spec, device, others)
    owners = {"engine_weights": engine_weights, **owners}
    moves |= dict.fromkeys(ENGINE_OWNERS, arr.rollout.free_cache_engine)
    if total_bytes is not None:
        owners["kv_cache"] = max(0.0, engine_share(config, spec, total_bytes) * total_bytes - engine_weights)
    phases: dict[str, dict[str, float]] = {}
    for phase, wanted in RESIDENCY.items():
        if not owners.keys() >= wanted - {"kv_cache", FROZEN}:
            continue
        present = {t: b for t, b in owners.items() if t in wanted or device == "cpu" or not moves[t]}
        if not hybrid:  # each phase has its own GPUs
            present = {t: b for t, b in present.items() if (t in ENGINE_OWNERS) == (phase == "rollout")}
        for model in models:
            if phase in UPDATES[model.name]:
                present["gradients"] = model.master
            if phase == UPDATES[model.name][0] and device == "cuda":
                present |= {"gathered_params": model.gathered, "activations": _activations(config, model)}
        for owner, each in others.items():
            if wanted == {owner} and device == "cuda":
                of_reward = owner == "reward_model_params"
                tokens = _largest_reward_batch(config) if of_reward else _largest_micro_batch(config, arr.actor)
                present["gathered_params"] = 2 * each.embedding_parameters
                present["activations"] = tokens * each.forward_bytes_per_token
        if hybrid and device == "cuda" and "engine_weights" not in present:
            present["sleeping engine"] = SLEEPING_ENGINE_BYTES
        if total_bytes is not None and teacher_shares_gpu(config):
            present["teacher"] = teacher_share(config, total_bytes=total_bytes) * total_bytes
        phases[phase] = present
    return phases


def host_bytes(config: Config, spec: ModelSpec, *, device: str, steps: int | None = None) -> dict[str, float]:
    """Owner -> bytes on the host of each worker that trains: what may leave a GPU; on the CPU, its largest phase.

    And `checkpoint`: the copy of one that is written while training goes on, as large as the first worker's, unless a
    run of so many `steps` has none.
    """
    owners, moves = _model_owners(config, spec, device, never_trained_models(config, spec))
    found = {name: size for name, size in owners.items() if moves[name]}
    if device == "cpu":
        phases = phase_bytes(config, spec, device=device, total_bytes=None).values()
        found = {"largest phase": max(sum(phase.values()) for phase in phases)}
    if config.saves_while_training(steps):
        section = config.actor_rollout_ref.actor.checkpoint
        exported = section.save_merged or (section.save_hf_model and not spec.adapter_parameters)
        found["checkpoint"] = 3 * sum(model.master for model in trained_models(config, spec, device))
        found["checkpoint"] += exported * spec.stored_itemsize * spec.parameters
    return found


def rollout_share(config: Config, spec: ModelSpec, *, total_bytes: int, free_bytes: int) -> float:
    """`rollout.gpu_memory_utilization` where it is left open. Raises ConfigError if that is too little.

    The free memory of the card, less the models' in the rollout phase (0 in a pool of its own). An engine that never
    sleeps (`free_cache_engine=false`) takes half of what the update's tensors leave: the rest is for activations. No
    more than `max_num_seqs` full sequences can use: vLLM maps its KV cache anew in every step, 3 ms per GiB.
    """
    arr, models = config.actor_rollout_ref, trained_models(config, spec)
    staying = sum(model.staying for model in models)
    room: float = free_bytes - BESIDE_ENGINE_BYTES
    if arr.hybrid_engine and arr.rollout.free_cache_engine:
        room -= staying
    elif arr.hybrid_engine:
        # Of the model that is updated parameters, gradients, both moments, gathered copies; what stays of the others.
        parts = [4 * each.master + sum(each.frozen.values()) + each.gathered - each.staying for each in models]
        parts += never_trained_bytes(config, never_trained_models(config, spec), "cuda").values()
        room = (room - staying - max(parts)) / 2
    weights = engine_bytes(config, spec, "cuda")[0]
    useful = math.ceil(100 * (weights + _useful_cache(config, spec) + ENGINE_WORKSPACE_BYTES) / total_bytes) / 100
    share = min(LARGEST_SHARE, math.floor(100 * room / total_bytes) / 100, useful)
    _check_engine_fits(config, spec, share, total_bytes)
    return share


def _useful_cache(config: Config, spec: ModelSpec) -> float:
    """Bytes of KV cache on each device that `max_num_seqs` full sequences of the rollout engine use."""
    tokens = config.actor_rollout_ref.rollout.max_num_seqs * (engine_length(config) + KV_BLOCK_TOKENS)
    return tokens * engine_bytes(config, spec, "cuda")[1]


def engine_length(config: Config) -> int:
    """Tokens of the longest sequence that the rollout engine takes."""
    return config.actor_rollout_ref.rollout.max_model_len or config.max_sequence_length


def _check_engine_fits(config: Config, spec: ModelSpec, share: float, total_bytes: int) -> None:
    weights, token = engine_bytes(config, spec, "cuda")
    cache = token * engine_length(config)
    if share * total_bytes < weights + cache:
        raise ConfigError(
            "actor_rollout_ref.rollout.gpu_memory_utilization",
            f"{share:g} of a GPU of {total_bytes / GIB:.1f} GiB is {max(0.0, share) * total_bytes / GIB:.1f} GiB, but "
            f"the engine's weights take {weights / GIB:.1f} GiB and the KV cache of one sequence {cache / GIB:.2f} GiB",
            show_value=False,
        )


def teacher_share(config: Config, *, total_bytes: int) -> float:
    """`teacher.gpu_memory_utilization` of a local teacher, computed where the configuration leaves it open."""
    teacher = config.actor_rollout_ref.teacher
    if teacher.gpu_memory_utilization is not None:
        return teacher.gpu_memory_utilization
    if not teacher_shares_gpu(config):
        return 0.9
    return math.ceil(100 * (sum(_teacher_bytes(config)) + TEACHER_WORKSPACE_BYTES) / total_bytes) / 100


def _teacher_bytes(config: Config) -> tuple[float, float]:
    """Of the weights of a local teacher that shares a GPU, and of its KV cache or largest forward pass, on each GPU."""
    teacher = config.actor_rollout_ref.teacher
    assert teacher.model.path is not None
    spec = model_spec(
        teacher.model.path, trust_remote_code=config.actor_rollout_ref.model.trust_remote_code, override_config={}
    )
    plain = _teacher_is_plain(config)
    as_stored = plain and teacher.dtype == "auto"  # vLLM takes half precision for what is stored as float32
    itemsize = 4 if teacher.dtype == "float32" or (as_stored and spec.stored_itemsize > 2) else 2
    longest = _longest_scored(config)
    cache = max(TEACHER_TOKENS, longest) * spec.kv_bytes_per_token  # vLLM wants room for one
    beside_weights = _hf_forward_bytes(spec, longest) if plain else cache  # in 16 bits
    ranks = teacher.tensor_model_parallel_size
    return itemsize * spec.parameters / ranks, itemsize / 2 * beside_weights / ranks


def _teacher_is_plain(config: Config) -> bool:
    """Whether a local teacher is computed by transformers, not by vLLM."""
    backend = config.actor_rollout_ref.teacher.backend
    return backend == "hf" or (backend == "auto" and not vllm_available())


def _longest_scored(config: Config) -> int:
    """Tokens of the longest sequence that a local teacher takes."""
    return config.actor_rollout_ref.teacher.max_model_len or config.max_sequence_length + 1


def with_planned_caches(config: Config, spec: ModelSpec, *, total_bytes: int) -> Config | None:
    """The configuration with KV caches of given sizes, so that rollout engine and local teacher may load side by side.

    Otherwise vLLM sizes its cache by the free memory of the card, which must not change meanwhile. None where it has
    to: a share or a cache is given by the configuration, the card has less room than the engine can use, the teacher's
    sequences are long, or the engine never sleeps.
    """
    arr = config.actor_rollout_ref
    rollout, teacher, chosen = arr.rollout, arr.teacher, "kv_cache_memory_bytes"
    shares = (rollout.gpu_memory_utilization, teacher.gpu_memory_utilization)
    given = any(share is not None for share in shares)
    given = given or any(chosen in each.engine_kwargs.vllm for each in (rollout, teacher))
    if given or not (arr.hybrid_engine and rollout.free_cache_engine) or 2 * _longest_scored(config) > TEACHER_TOKENS:
        return None
    weights, cache = engine_bytes(config, spec, "cuda")[0], _useful_cache(config, spec)
    share = engine_share(config, spec, total_bytes)
    if share * total_bytes < weights + cache + ENGINE_WORKSPACE_BYTES:
        return None
    rollout = replace(
        rollout, gpu_memory_utilization=share,
        engine_kwargs=replace(rollout.engine_kwargs, vllm={**rollout.engine_kwargs.vllm, chosen: int(cache)}),
    )  # fmt: skip
    if not _teacher_is_plain(config):
        own = {**teacher.engine_kwargs.vllm, chosen: int(_teacher_bytes(config)[1])}
        teacher = replace(
            teacher, gpu_memory_utilization=teacher_share(config, total_bytes=total_bytes),
            engine_kwargs=replace(teacher.engine_kwargs, vllm=own),
        )  # fmt: skip
    return replace(config, actor_rollout_ref=replace(arr, rollout=rollout, teacher=teacher))


def _hf_forward_bytes(spec: ModelSpec, longest: int) -> int:
    """Of the largest forward pass of a teacher with backend=hf, in 16 bits, at least; it has no KV cache.

    `HFScoringEngine` takes T tokens at a time: up to its limit, or one sequence of `longest` tokens. It keeps nothing
    for a backward pass, so that only one block's activations exist: two arrays [T, D] and three [T, I], for the hidden
    size D and the intermediate size I. When they are gone, a model that changes its logits has two arrays [T, V]. In
    float32 the logits exist for 1024 rows at a time, which is part of the workspace. Not counted are the scores of an
    attention that cannot be packed, [B, H, L, L] for B sequences of L tokens and H heads.
    """
    limit = HF_TEACHER_LOGITS_TOKENS if spec.logits_bytes_per_token else HF_TEACHER_TOKENS
    return max(limit, longest) * max(spec.forward_bytes_per_token, spec.logits_bytes_per_token)


def engine_share(config: Config, spec: ModelSpec, total_bytes: int) -> float:
    """As configured, or as it will be computed on an empty card beside the teacher, if there is one on it."""
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    if share is not None:
        return share
    taken = teacher_share(config, total_bytes=total_bytes) if teacher_shares_gpu(config) else 0.0
    return rollout_share(config, spec, total_bytes=total_bytes, free_bytes=int((1 - taken) * total_bytes))


def check_memory(config: Config, spec: ModelSpec, *, total_bytes: int, role: str = "worker") -> None:
    """Refuse phases that cannot fit into a GPU with a worker of this role. Raises ConfigError with owners and sizes."""
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    if share is not None and has_phase(role, "rollout"):
        _check_engine_fits(config, spec, share, total_bytes)
    for phase, owners in phase_bytes(config, spec, device="cuda", total_bytes=total_bytes).items():
        needed = sum(owners.values())
        if needed > total_bytes and has_phase(role, phase):
            parts = ", ".join(f"{name} {value / GIB:.1f}" for name, value in owners.items())
            raise ConfigError(
                "actor_rollout_ref.actor.fsdp_config.param_offload, .optimizer_offload, .reshard_after_forward, "
                "actor_rollout_ref.rollout.free_cache_engine, .gpu_memory_utilization",
                f"in the phase {phase} a GPU would have to hold {needed / GIB:.1f} GiB ({parts}), "
                f"and it has {total_bytes / GIB:.1f}; switch on an offload or reshard_after_forward (of a critic in "
                "critic.fsdp_config), lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu, checkpoint activations "
                "or take more GPUs",
                show_value=False,
            )


def has_phase(role: str, phase: str) -> bool:
    return role == "worker" or (role == "rollout worker") == (phase == "rollout")


def teacher_shares_gpu(config: Config) -> bool:
    """Whether a local teacher computes on a GPU that a worker uses too."""
    import torch

    teacher = config.actor_rollout_ref.teacher
    local = config.distillation.enabled and teacher.server_ip is None
    local = local and "cpu" not in (teacher.device, config.trainer.device)
    wanted = teacher.tensor_model_parallel_size * (teacher.num_replicas or 1)
    return local and torch.cuda.device_count() < config.workers_per_node + wanted


def teacher_replicas(config: Config) -> int:
    """Copies of a local teacher's model: as configured, or as `TeacherConfig.num_replicas` says."""
    import torch

    teacher = config.actor_rollout_ref.teacher
    if teacher.num_replicas is not None:
        return teacher.num_replicas
    shared = min(config.workers_per_node, torch.cuda.device_count()) if teacher_shares_gpu(config) else 0
    return max(1, shared // teacher.tensor_model_parallel_size)

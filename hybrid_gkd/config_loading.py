"""From YAML files and `dotted.key=value` overrides to a checked configuration.

`load_config` merges the dataclass defaults with YAML and overrides (OmegaConf structured configs, so unknown keys and
wrong types are errors), checks every field's rule and the rules between fields, and returns plain dataclasses.
 Every problem is a ConfigError of the form ``<dotted.key>: <rule>; got <value>``. Needs no torch.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import os
import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from hybrid_gkd.config import Config
from hybrid_gkd.errors import ConfigError
from hybrid_gkd.losses.table import DIVERGENCES

CONFIG_DIR = Path(__file__).resolve().parent.parent / "config"


def load_config(
    overrides: list[str] | None = None, *, config_name: str | None = None, config_path: str | Path = CONFIG_DIR
) -> Config:
    """Merge defaults, `<config_path>/<config_name>.yaml` (if a name is given) and dotted overrides; check.

    A file may begin with `defaults: [other]`: the files that it builds on, in its folder.

    Raises:
        ConfigError: unknown key, wrong type, missing file, or a rule between fields is broken.
    """
    merged = copy.deepcopy(_defaults())
    if config_name is not None:
        for recipe in _read_recipe(Path(config_path), config_name):
            merged = _merge(merged, recipe)
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


@functools.cache
def _defaults() -> Any:
    return OmegaConf.structured(Config)


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML; `load_config` reads it back to the same values."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def to_dict(config: Config) -> dict[str, Any]:
    """The resolved configuration as nested dictionaries of plain values."""
    return dataclasses.asdict(config)


def _read_recipe(folder: Path, name: str, above: tuple[str, ...] = ()) -> list[DictConfig]:
    """A YAML file behind those of its `defaults` list."""
    file = folder / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    if not file.is_file():
        there = ", ".join(sorted(p.stem for p in folder.glob("*.yaml"))) or "none"
        raise ConfigError("--config-name", f"must name a YAML file in {folder} (there: {there})", name)
    if name in above:
        raise ConfigError("--config-name", f"the defaults lists go in a circle: {' -> '.join([*above, name])}", name)
    try:
        loaded = OmegaConf.load(file)
    except Exception as error:  # yaml's own error types are not part of OmegaConf's interface
        raise ConfigError("--config-name", f"{file} is not valid YAML: {error}", show_value=False) from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError("--config-name", f"{file} must hold a mapping of sections", show_value=False)
    defaults = loaded.pop("defaults", [])
    return [*(part for base in defaults for part in _read_recipe(folder, base, (*above, name))), loaded]


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
        return OmegaConf.unsafe_merge(base, extra)  # changes `base`, which merge would copy each time
    except ConfigKeyError as error:
        unknown = _full_key(error)
        close = re.search(r"Did you mean: '(\w+)'", str(error))
        hint = f" (did you mean {'.'.join([*unknown.split('.')[:-1], close[1]])}?)" if close else ""
        raise ConfigError(unknown, f"there is no such key{hint}", show_value=False) from None
    except OmegaConfBaseException as error:
        raise ConfigError(str(error.full_key or key or "config"), _reason(error), show_value=False) from None
    except TypeError as error:  # a part of a list, for example
        raise ConfigError(key or "config", str(error), show_value=False) from None


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


def _check_fields(section: Any, prefix: str = "") -> None:
    for entry in dataclasses.fields(section):
        value, key = getattr(section, entry.name), f"{prefix}{entry.name}"
        if dataclasses.is_dataclass(value):
            _check_fields(value, f"{key}.")
            continue
        if isinstance(value, float) and not math.isfinite(value) and not entry.metadata.get("may_be_infinite"):
            raise ConfigError(key, "must be finite", value)
        if value is not None and "rule" in entry.metadata and not entry.metadata["holds"](value):
            raise ConfigError(key, entry.metadata["rule"], value)


def check_config(config: Config) -> None:
    """Check each field's rule, and the rules between fields. Raises ConfigError."""
    _check_fields(config)
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
    if loss.loss_fn is not None and (loss.loss_mode != "forward_kl" or loss.use_policy_gradient):
        other = "use_policy_gradient" if loss.use_policy_gradient else "loss_mode"
        raise ConfigError(f"distillation.{other}", "must be left out with distillation.loss_fn", getattr(loss, other))
    if (loss.loss_mode == "mixed") != bool(weights):
        raise ConfigError("distillation.mixed_weights", "goes together with distillation.loss_mode=mixed", weights)
    mixable = [name for name, row in DIVERGENCES.items() if row.is_loss]
    for name, weight in weights.items():
        if name not in mixable or not 0 < weight < math.inf:
            rule = f"must give {', '.join(mixable[:-1])} or {mixable[-1]} finite weights above 0"
            raise ConfigError("distillation.mixed_weights", rule, f"{name}: {weight}")
    names = set(weights) or {loss.loss_mode}
    takes_samples = {name for name in names if DIVERGENCES[name].signal == "sampled"}
    sampled = loss.loss_mode in takes_samples
    if sampled and not DIVERGENCES[loss.loss_mode].is_loss and not loss.use_policy_gradient:
        raise ConfigError(
            "distillation.use_policy_gradient",
            f"must be true with distillation.loss_mode={loss.loss_mode}: as a loss, its expected gradient is 0", False,
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
    if loss.topk == 1 and loss.tail == "renormalise" and not takes_samples:
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

"""Conversions of verl's values, for the tables of key_tables.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ARR = "actor_rollout_ref"
CORRECTION = "algorithm.rollout_correction"
Look = Callable[[str], Any]
"""Function of a key of `Config`, which returns its value so far, or of verl, which returns the given value or None."""
OF_VERL = "verl"
"""Pseudo key: True for a command of verl, identified by its recipe."""
Reading = Callable[[Any, Look], dict[str, Any]]
"""Function of a given value that returns keys of `Config` with values; empty for defaults.

Raises ValueError with the rule.
"""


@dataclass(frozen=True)
class Read:
    """A key, or some of its values, that `Config` spells differently."""

    keys: tuple[str, ...]
    """Keys of `Config` that it sets."""
    reading: Reading
    how: str = ""
    """Description of the conversion; a sentence without full stop."""
    why: str = ""
    """Explanation for the log line about the conversion, if needed."""


DEFAULT = "the default"


def spelled(key: str, values: Mapping[Any, Any] | None = None) -> Read:
    """Return the conversion to the key `key`. `values`: values that are spelled differently here, or are DEFAULT."""
    values = values or {}

    def reading(value: Any, _: Look) -> dict[str, Any]:
        new = next((new for old, new in values.items() if old == value and type(old) is type(value)), value)
        return {} if new is DEFAULT else {key: new}

    how = ", ".join(f"{old} is {new}" for old, new in values.items()).replace("None", "null")
    return Read((key,), reading, how)


def _number(look: Look, key: str) -> int:
    """Return the value of another key. Raises ValueError, which names it."""
    value = look(key)
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ValueError(f"is computed with {key}, which must be a number and is {value}") from None


def micro_batch(key: str) -> Read:
    def reading(value: Any, look: Look) -> dict[str, Any]:
        if value is None:
            return {}
        workers = _number(look, "trainer.nnodes") * _number(look, "trainer.n_gpus_per_node")
        return {key: max(1, int(value) // workers)}

    return Read((key,), reading, "Divided by the number of workers (trainer.nnodes * trainer.n_gpus_per_node)")


def warmup(section: str) -> Read:
    key = f"{section}.optim.lr_warmup_steps"

    def reading(value: Any, look: Look) -> dict[str, Any]:
        if value is None or value == -1:
            return {}
        if type(value) is not int or not look(OF_VERL):
            return {key: value}
        prompts = _number(look, "data.train_batch_size")
        size, epochs = (
            int(look(f"{section}.{name}") or look(f"{ARR}.actor.{name}") or other)
            for name, other in (("ppo_mini_batch_size", -(-prompts // 4)), ("ppo_epochs", 1))
        )
        return {key: value * -(-prompts // size) * epochs}

    how = (
        "-1 is the default, null is the default; in a command that starts from the recipe ppo_trainer training steps, "
        "which become optimizer steps: times the mini-batches of a step and ppo_epochs"
    )
    return Read((key,), reading, how, "training steps in verl, optimizer steps here")


def loss_mode(value: Any, _: Look) -> dict[str, Any]:
    if value == "forward_kl_topk":
        return {"distillation.loss_mode": "forward_kl", "distillation.tail": "none"}
    return {"distillation.loss_mode": {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(value, value)}


def do_sample(value: Any, _: Look) -> dict[str, Any]:
    return {} if value else {f"{ARR}.rollout.val_kwargs.temperature": 0.0}


def loggers(value: Any, _: Look) -> dict[str, Any]:
    names = [value] if isinstance(value, str) else value
    if isinstance(names, list):
        names = ["jsonl" if name == "file" else name for name in names]
        names = [name for name in names if name not in OTHER_TRACKERS] or names
    return {"trainer.logger": names}


OTHER_TRACKERS = ("clearml", "mlflow", "swanlab", "vemlp_wandb")


def run_name(value: Any, _: Look) -> dict[str, Any]:
    return {"trainer.experiment_name": value.replace("/", "_") if isinstance(value, str) else value}


def saved(value: Any, _: Look) -> dict[str, Any]:
    return {f"{ARR}.actor.checkpoint.save_hf_model": "hf_model" in (value or [])}


def one_checkpoint(value: Any, _: Look) -> dict[str, Any]:
    return {"trainer.max_actor_ckpt_to_keep": 1} if value else {}


def min_clamp(value: Any, look: Look) -> dict[str, Any]:
    if value is not None and look("distillation.loss_mode") not in ("k1", "k2", "k3"):
        raise ValueError("is for an unsupported divergence; distillation.loss_max_clamp limits a token's divergence")
    return {}


def rollout_is(value: Any, look: Look) -> dict[str, Any]:
    limits = look(f"{CORRECTION}.rollout_is_threshold"), look("algorithm.rollout_is_threshold"), 2.0
    limit = None if value is None else next(each for each in limits if each is not None)
    level = "prefix" if value is None else value
    return {"algorithm.rollout_is": level, "algorithm.rollout_is_threshold": limit}


def rollout_threshold(value: Any, look: Look) -> dict[str, Any]:
    return {} if look("algorithm.rollout_is") == "prefix" else {"algorithm.rollout_is_threshold": value}


def filter_metric(value: Any, look: Look) -> dict[str, Any]:
    if value == "seq_final_reward" and look("algorithm.use_kl_in_reward"):
        raise ValueError("must be acc, score or seq_reward: groups are chosen before the KL is known")
    value = {"seq_final_reward": "seq_reward"}.get(value, value)
    return {} if value is None else {"algorithm.filter_groups.metric": value}


def ratio_cap(value: Any, _: Look) -> dict[str, Any]:
    weighs = value is not None and value > 0
    return {"algorithm.rollout_is": "token", "algorithm.rollout_is_threshold": value} if weighs else {}

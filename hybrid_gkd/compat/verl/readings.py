"""How values as verl's commands spell them are read, for the tables of keys.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ARR = "actor_rollout_ref"
CORRECTION = "algorithm.rollout_correction"
Look = Callable[[str], Any]
"""Key of `Config` -> the value that it has so far; key of verl -> the value that is given, else None."""
OF_VERL = "verl"
"""Stands for a key: whether what is read is a command of verl, by the recipe that it starts from."""
Reading = Callable[[Any, Look], dict[str, Any]]
"""A given value -> keys of `Config` with their values; none where the default stays. Raises ValueError: the rule."""


@dataclass(frozen=True)
class Read:
    """A key, or some of its values, that `Config` spells otherwise."""

    keys: tuple[str, ...]
    """The keys of `Config` that it sets."""
    reading: Reading
    how: str = ""
    """How the value changes, where it does; a sentence without its full stop."""
    why: str = ""
    """For the line that says what a value is read as, where that is not plain."""


DEFAULT = "the default"


def spelled(key: str, values: Mapping[Any, Any] | None = None) -> Read:
    """The same under the name `key`. `values`: those that are spelled otherwise here, or are DEFAULT."""
    values = values or {}

    def reading(value: Any, _: Look) -> dict[str, Any]:
        new = next((new for old, new in values.items() if old == value and type(old) is type(value)), value)
        return {} if new is DEFAULT else {key: new}

    how = ", ".join(f"{'null' if old is None else old} is {new}" for old, new in values.items())
    return Read((key,), reading, how)


def micro_batch(key: str) -> Read:
    def reading(value: Any, look: Look) -> dict[str, Any]:
        if value is None:
            return {}
        workers = int(look("trainer.nnodes")) * int(look("trainer.n_gpus_per_node"))
        return {key: max(1, int(value) // workers)}

    return Read((key,), reading, "Divided by the number of workers (trainer.nnodes * trainer.n_gpus_per_node)")


def warmup(section: str) -> Read:
    key = f"{section}.optim.lr_warmup_steps"

    def reading(value: Any, look: Look) -> dict[str, Any]:
        if value is None or value == -1:
            return {}
        if type(value) is not int or not look(OF_VERL):
            return {key: value}
        prompts = int(look("data.train_batch_size"))
        size, epochs = (
            int(look(f"{section}.{name}") or look(f"{ARR}.actor.{name}") or other)
            for name, other in (("ppo_mini_batch_size", prompts), ("ppo_epochs", 1))
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


def resume_from(value: Any, look: Look) -> dict[str, Any]:
    return {"trainer.resume_from_path": value if look("trainer.resume_mode") == "resume_path" else None}


def saved(value: Any, _: Look) -> dict[str, Any]:
    return {f"{ARR}.actor.checkpoint.save_hf_model": "hf_model" in (value or [])}


def one_checkpoint(value: Any, _: Look) -> dict[str, Any]:
    return {"trainer.max_actor_ckpt_to_keep": 1} if value else {}


def min_clamp(value: Any, look: Look) -> dict[str, Any]:
    if value is not None and look("distillation.loss_mode") not in ("k1", "k2", "k3"):
        raise ValueError("is for a divergence that is not here; distillation.loss_max_clamp limits a token's")
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

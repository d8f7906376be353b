"""Metrics of a training step computed from its rollout and its timings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from hybrid_gkd.config import Config
from hybrid_gkd.models.spec import ModelSpec, training_flops
from hybrid_gkd.ppo.guards import repeated_fraction
from hybrid_gkd.ppo.token_weighting import Weighting
from hybrid_gkd.types import Rollout, without_given

PEAK_FLOPS: dict[str, float] = {
    "NVIDIA A10": 125e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
}
"""Dense bf16 FLOP/s from the vendor's data sheets, by full device name: MIG slices and variants must not match."""


def step_metrics(
    config: Config, rollout: Rollout, measured: Mapping[str, float], *, devices: Iterable[str],
    spec: Callable[[], ModelSpec],
) -> dict[str, float]:
    """Return timings, throughput, lengths and MFU of a step, including the `measured` `timing/*` and memory metrics.

    `devices`: names of the training devices. `spec`: returns the student's; called only for MFU.
    """
    gen = "gen" if config.actor_rollout_ref.hybrid_engine else "wait_prev_gen"
    models = ("reward", "reward_model", "values", "update_critic", "ref", "update_actor")
    parts = (gen, "wait_prev_teacher", *models, "sync_rollout_weights")
    seconds = sum(measured.get(f"timing/{part}", 0.0) for part in parts)
    lengths = np.array([s.num_trained for s in rollout.samples])
    prompts = np.array([len(task.token_ids) for task in rollout.tasks])
    own = without_given(rollout.samples)
    metrics = {
        **measured,
        **rollout.metrics,
        "timing/step": seconds,
        "perf/tokens_per_second": sum(s.num_tokens for s in rollout.samples) / seconds,
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "prompt_length/mean": float(prompts.mean()),
        "prompt_length/max": float(prompts.max()),
        "training/epoch": float(rollout.epoch),
    }
    if own:
        metrics["response/repeated_fraction"] = repeated_fraction(own)
        metrics["response_length/clip_ratio"] = float(np.mean([s.status == "length" for s in own]))
        metrics["training/staleness"] = float(rollout.step - 1 - min(s.versions.min() for s in own))
        if config.actor_rollout_ref.rollout.end_repetitions is not None:
            metrics["response/ended_fraction"] = float(np.mean([s.status == "repetition" for s in own]))
    if config.data.response_key is not None:
        metrics["training/given_fraction"] = 1 - len({sample.id.group for sample in own}) / len(rollout.tasks)
    for update in ("timing/update_actor", "timing/update_critic"):
        if f"{update}/compute" in measured:
            known = sum(measured[f"{update}/{part}"] for part in ("compute", "optimizer_step", "copies"))
            metrics[f"{update}/other"] = max(0.0, measured[update] - known)
    compute, peak = measured.get("timing/update_actor/compute", 0.0), peak_flops(devices)
    if compute and peak and not spec().has_experts:
        trained = [*map(Weighting(config).before_scoring, rollout.samples)]
        flops = training_flops(spec(), [s.num_tokens for s in trained], sum(s.num_trained for s in trained))
        metrics["perf/mfu"] = config.actor_rollout_ref.actor.ppo_epochs * flops / compute / peak
    return metrics


def peak_flops(devices: Iterable[str]) -> float:
    """Return the total dense bf16 FLOP/s of the GPUs; 0 if one of them is unknown."""
    peaks = [PEAK_FLOPS.get(device, 0.0) for device in devices]
    return sum(peaks) if all(peaks) else 0.0

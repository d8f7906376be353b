"""Metrics of a training step that follow from its rollout and its times."""

from __future__ import annotations

from collections.abc import Iterable

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
"""Whole device name, so that neither a part of a GPU (MIG) nor a variant is taken for it -> dense bf16 operations per
second according to the vendor's data sheets."""


def peak_flops(devices: Iterable[str]) -> float:
    """Dense bf16 operations per second of GPUs together; 0 if one of them is not known."""
    peaks = [PEAK_FLOPS.get(device, 0.0) for device in devices]
    return sum(peaks) if all(peaks) else 0.0

"""How much of a GPU is in use: by tensors, by torch's allocator, by all processes together."""

from __future__ import annotations

import torch


class DeviceMemory:
    """Measures one device; all zeros on the CPU.

    A peak belongs to whoever asked last: `start` and `take_peak` share torch's counter and keep each other's peaks.
    """

    def __init__(self, device_type: str):
        self._on_gpu = device_type == "cuda"
        self._peak = 0
        self._started_with = 0

    def used(self) -> int:
        """Bytes in use on the device, by anybody."""
        if not self._on_gpu:
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free

    def start(self) -> None:
        """`taken` counts from here on."""
        if self._on_gpu:
            self._keep_peak()
            self._started_with = torch.cuda.memory_allocated()

    def taken(self) -> int:
        """Most bytes of tensors since `start` beyond those of that moment."""
        return torch.cuda.max_memory_allocated() - self._started_with if self._on_gpu else 0

    def take_peak(self) -> int:
        """Most bytes of tensors since the last call."""
        if self._on_gpu:
            self._keep_peak()
        peak, self._peak = self._peak, 0
        return peak

    def trim(self) -> None:
        """Give memory that torch keeps for later back to the device."""
        if self._on_gpu:
            torch.cuda.empty_cache()

    def _keep_peak(self) -> None:
        self._peak = max(self._peak, torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()


def free_device_bytes() -> int:
    """Bytes that torch or vLLM can still allocate: free on the device, or cached by torch's allocator."""
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return torch.cuda.mem_get_info()[0] + cached

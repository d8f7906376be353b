"""When the optimizer state comes back to a device that is shared, on stand-ins for the device and the model."""

from types import SimpleNamespace

import pytest
import torch

from hybrid_gkd.errors import DeviceMemoryError, WorkerError
from hybrid_gkd.offload.residency import Residency
from hybrid_gkd.types import MiniBatch
from hybrid_gkd.workers.updater import Updater

GIB = 2**30
PARAMS, STATE, GRADIENTS, PER_TOKEN = 14 * GIB, 28 * GIB, 14 * GIB, GIB // 256


class Device:
    """Runs out of memory, and counts as `MemoryMeter` does."""

    def __init__(self, total):
        self.total, self.used, self.peak, self.base = total, 0, 0, 0

    def take(self, num_bytes):
        if self.used + num_bytes > self.total:
            raise torch.OutOfMemoryError("CUDA out of memory, stand-in")
        self.used += num_bytes
        self.peak = max(self.peak, self.used)

    def start(self):
        self.base = self.peak = self.used

    def taken(self):
        return self.peak - self.base

    def trim(self):
        pass


class MemoryOwner:
    def __init__(self, device, size, there):
        self.device, self.size, self.there, self.came_early = device, size, False, 0
        if there:
            self.acquire()

    def num_bytes(self):
        return self.size

    def start_acquire(self):
        self.came_early += 1
        self.acquire()
        return True

    def acquire(self):
        if not self.there:
            self.device.take(self.size)
        self.there = True

    def start_release(self):
        pass

    def release(self):
        self.device.used -= self.size
        self.there = False

    def changed(self):
        pass


def make_updater(total):
    """Of one of two workers of a 7B student, with both offloads; its model is a stand-in that takes memory."""
    device = Device(total)
    owners = {"actor_params": MemoryOwner(device, PARAMS, True), "optimizer_state": MemoryOwner(device, STATE, False)}
    residency = Residency(
        owners, movable=set(owners), resident={"actor_params"}, free_bytes=lambda: device.total - device.used
    )

    def update(batch, *, before_last, before_step):
        for number, micro_batch in enumerate(batch.micro_batches):
            if number == len(batch.micro_batches) - 1:
                before_last()
            activations = PER_TOKEN * sum(item.sequence.num_tokens for item in micro_batch)
            device.take(activations)
            device.take(0 if number else GRADIENTS)
            device.used -= activations
        before_step()
        device.used -= GRADIENTS
        return {}

    updater = Updater(SimpleNamespace(update=update), residency, device, worker="worker 0", alone=False)
    return updater, owners["optimizer_state"]


def train(updater, *micro_batches):
    """One update; then what leaves for the rollout has left."""
    items = tuple((SimpleNamespace(sequence=SimpleNamespace(num_tokens=tokens)),) for tokens in micro_batches)
    updater.update([MiniBatch(micro_batches=items, num_tokens=sum(micro_batches))])
    updater.residency.enter("publish")


def test_the_optimizer_state_comes_early_only_where_the_micro_batch_leaves_room_for_it():
    """Responses grow by and by, one micro-batch an update, until both together would not fit."""
    updater, state = make_updater(80 * GIB)
    for tokens, early in ((2000, 0), (2100, 1), (4000, 1), (6000, 1), (8000, 1)):
        train(updater, tokens)
        assert state.came_early == early, tokens
    train(updater, 2000, 6000)


def test_what_follows_a_part_that_has_failed_is_no_step():
    """It was on its way when the part failed."""
    updater, _ = make_updater(80 * GIB)
    sizes = {"section": "actor_rollout_ref.actor", "token_limit": "ppo_max_token_len_per_gpu"}
    steps = []

    def fail(batch):
        raise torch.OutOfMemoryError("CUDA out of memory, stand-in")

    updater.model = SimpleNamespace(accumulate=fail, update=lambda *args, **kwargs: steps.append(args), **sizes)
    part = MiniBatch(micro_batches=(), num_tokens=1)
    with pytest.raises(DeviceMemoryError, match="ppo_max_token_len_per_gpu"):
        updater.accumulate(part)
    with pytest.raises(WorkerError, match="worker 0: a part of the update before this one has failed"):
        updater.update([part])
    assert not steps

"""When the optimizer state comes back to a device that is shared, on stand-ins for the device and the model."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from hybrid_gkd.errors import DeviceMemoryError, WorkerError
from hybrid_gkd.offload.residency import Residency
from hybrid_gkd.types import MiniBatch
from hybrid_gkd.workers.updater import Updater

GIB = 2**30
PARAMS, STATE, GRADIENTS, PER_TOKEN, BLOCKS = 14 * GIB, 28 * GIB, 14 * GIB, GIB // 256, 4


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

    def present(self):
        return self.used - self.base

    def trim(self):
        pass


class MemoryOwner:
    """Comes in any pieces; `early` are those, in GiB, that came before it was asked for as a whole."""

    def __init__(self, device, size, there):
        self.device, self.size, self.there, self.early = device, size, 0, []
        if there:
            self.acquire()

    def num_bytes(self):
        return self.size

    def start_acquire(self, room, most):
        coming = min(self.size - self.there, room, most)
        self.device.take(coming)
        self.there += coming
        self.early.append(coming / GIB)
        return self.size - self.there

    def acquire(self):
        self.device.take(self.size - self.there)
        self.there = self.size

    def start_release(self):
        pass

    def release(self):
        self.device.used -= self.there
        self.there = 0

    def changed(self):
        pass


def make_updater(total):
    """Return the updater of one of two workers of a 7B student, with both offloads; its model only allocates memory."""
    device = Device(total)
    owners = {"actor_params": MemoryOwner(device, PARAMS, True), "optimizer_state": MemoryOwner(device, STATE, False)}
    residency = Residency(
        owners, movable=set(owners), resident={"actor_params"}, free_bytes=lambda: device.total - device.used
    )

    calls = []

    @contextmanager
    def before_each_backward(call):
        calls.append(call)
        yield
        calls.clear()

    def update(batch, *, around_last, before_step):
        for number, micro_batch in enumerate(batch.micro_batches):
            with around_last if number == len(batch.micro_batches) - 1 else nullcontext():
                passes(micro_batch, first=number == 0)
        before_step()
        device.used -= GRADIENTS
        return {}

    def passes(micro_batch, first):
        activations = PER_TOKEN * sum(sample.num_tokens for sample in micro_batch)
        device.take(activations)
        for left in range(BLOCKS, 0, -1):
            for call in calls:
                call(left)
            device.take(activations // BLOCKS)  # for as long as it takes
            device.used -= activations // BLOCKS
            device.take(GRADIENTS // BLOCKS if first else 0)
            device.used -= activations // BLOCKS

    model = SimpleNamespace(update=update, before_each_backward=before_each_backward)
    updater = Updater(model, residency, device, worker="worker 0", alone=False)
    return updater, owners["optimizer_state"]


def train(updater, *micro_batches):
    """One update; then what leaves for the rollout has left."""
    items = tuple((SimpleNamespace(num_tokens=tokens),) for tokens in micro_batches)
    updater.update([MiniBatch(micro_batches=items, num_tokens=sum(micro_batches))])
    updater.residency.enter("publish")


def test_the_optimizer_state_comes_in_pieces_before_the_backward_passes_of_the_last_micro_batch():
    updater, state = make_updater(80 * GIB)
    train(updater, 2000)
    assert state.early == []  # how much the passes need is not known yet
    train(updater, 2000, 2100)
    assert state.early == [7, 7, 7, 7]


@pytest.mark.parametrize("total", [58, 64])
def test_no_more_of_it_comes_early_than_the_micro_batch_leaves_room_for(total):
    """Responses grow by and by; what would not fit beside the passes comes at the step."""
    updater, state = make_updater(total * GIB)
    early = []
    for lengths in ((2000,), (2100,), (2100,), (4000,), (6000,), (8000,), (2000, 6000), (8000, 6000)):
        state.early = []
        train(updater, *lengths)
        early.append(sum(state.early))
    assert early[1] <= early[2]  # what came early is not taken for something that the passes need
    assert 0 < early[-1] < early[1] < STATE / GIB


@pytest.mark.parametrize(("total", "moves"), [(80, 1), (60, 3)])
def test_between_the_steps_of_a_rollout_the_optimizer_state_stays_if_there_is_room(total, moves):
    """Parameters take 14 GiB, the state 28, gradients 14, the margin 4; activations a little more."""
    updater, state = make_updater(total * GIB)
    train(updater, 512)
    released, release = [], state.release
    state.release = lambda: (released.append(None), release())
    batch = MiniBatch(micro_batches=((SimpleNamespace(num_tokens=512),),), num_tokens=512)
    for number in range(3):
        updater.update([batch], last=number == 2)
    updater.residency.enter("publish")
    assert len(released) == moves
    assert state.there == 0


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
    with pytest.raises(WorkerError, match="worker 0: an earlier part of the update has failed"):
        updater.update([part])
    assert not steps

"""Page-locked memory is unlocked with the last tensor on it. CUDA is a stand-in here; tests/gpu has the real one."""

import weakref
from unittest import mock

import numpy as np
import pytest
import torch

from hybrid_gkd.offload.pinned import ALIGNMENT, HostCopies, page_locked


class Runtime:
    """Locks nothing, and like CUDA's refuses what is locked already."""

    def __init__(self):
        self.locked = {}

    def cudaHostRegister(self, address, length, flags):
        if address in self.locked:
            return 712
        self.locked[address] = length
        return 0

    def cudaHostUnregister(self, address):
        del self.locked[address]
        return 0


@pytest.fixture
def runtime():
    with mock.patch("torch.cuda.cudart", return_value=(runtime := Runtime())):
        yield runtime


def test_memory_is_unlocked_with_the_last_tensor_on_it(runtime):
    memory = page_locked(4096)
    assert runtime.locked == {memory.data_ptr(): 4096}
    assert memory.data_ptr() % ALIGNMENT == 0
    assert not memory.any()
    view = memory[1024:].view(torch.float32)
    del memory
    assert runtime.locked
    del view
    assert not runtime.locked


def test_copies_keep_their_memory_locked(runtime):
    copies = HostCopies(locked=True)
    copies.reserve(4096)
    copy = copies.copy(torch.arange(10))
    del copies
    assert runtime.locked
    assert copy.tolist() == list(range(10))
    del copy
    assert not runtime.locked


def test_memory_that_is_not_there_or_must_not_be_locked_is_a_memory_error(runtime):
    with pytest.raises(MemoryError):
        page_locked(2**55)
    with pytest.raises(MemoryError):
        HostCopies(locked=False).reserve(2**55)
    made = []

    def empty(*args):
        made.append(weakref.ref(array := np.ndarray(*args)))
        return array

    with (
        mock.patch.object(runtime, "cudaHostRegister", return_value=2),
        mock.patch("torch.zeros", side_effect=RuntimeError("the error again")) as launch,
        mock.patch("numpy.empty", empty),
        pytest.raises(MemoryError, match=r"cannot lock 0\.0 GiB of host memory: CUDA error 2") as raised,
    ):
        page_locked(4096)
    assert raised.value.__traceback__ is not None
    assert made[0]() is None  # while the error is dealt with
    launch.assert_called_once()
    assert not runtime.locked

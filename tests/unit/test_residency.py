"""The residency table is enforced: release before acquire, only what may move moves, nothing beyond the budget."""

import pytest

from hybrid_gkd.errors import DeviceMemoryError
from hybrid_gkd.offload.residency import RESIDENCY, TENANTS, Residency

GIB = 2**30


class Device:
    """Stand-in for a GPU: counts what its tenants take and writes down what happens."""

    def __init__(self, total=100 * GIB):
        self.free, self.events = total, []

    def tenant(self, name, num_bytes, resident):
        self.free -= num_bytes if resident else 0
        return Tenant(self, name, num_bytes)


class Tenant:
    def __init__(self, device, name, num_bytes):
        self.device, self.name, self.size = device, name, num_bytes

    def num_bytes(self):
        return self.size

    def acquire(self):
        self.device.events.append(f"+{self.name}")
        self.device.free -= self.size

    def release(self):
        self.device.events.append(f"-{self.name}")
        self.device.free += self.size


def make(movable=TENANTS, resident=("kv_cache", "engine_weights", "optimizer_state"), total=100 * GIB):
    device = Device(total)
    sizes = {"kv_cache": 50 * GIB, "engine_weights": 10 * GIB, "optimizer_state": 40 * GIB, "actor_params": 20 * GIB}
    tenants = {name: device.tenant(name, sizes[name], name in resident) for name in TENANTS}
    residency = Residency(
        tenants, movable=set(movable), resident=set(resident), free_bytes=lambda: device.free
    )
    return residency, device


def test_a_step_moves_each_tenant_as_the_table_says():
    residency, device = make()
    phases = []
    for phase in ("update", "optimizer_step", "update", "publish", "rollout"):
        residency.enter(phase)
        phases.append(list(device.events))
        device.events.clear()
    assert phases == [
        ["-kv_cache", "-engine_weights", "-optimizer_state", "+actor_params"],
        ["+optimizer_state"],
        ["-optimizer_state"],
        ["+engine_weights"],
        ["-actor_params", "+kv_cache"],
    ]


def test_only_what_may_move_moves():
    residency, device = make(movable={"optimizer_state"}, resident=TENANTS, total=200 * GIB)
    for phase in ("rollout", "update", "optimizer_step"):
        residency.enter(phase)
    assert device.events == ["-optimizer_state", "+optimizer_state"]


def test_entering_the_same_phase_again_moves_nothing():
    residency, device = make()
    residency.enter("update")
    device.events.clear()
    residency.enter("update")
    assert device.events == []


def test_what_does_not_fit_is_refused_with_the_tenant_and_both_sizes():
    residency, device = make(resident=(), total=65 * GIB)
    residency.enter("optimizer_step")
    with pytest.raises(DeviceMemoryError, match=r"phase rollout: kv_cache needs 50\.00 GiB.*, 15\.00 GiB are free.*"):
        make(movable={"kv_cache", "engine_weights"}, resident=("optimizer_state",), total=65 * GIB)[0].enter("rollout")
    assert device.free == 5 * GIB


def test_bytes_are_reported_by_phase_and_tenant():
    residency, _ = make()
    for phase in RESIDENCY:
        residency.enter(phase)
    found = residency.bytes_by_phase()
    assert {tenant for phase, tenant in found if phase == "publish"} == {"actor_params", "engine_weights"}
    assert found["rollout", "kv_cache"] == 50 * GIB


def test_time_is_handed_out_once():
    residency, _ = make()
    residency.enter("update")
    assert set(residency.take_seconds()) == {
        "release kv_cache", "release engine_weights", "release optimizer_state", "acquire actor_params",
    }
    assert residency.take_seconds() == {}


def test_unknown_tenants_and_phases_are_our_own_errors():
    with pytest.raises(AssertionError, match="unknown tenants"):
        Residency({"gradients": Tenant(Device(), "gradients", 1)}, movable=set(), resident=set())
    residency, _ = make()
    with pytest.raises(KeyError):
        residency.enter("lunch")

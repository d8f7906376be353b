"""The residency table is enforced: release before acquire, only what moves moves."""

import pytest

from hybrid_gkd.offload.residency import RESIDENCY, Residency


class Recorder:
    """A tenant that writes down what happens to it."""

    def __init__(self, name, events):
        self.name, self.events = name, events

    def acquire(self):
        self.events.append(f"+{self.name}")

    def release(self):
        self.events.append(f"-{self.name}")


def make(names, resident):
    events = []
    return Residency({name: Recorder(name, events) for name in names}, resident=set(resident)), events


ALL = ["kv_cache", "engine_weights", "optimizer_state", "actor_params"]


def test_a_step_moves_each_tenant_as_the_table_says():
    residency, events = make(ALL, {"kv_cache", "engine_weights"})
    phases = {}
    for phase in ("update", "optimizer_step", "update", "publish", "rollout"):
        residency.enter(phase)
        phases.setdefault(phase, []).append(list(events))
        events.clear()
    assert phases["update"] == [["-kv_cache", "-engine_weights", "+actor_params"], ["-optimizer_state"]]
    assert phases["optimizer_step"] == [["+optimizer_state"]]
    assert phases["publish"] == [["+engine_weights"]]
    assert phases["rollout"] == [["-actor_params", "+kv_cache"]]


def test_everything_is_released_before_anything_is_acquired():
    residency, events = make(ALL, {"kv_cache", "engine_weights"})
    residency.enter("optimizer_step")
    assert [event[0] for event in events] == ["-", "-", "+", "+"]


def test_what_is_not_registered_stays_where_it_is():
    residency, events = make(["optimizer_state"], {"optimizer_state", "actor_params"})
    for phase in RESIDENCY:
        residency.enter(phase)
    assert events == ["-optimizer_state", "+optimizer_state", "-optimizer_state"]


def test_entering_the_same_phase_again_moves_nothing():
    residency, events = make(ALL, {"kv_cache", "engine_weights"})
    residency.enter("rollout")
    residency.enter("rollout")
    assert events == []


def test_unknown_tenants_and_phases_are_our_own_errors():
    with pytest.raises(AssertionError, match="unknown tenants"):
        make(["gradients"], set())
    residency, _ = make(ALL, set())
    with pytest.raises(KeyError):
        residency.enter("lunch")

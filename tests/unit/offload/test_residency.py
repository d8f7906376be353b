"""The residency table is enforced: release before acquire, only what may move moves, nothing beyond the budget."""

from contextlib import nullcontext

import pytest

from hybrid_gkd.errors import DeviceMemoryError
from hybrid_gkd.offload.residency import RESIDENCY, Residency
from hybrid_gkd.workers.device import EngineOwner, SharedDevice

GIB = 2**30
SIZES = {
    "kv_cache": 50 * GIB, "engine_weights": 10 * GIB, "optimizer_state": 40 * GIB, "actor_params": 20 * GIB,
    "critic_params": 15 * GIB, "critic_optimizer_state": 30 * GIB,
}
OWNERS = ("kv_cache", "engine_weights", "optimizer_state", "actor_params")
"""Owners of a worker without LoRA and critic, in the order of release."""
PHASES = {phase: RESIDENCY[phase] & set(OWNERS) for phase in ("rollout", "update", "optimizer_step", "publish")}


class Device:
    """Stand-in for a GPU: counts what its owners take and writes down what happens."""

    def __init__(self, total=100 * GIB):
        self.free, self.events = total, []

    def owner(self, name, num_bytes, resident):
        owner = MemoryOwner(self, name, num_bytes)
        if resident:
            owner.there = num_bytes
            self.free -= num_bytes
        return owner


class MemoryOwner:
    """Copies nothing, but keeps the books of a memory owner that copies in the background."""

    def __init__(self, device, name, num_bytes):
        self.device, self.name, self.size = device, name, num_bytes
        self.there, self.copied_out = 0, False

    def num_bytes(self):
        return self.size

    def start_acquire(self, room, most):
        """In whole GiB."""
        if self.name in ("kv_cache", "engine_weights"):
            return self.size
        if coming := min(self.size - self.there, room // GIB * GIB, -(-most // GIB) * GIB):
            self.device.events.append(f">{self.name} {coming // GIB}")
            self.device.free -= coming
            self.there += coming
        return self.size - self.there

    def acquire(self):
        self.device.free -= self.size - self.there
        self.there = self.size
        self.device.events.append(f"+{self.name}")

    def start_release(self):
        if not self.copied_out:
            self.device.events.append(f"<{self.name}")
            self.copied_out = True

    def release(self):
        self.device.events.append(f"-{self.name}")
        self.device.free += self.there
        self.there = 0

    def changed(self):
        self.copied_out = False


def make(
    movable=OWNERS, resident=("kv_cache", "engine_weights", "optimizer_state"), total=103 * GIB, names=OWNERS
):  # fmt: skip
    device = Device(total)
    owners = {name: device.owner(name, SIZES[name], name in resident) for name in names}
    residency = Residency(
        owners, movable=set(movable), resident=set(resident), free_bytes=lambda: device.free
    )
    return residency, device


def moves(residency, device, *phases, **options):
    found = []
    for phase in phases:
        residency.enter(phase, **options)
        found.append([event for event in device.events if event[0] in "+-"])
        device.events.clear()
    return found


STEP = ("update", "optimizer_step", "update", "publish", "rollout")


def test_without_room_for_both_a_memory_owner_leaves_before_the_next_comes():
    residency, device = make(total=101 * GIB)
    assert moves(residency, device, "update") == [["-kv_cache", "-engine_weights", "-optimizer_state", "+actor_params"]]
    residency, device = make(resident=("kv_cache", "engine_weights"), total=70 * GIB)
    assert moves(residency, device, *STEP) == [
        ["-kv_cache", "-engine_weights", "+actor_params"],
        ["+optimizer_state"],
        ["-optimizer_state"],
        ["+engine_weights"],
        ["-actor_params", "+kv_cache"],
    ]


def test_what_is_only_read_keeps_its_copies_on_the_host():
    residency, device = make(total=70 * GIB, resident=("kv_cache", "engine_weights"))
    for changes, copied in ((True, ["<optimizer_state", "<actor_params"]), (False, [])):
        residency.enter("optimizer_step", changes=changes)
        device.events.clear()
        residency.enter("publish")
        residency.enter("rollout")
        assert [event for event in device.events if event[0] == "<" and event[1:] in ("optimizer_state", "actor_params")
                ] == copied  # fmt: skip


@pytest.mark.parametrize(("reserve", "leaves"), [(56, []), (57, ["-optimizer_state"])])
def test_what_a_phase_that_follows_needs_stays_if_there_is_room(reserve, leaves):
    """Besides the margin, of 4 GiB."""
    residency, device = make(total=121 * GIB, resident=("actor_params", "optimizer_state"))
    residency.enter("optimizer_step")
    left = device.free - 4 * GIB
    found = moves(residency, device, "update", beside="optimizer_step", reserve=left + (reserve - 57) * GIB)
    assert found == [leaves]
    assert moves(residency, device, "optimizer_step") == [["+optimizer_state"] if leaves else []]
    assert "-optimizer_state" in moves(residency, device, "update")[0]  # the present weights are not on the host


def test_with_room_for_both_nothing_waits_for_what_leaves():
    residency, device = make(total=200 * GIB)
    assert moves(residency, device, *STEP) == [
        ["+actor_params", "-kv_cache", "-engine_weights", "-optimizer_state"],
        ["+optimizer_state"],
        ["-optimizer_state"],
        ["+engine_weights"],
        ["+kv_cache", "-actor_params"],
    ]


def test_the_critic_has_a_turn_of_its_own():
    """Values, its update, the actor's: of the two models one is there at a time, and what has changed is copied out."""
    both = (*OWNERS, "critic_params", "critic_optimizer_state")
    residency, device = make(both, ("kv_cache", "engine_weights"), 65 * GIB, both)
    turns = ("critic_update", "critic_optimizer_step", "update", "optimizer_step", "publish")
    assert moves(residency, device, *turns) == [
        ["-kv_cache", "-engine_weights", "+critic_params"],
        ["+critic_optimizer_state"],
        ["-critic_optimizer_state", "-critic_params", "+actor_params"],
        ["+optimizer_state"],
        ["-optimizer_state", "+engine_weights"],
    ]
    residency.enter("critic_optimizer_step")
    device.events.clear()
    residency.prepare("update")
    assert device.events == [">actor_params 16", "<critic_optimizer_state", "<critic_params"]


def test_what_leaves_may_do_so_until_its_room_is_needed():
    residency, device = make(resident=("actor_params", "optimizer_state"), total=80 * GIB)
    assert moves(residency, device, "publish", finish=False) == [["+engine_weights"]]
    assert moves(residency, device, "rollout") == [["-optimizer_state", "-actor_params", "+kv_cache"]]


def test_prepared_copies_run_ahead_and_are_not_made_twice():
    residency, device = make(total=200 * GIB)
    residency.enter("rollout")
    device.events.clear()
    residency.prepare("update")
    assert device.events == [">actor_params 20", "<kv_cache", "<engine_weights"]
    device.events.clear()
    residency.enter("update")
    residency.prepare("optimizer_step")
    residency.enter("optimizer_step")
    assert device.events == [
        "+actor_params", "-kv_cache", "-engine_weights", ">optimizer_state 40", "+optimizer_state",
    ]
    device.events.clear()
    residency.prepare("rollout")
    residency.enter("publish", finish=False)
    residency.enter("rollout")
    assert device.events == [
        "<optimizer_state", "<actor_params", "+engine_weights", "+kv_cache", "-optimizer_state", "-actor_params",
    ]


def test_a_copy_made_before_the_optimizer_step_is_not_used_after_it():
    residency, device = make(total=200 * GIB)
    residency.enter("update")
    residency.prepare("rollout")
    residency.enter("optimizer_step")
    device.events.clear()
    residency.enter("rollout")
    assert [event for event in device.events if event[0] == "<"] == ["<optimizer_state", "<actor_params"]


def test_no_more_is_prepared_than_the_phase_leaves_room_for():
    residency, device = make(resident=("actor_params",), total=80 * GIB)
    assert residency.prepare("optimizer_step", reserve=56 * GIB) == 0
    assert device.events == []
    assert residency.prepare("optimizer_step", reserve=20 * GIB) == 36 * GIB
    assert residency.missing("optimizer_step") == 4 * GIB
    assert residency.prepare("optimizer_step", reserve=10 * GIB) == 4 * GIB
    assert residency.prepare("optimizer_step") == residency.missing("optimizer_step") == 0
    residency.enter("optimizer_step")
    assert device.events == [">optimizer_state 36", ">optimizer_state 4", "+optimizer_state"]
    assert device.free == 20 * GIB


def test_what_is_prepared_comes_in_pieces_of_the_wanted_size():
    residency, device = make(resident=(), total=80 * GIB)
    assert [residency.prepare("optimizer_step", most=15 * GIB) for _ in range(5)] == [15 * GIB] * 4 + [0]
    assert device.events == [">actor_params 15", ">actor_params 5", ">optimizer_state 10", *[">optimizer_state 15"] * 2]


def test_the_rest_of_what_is_there_in_part_comes_beside_what_leaves_or_after_it():
    for total, expected in ((104, ["+actor_params", "-kv_cache", "-engine_weights"]),
                            (79, ["-kv_cache", "-engine_weights", "+actor_params"])):  # fmt: skip
        residency, device = make(resident=("kv_cache", "engine_weights"), total=total * GIB)
        assert residency.prepare("update", most=15 * GIB) == 15 * GIB
        device.events.clear()
        residency.enter("update")
        assert [event for event in device.events if event[0] != "<"] == expected
        assert device.free == (total - 20) * GIB


def test_what_came_in_part_and_in_vain_leaves_again():
    residency, device = make(resident=("kv_cache", "engine_weights"), total=200 * GIB)
    residency.prepare("update", most=5 * GIB)
    residency.enter("rollout")
    assert device.events[-1] == "-actor_params"
    assert device.free == 140 * GIB
    residency.enter("update")
    assert device.free == 180 * GIB


def test_what_was_prepared_in_vain_leaves_again():
    residency, device = make(resident=("kv_cache", "engine_weights"), total=200 * GIB)
    residency.prepare("update")
    residency.enter("rollout")
    assert device.events[-1] == "-actor_params"
    assert device.free == 140 * GIB


def test_only_what_may_move_moves():
    residency, device = make(movable={"optimizer_state"}, resident=OWNERS, total=200 * GIB)
    for phase in ("rollout", "update", "optimizer_step"):
        residency.enter(phase)
    assert [e for e in device.events if e[0] != "<"] == ["-optimizer_state", "+optimizer_state"]


def test_entering_the_same_phase_again_moves_nothing():
    residency, device = make()
    residency.enter("update")
    device.events.clear()
    residency.enter("update")
    assert device.events == []


def test_what_does_not_fit_is_refused_with_the_owner_and_both_sizes():
    residency, device = make(resident=(), total=65 * GIB)
    residency.enter("optimizer_step")
    with pytest.raises(DeviceMemoryError, match=r"phase rollout: kv_cache needs 50\.00 GiB.*, 15\.00 GiB are free.*"):
        make(movable={"kv_cache", "engine_weights"}, resident=("optimizer_state",), total=65 * GIB)[0].enter("rollout")
    assert device.free == 5 * GIB


def test_what_does_not_fit_comes_with_what_to_change():
    residency, _ = make(movable=(), resident=("kv_cache", "engine_weights"), total=65 * GIB)
    with pytest.raises(DeviceMemoryError) as raised:
        residency.enter("update")
    keys = ("fsdp_config.param_offload", "actor.ppo_max_token_len_per_gpu", "gpu_memory_utilization")
    for advice in ("the last checkpoint is intact", *keys):
        assert advice in str(raised.value)


def test_bytes_are_reported_by_phase_and_owner():
    residency, _ = make()
    for phase in PHASES:
        residency.enter(phase)
    found = residency.bytes_by_phase()
    assert {owner for phase, owner in found if phase == "publish"} == {"actor_params", "engine_weights"}
    assert found["rollout", "kv_cache"] == 50 * GIB


@pytest.mark.parametrize("total", [103 * GIB, 200 * GIB])
@pytest.mark.parametrize("movable", [OWNERS, ("optimizer_state",), ()])
def test_what_leaves_or_has_left_is_not_reported_as_there(total, movable):
    """The moves of a worker in two steps: what is reported of a phase is what it needs and what may not move."""
    stays = set(OWNERS) - set(movable)
    residency, device = make(movable, resident=("kv_cache", "engine_weights", *stays), total=total + 20 * GIB)
    for _ in range(2):
        residency.enter("update")
        residency.prepare("optimizer_step")
        residency.enter("optimizer_step")
        residency.prepare("rollout")
        residency.enter("update", finish=False)
        residency.enter("publish", finish=False)
        residency.enter("rollout")
        residency.prepare("update")
        found = residency.bytes_by_phase()
        for phase, wanted in PHASES.items():
            assert {owner for place, owner in found if place == phase} == wanted | stays
    assert found["optimizer_step", "optimizer_state"] == 40 * GIB
    assert device.free >= 0


def test_the_weights_below_adapters_come_and_go_with_them():
    device = Device()
    owners = {name: device.owner(name, GIB, False) for name in ("actor_params", "frozen_params", "optimizer_state")}
    residency = Residency(owners, movable=set(owners), resident=set())
    assert moves(residency, device, "update", "optimizer_step", "rollout") == [
        ["+actor_params", "+frozen_params"], ["+optimizer_state"],
        ["-optimizer_state", "-frozen_params", "-actor_params"],
    ]


def test_time_is_handed_out_once():
    residency, _ = make()
    residency.enter("update")
    assert set(residency.take_seconds()) == {
        "release kv_cache", "release engine_weights", "release optimizer_state", "acquire actor_params",
    }
    assert residency.take_seconds() == {}


def test_unknown_owners_and_phases_are_our_own_errors():
    with pytest.raises(AssertionError, match="unknown owners"):
        Residency({"gradients": MemoryOwner(Device(), "gradients", 1)}, movable=set(), resident=set())
    residency, _ = make()
    with pytest.raises(KeyError):
        residency.enter("lunch")


def test_an_engine_that_stays_is_counted_with_what_it_was_built_with():
    sizes = {"engine_weights": 3, "kv_cache": 5}
    owners = {name: EngineOwner(lambda: None, size=lambda size=size: size) for name, size in sizes.items()}
    residency = Residency(owners, movable=set(), resident=set(owners))
    residency.enter("update")
    assert residency.bytes_by_phase() == {("update", "engine_weights"): 3, ("update", "kv_cache"): 5}


class Card:
    """Stand-in for torch's view of a card of 100 GiB: this process, and another one that comes later."""

    def __init__(self, monkeypatch):
        self.context, self.reserved, self.unmapped, self.other = GIB, 0, 0, 0
        for name, function in {
            "mem_get_info": lambda: (100 * GIB - self.context - self.reserved + self.unmapped - self.other, 100 * GIB),
            "memory_reserved": lambda: self.reserved, "memory_allocated": lambda: self.reserved,
            "empty_cache": lambda: None,
        }.items():  # fmt: skip
            monkeypatch.setattr(f"torch.cuda.{name}", function)


class SleepingEngine:
    """A stand-in whose memory torch still counts while it sleeps, as for vLLM."""

    can_sleep = True

    def __init__(self, card, known):
        self.card, self.known = card, known
        card.reserved += 70 * GIB

    def sleeping_bytes(self):
        return (20 * GIB, 50 * GIB) if self.known else (0, 0)

    def sleep(self):
        self.card.unmapped = 70 * GIB

    def wake_weights(self):
        self.card.unmapped -= 20 * GIB

    def wake_kv_cache(self):
        """Meanwhile another process, a teacher or a run, takes 9 GiB."""
        self.card.unmapped -= 50 * GIB
        self.card.other = 9 * GIB


@pytest.mark.parametrize(("known", "cache"), [(True, 50), (False, 59)])
def test_what_another_process_takes_is_not_the_engines_or_the_students(monkeypatch, known, cache):
    """Where the engine does not say what it takes the whole card is measured, as before."""
    card, device = Card(monkeypatch), SharedDevice("cuda")
    engine = device.build_engine(lambda: SleepingEngine(card, known))
    device._models, device.meter.take_peak = ["actor"], lambda: 0
    residency = device.manage(engine)
    residency.enter("rollout")
    with device.generation():
        card.reserved += GIB
    card.reserved += 3 * GIB  # that the student leaves there
    device.trim_after_publish()
    found = device.metrics(residency)
    assert found["memory/rollout/engine_weights_gb"] == 20
    assert found["memory/rollout/kv_cache_gb"] == cache
    assert found["memory/rollout/actor_rest_gb"] == 3
    residency.enter("update")
    card.other = 20 * GIB  # the cache still fits
    with nullcontext() if known else pytest.raises(DeviceMemoryError, match=r"kv_cache needs 59\.00 GiB.* 55\.00 GiB"):
        residency.enter("rollout")


def test_scoring_by_the_moving_average_invalidates_the_copies_of_the_parameters_alone():
    """The parameters get other values and their own back; the average only changes in the optimizer step."""
    names = ("ema_params", "optimizer_state", "actor_params")
    device = Device()
    owners = {name: device.owner(name, 10 * GIB, name == "actor_params") for name in names}
    residency = Residency(owners, movable=set(names), resident={"actor_params"}, free_bytes=lambda: device.free)
    for owner in owners.values():
        owner.copied_out = True
    residency.enter("ema_teacher")
    assert {name for name, owner in owners.items() if owner.there} == {"actor_params", "ema_params"}
    assert {name for name, owner in owners.items() if not owner.copied_out} == {"actor_params"}
    residency.enter("update")
    assert not owners["ema_params"].there
    residency.enter("optimizer_step")
    assert all(owner.there and not owner.copied_out for owner in owners.values())

"""Errors cross from the workers' processes, so they have to survive pickling."""

import pickle

import pytest

from hybrid_gkd.errors import ConfigError, HybridGKDError
from hybrid_gkd.teacher import protocol
from hybrid_gkd.teacher.server import supervisor
from hybrid_gkd.workers import pool


def subclasses(cls):
    return {cls, *(below for child in cls.__subclasses__() for below in subclasses(child))}


CLASSES = sorted((cls for cls in subclasses(HybridGKDError) if cls.__module__.startswith("hybrid_gkd.")), key=str)


def make(cls):
    if cls is ConfigError:
        return cls("trainer.seed", "must be positive", -1)
    return cls("what happened", reported=True) if cls is supervisor.WorkerFailed else cls("what happened")


def test_the_classes_are_found_wherever_they_are():
    elsewhere = {protocol.ProtocolError, supervisor.WorkerFailed, pool.WorkerDiedError}
    assert elsewhere | {ConfigError} < set(CLASSES)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("version", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_error_survives_pickling(cls, version):
    error = make(cls)
    found = pickle.loads(pickle.dumps(error, version))
    assert (type(found), str(found), vars(found)) == (cls, str(error), vars(error))


@pytest.mark.parametrize("cls", CLASSES)
def test_the_place_that_is_added_to_a_message_survives_too(cls):
    error = pickle.loads(pickle.dumps(make(cls)))
    error.args = (f"{error} (worker 0)",)
    error.add_note("seen twice")
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), str(found), vars(found)) == (cls, f"{make(cls)} (worker 0)", vars(error))


def test_a_config_error_keeps_its_key():
    found = pickle.loads(pickle.dumps(ConfigError("trainer.seed", "must be positive", -1)))
    assert found.key == "trainer.seed"
    assert str(found) == "trainer.seed: must be positive; got -1"

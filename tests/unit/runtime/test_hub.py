"""A hub that does not answer is asked once; this process and its children then read the cache alone."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants

from hybrid_gkd.errors import ModelError
from hybrid_gkd.models.spec import model_spec
from hybrid_gkd.models.tokenizer import load_tokenizer
from hybrid_gkd.runtime import hub
from hybrid_gkd.testing import make_tiny_model

NAME = "someone/some-model"


@pytest.fixture
def online(monkeypatch):
    """Simulate a machine without the variable; return the requests to the hub."""
    monkeypatch.setenv(hub.OFFLINE, "")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "HUB_SECONDS", 0.2)
    hub.check_hub.cache_clear()
    yield lambda answer: answering(monkeypatch, answer)
    hub.check_hub.cache_clear()


def answering(monkeypatch, answer):
    asked = []

    def head(url, timeout):
        asked.append((url, timeout))
        return SimpleNamespace(status_code=answer())

    monkeypatch.setattr(huggingface_hub, "get_session", lambda: SimpleNamespace(head=head))
    return asked


def refused():
    raise ConnectionError("no network")


@pytest.mark.parametrize("answer", [refused, lambda: 503, lambda: time.sleep(5)])
def test_without_an_answer_the_run_and_its_children_are_offline(online, caplog, answer):
    asked, began = online(answer), time.monotonic()
    hub.check_hub()
    hub.check_hub()
    assert time.monotonic() - began < 2
    assert asked == [(constants.ENDPOINT, hub.HUB_SECONDS)]
    assert huggingface_hub.is_offline_mode()
    child = [sys.executable, "-c", "import huggingface_hub; print(huggingface_hub.is_offline_mode())"]
    assert subprocess.run(child, capture_output=True, text=True, check=True).stdout == "True\n"
    assert "HF_HUB_OFFLINE=1" in caplog.text


@pytest.mark.parametrize("status", [200, 404])
def test_a_hub_that_answers_is_used(online, caplog, status):
    online(lambda: status)
    hub.check_hub()
    assert not huggingface_hub.is_offline_mode()
    assert not os.environ[hub.OFFLINE]
    assert not caplog.text


def test_whoever_is_offline_already_does_not_ask(online, monkeypatch):
    asked = online(refused)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.check_hub()
    assert not asked


def test_models_are_looked_for_behind_it_and_folders_without(online, tmp_path):
    asked, folder = online(refused), str(make_tiny_model(tmp_path / "model"))
    load_tokenizer(folder)
    model_spec(folder, trust_remote_code=False)
    assert not asked
    began = time.monotonic()
    with pytest.raises(ModelError, match=NAME):
        load_tokenizer(NAME)
    with pytest.raises(ModelError, match=NAME):
        model_spec(NAME, trust_remote_code=False)
    assert len(asked) == 1
    assert time.monotonic() - began < 5

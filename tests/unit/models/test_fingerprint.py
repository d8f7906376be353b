"""Which weights a folder has: the same for a copy, another for whatever was trained."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_gkd.models.fingerprint import fingerprint
from hybrid_gkd.teacher.engines.engine_table import weights_fingerprint
from hybrid_gkd.teacher.engines.options import EngineOptions
from hybrid_gkd.testing import make_tiny_model


@pytest.fixture
def folder(tmp_path):
    return make_tiny_model(tmp_path / "model")


def test_a_copy_is_the_same_and_a_trained_model_another(tmp_path, folder):
    copy = tmp_path / "elsewhere" / "model"
    shutil.copytree(folder, copy)
    (copy / "notes.txt").write_text("not a weight", encoding="utf-8")
    before = fingerprint(str(folder))
    assert len(before) == 64
    assert fingerprint(str(copy)) == before
    weights = load_file(copy / "model.safetensors")
    save_file({name: weight + torch.full_like(weight, 1e-4) for name, weight in weights.items()},
              copy / "model.safetensors", {"format": "pt"})  # fmt: skip
    assert fingerprint(str(copy)) != before


def test_the_type_that_is_computed_in_counts_and_other_arguments_do_not(folder):
    def weights(engine_kwargs="{}", **options):
        return weights_fingerprint(EngineOptions(ckpt_path=str(folder), engine_kwargs=engine_kwargs, **options), "vllm")

    assert weights() == weights('{"vllm": {"max_num_seqs": 4}}') == weights(tp_size=2)
    changes = ('{"quantization": "fp8"}', '{"hf_overrides": {"rope_theta": 1e6}}', '{"revision": "v2"}')
    others = [weights(f'{{"vllm": {each}}}') for each in changes]
    assert len({weights(), *others, weights(dtype="bfloat16")}) == 5


def test_a_model_that_is_not_here_has_none():
    assert fingerprint("no/such-model") == ""
    assert weights_fingerprint(EngineOptions(ckpt_path="no/such-model"), "hf") == ""

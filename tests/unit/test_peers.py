"""benchmarks/peers.py: lengths that a prompt decides, what is missing, and what is not compared."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import hybrid_gkd

sys.path.insert(0, str(Path(hybrid_gkd.__file__).parents[1] / "benchmarks"))
import answer_lengths  # type: ignore[import-not-found]
import peers


@pytest.mark.slow
def test_a_prompt_decides_the_length_of_its_answer_in_any_engine(monkeypatch):
    prompts = np.random.default_rng(0).integers(0, 1000, (2000, 8)).tolist()
    lengths = [answer_lengths.answer_length(ids, 300, 1.0, 4096) for ids in prompts]
    assert np.median(lengths) == pytest.approx(300, rel=0.1)
    assert np.std(np.log(lengths)) == pytest.approx(1.0, rel=0.1)
    assert max(lengths) == 4096

    monkeypatch.setenv("ANSWER_LENGTHS", "300,1.0,4096")
    given, shared = {}, SimpleNamespace(max_tokens=7, ignore_eos=False, stop_token_ids=[3])
    shared.clone = lambda: SimpleNamespace(**vars(shared))
    engine = SimpleNamespace(add_request=lambda name, prompt, params, **others: given.update({name: (params, others)}))
    answer_lengths.force_lengths(engine)
    for name, ids in enumerate(prompts[:3]):
        engine.add_request(str(name), {"prompt_token_ids": ids}, shared, priority=1)
    assert [params.max_tokens for params, _ in given.values()] == lengths[:3]
    assert all(params.ignore_eos and not params.stop_token_ids for params, _ in given.values())
    assert given["0"][1] == {"priority": 1}
    assert shared.max_tokens == 7

    assert {answer_lengths.answer_length(ids, 512, 0.0, 512) for ids in prompts[:10]} == {512}


@pytest.mark.parametrize(
    ("left_out", "trl", "reason"), [("vllm", "1.16.0", "has no vllm: install it"), (None, "1.9.1", "has TRL 1.9.1")]
)
def test_what_trl_lacks_is_said_before_anything_starts(tmp_path, left_out, trl, reason):
    found = {name: "5.0.0" for name in peers.NEEDED if name != left_out} | {"trl": trl}
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{json.dumps(found)}'\n", encoding="utf-8")
    python.chmod(0o755)
    with pytest.raises(SystemExit, match=reason):
        peers.trl_versions(str(python))
    with pytest.raises(SystemExit, match="is no Python that runs"):
        peers.trl_versions(str(tmp_path / "none"))


def test_steps_with_other_tokens_are_not_compared():
    rows = [{"seconds": 9.0 - i, "answer_tokens": 100 + i, "longest": 30, "tokens": 200} for i in range(3)]
    peers.check_same_tokens(rows, rows, 3)
    for other in (rows[:2], [rows[0] | {"tokens": 201}, *rows[1:]]):
        with pytest.raises(SystemExit, match="not the same work"):
            peers.check_same_tokens(rows, other, 3)
    assert peers.figures(rows, 1, [2048]) == {"step": 7.5, "tokens_per_second": 400 / 15, "peak": 2.0}


def test_micro_batches_of_trl_divide_the_batch_and_hold_padded_sequences():
    args = Namespace(trl_micro_batch=[], micro_tokens=16384, prompt_length=256, prompts=128)
    assert peers.micro_batches(args, 512) == [16]
    assert peers.micro_batches(args, 4096) == [2]
    assert peers.micro_batches(args, 30000) == [1]
    args.trl_micro_batch = [4, 8]
    assert peers.micro_batches(args, 512) == [4, 8]

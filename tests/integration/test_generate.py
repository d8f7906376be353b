"""`python -m hybrid_gkd.teacher generate` with vLLM on the CPU: killed, continued, and filtered by a reward."""

import json
import subprocess
import sys

import pytest
from processes import TIMEOUT, wait_until

from hybrid_gkd.compat.vllm.versions import vllm_available
from hybrid_gkd.teacher.server.local import child_environment
from hybrid_gkd.testing import make_tiny_model

pytestmark = pytest.mark.skipif(not vllm_available(), reason="vLLM is not installed")
ROWS, N, MAX_TOKENS = 12, 3, 120
REWARD = "def even(response, answer):\n    return float(len(response) % 2 == 0)\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    make_tiny_model(folder / "teacher", seed=3, std=0.4)
    rows = [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i), "more": {"id": [i]}} for i in range(ROWS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "my_reward.py").write_text(REWARD, encoding="utf-8")
    return folder


def started(folder, out, *more):
    command = [
        sys.executable, "-m", "hybrid_gkd.teacher", "generate", "prompts.jsonl", "--ckpt-path=teacher", f"--out={out}",
        f"--n={N}", f"--max-tokens={MAX_TOKENS}", "--device=cpu", *more,
    ]  # fmt: skip
    return subprocess.Popen(
        command, cwd=folder, env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finished(process):
    text, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, text[-3000:]
    return text


def lines(path):
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    by_id = {(line["row"], line["sample"]): line for line in found}
    assert len(by_id) == len(found)
    return by_id


def test_a_killed_command_continues_to_the_same_answers(folder):
    text = finished(started(folder, "whole.jsonl", "--keep-cut"))
    whole = lines(folder / "whole.jsonl")
    assert whole.keys() == {(row, sample) for row in range(1, ROWS + 1) for sample in range(N)}
    assert f"whole.jsonl: kept {ROWS * N} of {ROWS * N} completions of {ROWS} rows" in text
    assert f"{ROWS} of {ROWS} rows" in text
    assert len({line["response"] for line in whole.values()}) == ROWS * N
    assert {line["finish_reason"] for line in whole.values()} == {"stop", "length"}
    assert not any(line["response"].endswith("\ufffd") for line in whole.values() if line["finish_reason"] == "length")
    assert whole[2, 1]["more"] == {"id": [1]}

    out = folder / "killed.jsonl"
    few = ["--keep-cut", '--engine-kwargs={"vllm": {"max_num_seqs": 2}}']
    process = started(folder, out.name, *few)
    wait_until(lambda: process.poll() is not None or (out.exists() and out.read_bytes().count(b"\n") > 2))
    process.kill()
    process.wait(TIMEOUT)
    before = out.read_bytes()
    assert 2 < before.count(b"\n") < ROWS * N
    out.write_bytes(before + b'{"prompt": "What is 3')
    text = finished(started(folder, out.name, *few))
    assert "removed an incomplete last line" in text
    assert out.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    assert lines(out) == whole
    assert finished(started(folder, out.name, *few)).count("\n") == 1  # nothing is loaded for nothing


def test_a_reward_and_the_limit_of_tokens_leave_answers_out(folder):
    out = folder / "filtered.jsonl"
    text = finished(started(
        folder, out.name, "--reward=my_reward.py:even", "--answer-key=answer", "--min-reward=1", "--response-key=text"
    ))  # fmt: skip
    kept, rejected = lines(out), lines(folder / "filtered.jsonl.rejected")
    assert kept.keys() | rejected.keys() == {(row, sample) for row in range(1, ROWS + 1) for sample in range(N)}
    assert all(line["reward"] == 1.0 and len(line["text"]) % 2 == 0 for line in kept.values())
    reasons = {line["rejected"]: line for line in rejected.values()}
    assert reasons.keys() == {"reward", "length"}
    assert (reasons["reward"]["finish_reason"], reasons["reward"]["reward"]) == ("stop", 0.0)
    assert (reasons["length"]["finish_reason"], "reward" in reasons["length"]) == ("length", False)
    assert f"filtered.jsonl: kept {len(kept)} of {ROWS * N} completions" in text
    process = started(folder, out.name, "--reward=my_reward.py:even", "--answer-key=answer", "--min-reward=0.5")
    text, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 1
    assert "filtered.jsonl was made with --response-key 'text', not 'response': use the same" in text


def test_a_model_that_two_processes_share(folder):
    """Tensor parallel: the weights are those of the folder there, too."""
    finished(started(folder, "one.jsonl", "--keep-cut", "--temperature=0", "--n=1", "--max-tokens=8"))
    finished(started(folder, "two.jsonl", "--keep-cut", "--temperature=0", "--n=1", "--max-tokens=8", "--tp-size=2"))
    one, two = lines(folder / "one.jsonl"), lines(folder / "two.jsonl")
    assert sum(one[each]["response"] == two[each]["response"] for each in one) > ROWS * 0.7  # rounding may swap a token

"""Answers of a model to prompts: the file that a killed command continues, and what is refused before vLLM loads."""

import json
from collections import Counter
from types import SimpleNamespace

import datasets
import numpy as np
import pytest

from hybrid_gkd.data.prompts import Columns, make_prompts, read_rows
from hybrid_gkd.errors import ConfigError, DataError, HybridGKDError
from hybrid_gkd.launch import generate
from hybrid_gkd.launch.completion_file import CompletionFile, Progress
from hybrid_gkd.rollout.engine import generated_sample
from hybrid_gkd.testing import make_tiny_model, make_tokenizer

ARGUMENTS = {"--n": 2, "--temperature": 0.7}


def line(row, sample, **more):
    return {"row": row, "sample": sample, "response": "4", **more}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "answers.jsonl"


def opened(path, **changed):
    return CompletionFile(path, ARGUMENTS | changed)


def test_answers_of_both_files_are_done(path):
    file = opened(path)
    file.append([line(1, 0), line(1, 1, rejected="length")])
    file.append([line(2, 0, rejected="reward")])
    file.close()
    again = opened(path)
    assert again.done == {(1, 0), (1, 1), (2, 0)}
    assert (again.num_kept, again.reasons) == (1, {"length": 1, "reward": 1})
    again.close()
    assert [json.loads(text)["row"] for text in path.read_text(encoding="utf-8").splitlines()] == [1]


@pytest.mark.parametrize(("cut", "warned"), [(0, False), (1, False), (2, True)])
def test_many_cut_completions_that_are_left_out_are_warned_of(path, caplog, cut, warned):
    file = opened(path)
    file.append([line(row, 0, **({"rejected": "length"} if row < cut else {})) for row in range(20)])
    generate.warn_of_cut(SimpleNamespace(max_tokens=64), file)
    file.close()
    assert ("10 % of the completions were cut by --max-tokens 64 and left out" in caplog.text) == warned
    assert bool(caplog.text) == warned


def test_a_half_written_line_is_taken_away_and_its_answer_missing(path, caplog):
    file = opened(path)
    file.append([line(1, 0), line(1, 1)])
    file.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    again = opened(path)
    assert again.done == {(1, 0)}
    assert "removed an incomplete last line" in caplog.text
    again.append([line(1, 1)])
    again.close()
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--temperature": 1.0}, "was made with --temperature 0.7, not 1.0: use the same"),
        ({"--seed": 3}, "was made with --seed None, not 3"),
    ],
)
def test_other_arguments_are_refused_by_name(path, changed, message):
    file = opened(path)
    file.append([line(1, 0)])
    file.close()
    with pytest.raises(DataError, match=message):
        opened(path, **changed)


def test_a_file_without_answers_takes_any_arguments(path):
    """Killed between the first line of arguments and the first answer."""
    opened(path).close()
    opened(path, **{"--temperature": 1.0}).close()
    sidecar = path.with_name("answers.jsonl.json")
    assert json.loads(sidecar.read_text(encoding="utf-8"))["--temperature"] == 1.0


@pytest.mark.parametrize("size", [0, 7])
def test_arguments_cut_by_a_kill_are_written_again_by_the_same_command(path, size):
    opened(path).close()
    sidecar = path.with_name("answers.jsonl.json")
    whole = sidecar.read_bytes()
    sidecar.write_bytes(whole[:size])
    opened(path).close()
    assert sidecar.read_bytes() == whole


@pytest.mark.parametrize("suffix", ["", ".rejected"])
def test_completions_of_something_else_are_refused_and_nothing_is_left_behind(path, suffix):
    path.parent.mkdir()
    (other := path.with_name(path.name + suffix)).write_text('{"prompt": "2 + 2"}\n', encoding="utf-8")
    rule = "exists, but not as a file of this command, which keeps its arguments in answers.jsonl.json; use another"
    with pytest.raises(DataError, match=rf"--out .*: {other.name} {rule}"):
        opened(path)
    assert [*path.parent.iterdir()] == [other]
    assert other.read_text(encoding="utf-8") == '{"prompt": "2 + 2"}\n'


@pytest.mark.parametrize("has_completions", [False, True])
@pytest.mark.parametrize("content", [b'{"prompt": "a"}', b'{"prompt": "a"}\n{"prompt": "b"}\n', b"[]", b"\xff"])
def test_a_file_of_something_else_in_place_of_the_arguments_is_refused_and_kept(path, content, has_completions):
    path.parent.mkdir()
    if has_completions:
        path.write_text(json.dumps(line(1, 0)) + "\n", encoding="utf-8")
    (other := path.with_name("answers.jsonl.json")).write_bytes(content)
    with pytest.raises(DataError, match=r"--out .* exists, but not as a file of this command.* in answers.jsonl.json"):
        opened(path)
    assert other.read_bytes() == content


def test_lines_of_something_else_are_refused(path):
    opened(path).close()
    path.write_text('{"prompt": "2 + 2"}\n', encoding="utf-8")
    with pytest.raises(DataError, match="line 1: must be an object with row and sample"):
        opened(path)


def test_a_second_process_is_refused(path):
    file = opened(path)
    with pytest.raises(DataError, match="another process is writing it"):
        opened(path)
    file.close()
    opened(path).close()


def test_progress_counts_rows_whose_answers_are_all_done(caplog):
    caplog.set_level("INFO", logger="hybrid_gkd")
    progress = Progress(Counter({4: 2, 5: 1}), 10, lambda: "50.0% kept")
    for row, tokens in ((4, 30), (4, 12)):
        progress.add(row, tokens)
    progress.show(last=True)
    assert caplog.messages[-1].startswith("9 of 10 rows, ")
    assert ", 50.0% kept, " in caplog.messages[-1]
    assert caplog.messages[-1].endswith(" left")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), positions=64)


@pytest.fixture
def parsed(tmp_path, model):
    def parse(*arguments, rows=None):
        rows, file = rows or [{"prompt": "2 + 2"}], tmp_path / "prompts.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        fixed = [str(file), f"--ckpt-path={model}", f"--out={tmp_path / 'answers.jsonl'}", "--max-tokens=16"]
        return generate.parse([*fixed, *arguments])

    return parse


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature=0", "-n", "2"], "--n must be 1 with --temperature 0"),
        (["--top-p=1.5"], "--top-p: must be a number within 1e-06..1, got 1.5"),
        (["--top-k=0"], "--top-k must be -1 or at least 1, got 0"),
        (["--reward=bleu"], "--reward must be one of gsm8k, math, exact_match, by_data_source, or file.py:function"),
        (["--reward=gsm8k"], "--reward gsm8k needs --answer-key"),
        (["--min-reward=1"], "--min-reward needs --reward"),
        (["--answer-key=answer"], "--answer-key needs --reward"),
        (["--reward-fn-key=source"], "--reward-fn-key needs --reward"),
        (["--temperature=0", "--top-p=0.9"], "--top-p and --top-k need a --temperature above 0"),
        (["--apply-chat-template-kwargs=[]"], "must be a JSON object, got []"),
        (['--engine-kwargs={"vllm": {"seed": 1}}'], "--engine-kwargs vllm seed: has an option of its own"),
        (["--engine-kwargs={vllm"], "--engine-kwargs: must be a JSON object (Expecting property name"),
        (["--apply-chat-template-kwargs=[]"], "--apply-chat-template-kwargs: must be a JSON object, got []"),
        (['--engine-kwargs={"vlllm": {}}'], "--engine-kwargs: the only engine is vllm, got arguments of vlllm"),
        (["--response-key=row"], "--response-key must not be finish_reason, row, sample, reward, rejected, which"),
        (["--response-key=finish_reason"], "beside the completion; got finish_reason"),
        (["--response-key=sample"], "beside the completion; got sample"),
        (["--response-key=reward"], "beside the completion; got reward"),
        (["--response-key=rejected"], "beside the completion; got rejected"),
        (["--turns=x"], "unrecognized arguments: --turns=x"),
    ],
)
def test_usage_errors(parsed, capsys, arguments, message):
    with pytest.raises(SystemExit):
        parsed(*arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "rows", "message"),
    [
        ([], [{"prompt": "a", "response": "b"}], "row 1: already has the column 'response', .* --response-key sets"),
        (["--response-key=r"], [{"prompt": "a"}, {"prompt": "a", "row": 1}], "row 2: already has the column 'row'"),
        ([], [{"prompt": "a"}, {"prompt": "b" * 60}], r"row 2: the prompt has 61 tokens, but --max-tokens 16 leaves "
            r"prompts 48 tokens \(max_position_embeddings\); .* skip 1 of 2 rows"),
        (["--prompt-key=q"], [{"prompt": "a"}], r"no column 'q' \(--prompt-key\)"),
        (["--reward=gsm8k", "--answer-key=b"], [{"prompt": "a"}], r"no column 'b' \(--answer-key=b\)"),
        (["--reward=gsm8k", "--answer-key=b"], [{"prompt": "a", "b": ""}], r"'b' \(--answer-key\): must be a text"),
        (["--reward=by_data_source", "--answer-key=answer"], [{"prompt": "a", "answer": "4"}], "no function"),
        (["--reward=mine.py:f"], [{"prompt": "a"}], "must be an existing Python file"),
        (["--reward=by_data_source", "--answer-key=b", "--reward-fn-key=of"], [{"prompt": "a", "b": "4", "of": "x"}],
            r"^FILE: '[^']*', row 1, column 'of' \(--reward-fn-key\): --reward=by_data_source has no function for 'x'"),
        (["--reward=gsm8k", "--answer-key=b"], [{"prompt": "a", "b": "4"}, {"prompt": "c", "b": "none"}],
            "^FILE: '[^']*', row 2: the gsm8k reward needs a number in every answer; got 'none'"),
        (["--tp-size=3"], None, r"^--tp-size: must divide the model's 2 attention heads \(.*\); got 3"),
    ],
)
def test_bad_input_is_refused_before_the_model_loads(parsed, monkeypatch, arguments, rows, message):
    monkeypatch.setattr(generate, "load_engine", None)
    with pytest.raises(HybridGKDError, match=message):
        generate.generate(parsed(*arguments, rows=rows))


def test_a_reward_of_a_whole_rollout_is_refused(parsed, tmp_path, monkeypatch):
    """Completions are judged as they end, so that its lists would depend on time."""
    monkeypatch.setattr(generate, "load_engine", None)
    text = "def f(solution_strs, ground_truths): return [0.0] * len(solution_strs)\n"
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^--reward: must score one completion at a time"):
        generate.generate(parsed(f"--reward={tmp_path}/mine.py:f", "--answer-key=a", rows=[{"prompt": "a", "a": "4"}]))


def test_a_reward_with_other_parameters_is_refused_by_the_option(parsed, tmp_path):
    (tmp_path / "mine.py").write_text("def f(a, b, c): return 0.0\n", encoding="utf-8")
    rule = r"^--reward: .*mine.py:f must take .*; further parameters need a default; got '\(a, b, c\)'$"
    with pytest.raises(ConfigError, match=rule):
        generate.generate(parsed(f"--reward={tmp_path}/mine.py:f"))


@pytest.mark.parametrize(
    ("file", "out", "written"),
    [
        ("set/train.json", "set/train", "set/train.json"),
        ("set/train.json", "set/train.json", "set/train.json"),
        ("set/*.json", "set/train", "set/train.json"),
        ("set", "set/more/answers.jsonl", "set/more/answers.jsonl"),
        ("set/train.json", "link", "link.json"),
    ],
)
def test_a_file_of_prompts_is_not_overwritten(model, tmp_path, monkeypatch, file, out, written):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set").mkdir()
    (prompts := tmp_path / "set" / "train.json").write_text('{"prompt": "2 + 2"}\n', encoding="utf-8")
    (tmp_path / "link.json").symlink_to("set/train.json")
    with pytest.raises(ConfigError, match=rf"^--out: must not be .*: {written} belongs to FILE 'set.*'; got '{out}'"):
        generate.generate(generate.parse([file, f"--ckpt-path={model}", f"--out={out}", "--max-tokens=16"]))
    assert [*(tmp_path / "set").iterdir()] == [prompts]
    assert prompts.read_text(encoding="utf-8") == '{"prompt": "2 + 2"}\n'


def test_written_rows_of_parquet_give_the_same_prompts(model, tmp_path, monkeypatch):
    """Arrow has null for the fields of other rows, which a chat template would show."""

    def row(**fields):
        user, call = {"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [fields]}
        return {"prompt": [user, call, user], "hint": [user, call, user], "tools": [fields], "extra_info": fields}

    datasets.Dataset.from_list([row(a=1), row(b=2)]).to_parquet(file := tmp_path / "rows.parquet")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[1].tool_calls | tojson }}{{ tools | tojson }}"
    monkeypatch.setattr(generate, "load_tokenizer", lambda *_: tokenizer)
    options = generate.parse([str(file), f"--ckpt-path={model}", f"--out={tmp_path}/answers.jsonl", "--max-tokens=16"])
    inputs = generate.read_inputs(options)
    answers = CompletionFile(tmp_path / "answers.jsonl", ARGUMENTS)
    recorder = generate.Recorder(options, inputs, answers, None)
    for request in generate.missing_requests(options, inputs.tasks, set()):
        sample = generated_sample(request, np.array([5], np.int32), version=0, status="stop", logprobs=None)
        recorder.record([(inputs.tasks[request.id.row], sample)])
    answers.close()

    def prompts(path):
        tables = read_rows([str(path)], Columns(teacher_prompt_key="hint", extra_info=True), key="FILE")
        tasks = make_prompts(
            tables, key="FILE", tokenizer=tokenizer, max_prompt_length=64, truncation="error",
            filter_overlong_prompts=False, apply_chat_template_kwargs={},
        )  # fmt: skip
        return [(task.token_ids.tolist(), task.teacher_ids.tolist(), task.extra_info) for task in tasks]

    assert prompts(answers.path) == prompts(file)
    assert [task.token_ids.tolist() for task in inputs.tasks] == [ids for ids, _, _ in prompts(file)]
    assert prompts(file)[0][2] == {"a": 1, "b": None}


def test_all_columns_are_kept_and_long_rows_left_out_on_demand(parsed):
    rows = [{"prompt": "b" * 60, "n": 1}, {"prompt": "a", "n": {"x": [None, 2.5]}}]
    options = parsed("--filter-overlong-prompts", "-n", "2", rows=rows)
    inputs = generate.read_inputs(options)
    assert inputs.rows == rows
    assert [task.row for task in inputs.tasks] == [2]
    requests = generate.missing_requests(options, inputs.tasks, {(2, 0)})
    assert [(request.id.row, request.id.number) for request in requests] == [(1, 1)]


def test_rows_and_weights_are_among_the_arguments(parsed, model):
    def arguments(**row):
        options = parsed(rows=[{"prompt": "a"} | row])
        return generate.stored_arguments(options, generate.read_inputs(options))

    first = arguments()
    for row in ({"prompt": "b"}, {"data_source": "gsm8k"}, {"extra_info": {"level": 2}}, {"id": 1}):
        other = arguments(**row)
        assert {name for name in first if first[name] != other[name]} == {"rows and prompts of FILE (checksum)"}
    (model / "pytorch_model.bin").write_bytes(b"weights")
    changed = arguments()
    (model / "pytorch_model.bin").unlink()
    assert {name for name in first if first[name] != changed[name]} == {"weights in --ckpt-path (hash)"}
    assert not {"--out", "--tp-size", "--gpu-memory-utilization", "--device"} & first.keys()


@pytest.mark.parametrize("by_module", [False, True])
def test_a_changed_file_of_the_reward_is_refused_by_name(parsed, tmp_path, monkeypatch, by_module):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(generate, "missing_requests", lambda *_: [])
    options = parsed(f"--reward={'mine_of_generate' if by_module else f'{tmp_path}/mine_of_generate.py'}:f",
        "--answer-key=a", rows=[{"prompt": "a", "a": "4"}])  # fmt: skip
    code = tmp_path / "mine_of_generate.py"
    code.write_text("def f(response, answer): return 0.0\n", encoding="utf-8")
    assert generate.generate(options) == 0
    (tmp_path / "answers.jsonl").write_text(json.dumps(line(1, 0)) + "\n", encoding="utf-8")
    assert generate.generate(options) == 0
    code.write_text("def f(response, answer): return 1.0\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"was made with file of --reward \(checksum\) '\w{8}', not '\w{8}'"):
        generate.generate(options)


def test_seeds_depend_on_row_and_number_alone(parsed):
    rows = [{"prompt": str(number)} for number in range(3)]
    options = parsed("-n", "2", rows=rows)
    inputs = generate.read_inputs(options)
    seeds = {request.id: request.seed for request in generate.missing_requests(options, inputs.tasks, set())}
    assert len(set(seeds.values())) == 6
    left = generate.missing_requests(options, inputs.tasks[1:], {(2, 0)})
    assert {request.id: request.seed for request in left}.items() <= seeds.items()

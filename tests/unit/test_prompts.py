import json
import logging
import time

import datasets
import numpy as np
import pytest

from hybrid_gkd.data.prompts import load_prompts
from hybrid_gkd.demo import make_tokenizer
from hybrid_gkd.errors import ConfigError, DataError

TOKENIZER = make_tokenizer()  # a token per byte; the chat template adds three tokens to a user message


def load(*files, **changes):
    arguments = {
        "key": "data.train_files",
        "prompt_key": "prompt",
        "answer_key": None,
        "tokenizer": TOKENIZER,
        "max_prompt_length": 64,
        "truncation": "error",
        "filter_overlong_prompts": False,
        "apply_chat_template_kwargs": {},
    }
    return load_prompts([str(file) for file in files], **(arguments | changes))


@pytest.fixture
def write(tmp_path):
    def write(text, name="rows.jsonl"):
        if not isinstance(text, str):
            text = "".join(json.dumps(row) + "\n" for row in text)
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write


def decode(prompt):
    return TOKENIZER.decode(prompt.token_ids)


def test_strings_become_one_user_message_with_answers_as_text(write):
    file = write([{"prompt": "1+1", "answer": 2}, {"prompt": "äö €", "answer": 7}])
    prompts = load(file, answer_key="answer")
    assert [decode(p) for p in prompts] == ["<|user|>1+1<|end|><|assistant|>", "<|user|>äö €<|end|><|assistant|>"]
    assert [(p.index, p.text, p.answer) for p in prompts] == [(0, "1+1", "2"), (1, "äö €", "7")]
    assert prompts[0].token_ids.dtype == np.int32


def test_messages_and_a_nested_answer_in_parquet(tmp_path):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    row = {"prompt": messages, "reward_model": {"style": "rule", "ground_truth": "42"}}
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "rows.parquet")
    [prompt] = load(tmp_path / "rows.parquet", answer_key="reward_model.ground_truth")
    assert decode(prompt) == "<|system|>be brief<|end|><|user|>hi<|end|><|assistant|>"
    assert (prompt.text, prompt.answer) == ("hi", "42")
    with pytest.raises(DataError, match=r"row 1, answer 'reward_model.truth'.*no field 'truth'"):
        load(tmp_path / "rows.parquet", answer_key="reward_model.truth")


@pytest.mark.parametrize(("name", "text"), [("a.json", '[{"prompt": "x"}]'), ("a.csv", "prompt\nx\n")])
def test_json_array_and_csv(write, name, text):
    assert [p.text for p in load(write(text, name))] == ["x"]


def test_csv_fields_stay_text(write):
    prompts = load(write('prompt,answer\n007,"1,5"\nNA,\n', "a.csv"), answer_key="answer")
    assert [(p.text, p.answer) for p in prompts] == [("007", "1,5"), ("NA", "")]


def test_several_files_are_numbered_through(write):
    prompts = load(write([{"prompt": "a"}], "a.jsonl"), write([{"prompt": "b"}], "b.jsonl"))
    assert [(p.index, p.text) for p in prompts] == [(0, "a"), (1, "b")]


def test_template_arguments_and_a_tokenizer_without_a_template(write):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ shout | upper if shout else 'no' }}"
    [prompt] = load(write([{"prompt": "x"}]), tokenizer=tokenizer, apply_chat_template_kwargs={"shout": "hey"})
    assert decode(prompt) == "HEY"
    tokenizer.chat_template = None
    [prompt] = load(write([{"prompt": "plain"}]), tokenizer=tokenizer)
    assert decode(prompt) == "plain"
    tokenizer.chat_template = "{{ raise_exception('only pairs') }}"
    with pytest.raises(DataError, match=r"row 1: the chat template refuses it: only pairs"):
        load(write([{"prompt": "x"}]), tokenizer=tokenizer)


@pytest.mark.parametrize("file", ["missing.jsonl", "a/b.parquet", "/no/such/file", "./org/name", "~/x/y", "x.jsonl.gz"])
def test_a_missing_file_is_an_error_at_once_and_before_others_are_read(file):
    started = time.monotonic()
    with pytest.raises(DataError) as caught:
        load("some-org/some-data-set-on-the-hub", file)
    assert str(caught.value) == f"data.train_files: file not found: {file!r}"
    assert time.monotonic() - started < 1


@pytest.mark.parametrize("file", ["gsm8k", "a b/c", "a/b/c", "org/name:config:split:more"])
def test_what_is_neither_file_nor_hub_name_is_refused(file):
    with pytest.raises(DataError, match=r"data\.train_files: .*org/name\[:config\]\[:split\]"):
        load(file)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("org/name", ("org/name", None, "train")),
        ("org/name:main", ("org/name", "main", "train")),
        ("org/name:main:test[:10]", None),
        ("org/name:main:test", ("org/name", "main", "test")),
        ("org/name::test", ("org/name", None, "test")),
    ],
)
def test_hub_names(monkeypatch, file, expected):
    calls = []

    def load_dataset(name, config, split):
        calls.append((name, config, split))
        return datasets.Dataset.from_list([{"prompt": "x"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    if expected is None:
        with pytest.raises(DataError, match="hub data set"):
            load(file)
    else:
        assert len(load(file)) == 1
        assert calls == [expected]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        (" \n\n", "the file is empty"),
        ('{"question": "x", "level": 1}\n', r"no column 'prompt' \(data.prompt_key\).*question, level"),
        ('{"prompt": "x"}\n{"prompt": " "}\n', r"row 2, column 'prompt': the prompt is empty; got ' '"),
        ('{"prompt": "x"}\n{"prompt": null}\n', r"row 2, column 'prompt': must be a text.*got None"),
        ('{"prompt": 7}\n', r"row 1.*must be a text or a list of chat messages; got 7"),
        ('{"prompt": []}\n', r"row 1.*must be a text or a list of chat messages; got \[\]"),
        ('{"prompt": [{"role": "user"}]}\n', r"row 1.*'role' and 'content'; got \{'role': 'user'\}"),
        ('{"prompt": "x"}\n{"prompt": "y"\n', r"cannot be read: row 2 is not a JSON object; got '\{\"prompt\": \"y\"'"),
        ('{"prompt": "x"}\n[1]\n', r"cannot be read: row 2 is not a JSON object; got '\[1\]'"),
    ],
)
def test_bad_files_are_named_with_key_file_and_row(write, text, message):
    with pytest.raises(DataError, match=r"data\.train_files: '.*rows\.jsonl'.*" + message):
        load(write(text))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "[]", "holds no rows"),
        ("a.csv", "prompt,answer\n", "holds no rows"),
        ("a.parquet", "nonsense", "cannot be read"),
        ("a.txt", "x", r"must end in one of \.jsonl"),
    ],
)
def test_other_formats_are_checked_too(write, name, text, message):
    with pytest.raises(DataError, match=r"data\.train_files.*" + message):
        load(write(text, name))


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(DataError, match="must be a file, not a folder"):
        load(tmp_path)


def test_an_answer_column_must_exist_only_if_it_was_asked_for(write):
    file = write([{"prompt": "x", "solution": "1"}])
    assert load(file)[0].answer is None
    with pytest.raises(DataError, match=r"no column 'answer' \(reward.answer_key=answer\).*prompt, solution"):
        load(file, answer_key="answer")
    with pytest.raises(DataError, match=r"row 2, answer 'a'.*got None"):
        load(write([{"prompt": "x", "a": "1"}, {"prompt": "x", "a": None}]), answer_key="a")


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [("left", "cdef<|end|><|assistant|>"), ("right", "<|user|>abcde"), ("middle", "<|user|>abf<|end|><|assistant|>")],
)
def test_truncation_cuts_where_it_says(write, truncation, expected):
    [prompt] = load(write([{"prompt": "abcdef"}]), truncation=truncation, max_prompt_length=6)
    assert decode(prompt) == expected
    assert prompt.text == "abcdef"


@pytest.mark.parametrize("limit", [1, 2, 5])
@pytest.mark.parametrize("truncation", ["left", "right", "middle"])
def test_truncation_keeps_exactly_the_limit(write, truncation, limit):
    [prompt] = load(write([{"prompt": "abcdef"}]), truncation=truncation, max_prompt_length=limit)
    assert len(prompt.token_ids) == limit


def test_a_long_prompt_is_an_error_that_names_the_ways_out(write):
    file = write([{"prompt": "abc"}, {"prompt": "abcd"}])
    assert len(load(file, max_prompt_length=7)) == 2
    with pytest.raises(DataError) as caught:
        load(file, max_prompt_length=6)
    message = str(caught.value)
    for part in ("rows.jsonl", "row 2", "7 tokens", "data.max_prompt_length=6", "data.truncation",
                 "data.filter_overlong_prompts"):  # fmt: skip
        assert part in message
    with pytest.raises(ConfigError, match=r"data\.truncation"):
        load(file, truncation="top")


def test_filtering_leaves_long_rows_out_and_says_how_many(write, caplog):
    file = write([{"prompt": "abc"}, {"prompt": "abcdefg"}, {"prompt": "de"}])
    with caplog.at_level(logging.INFO):
        prompts = load(file, max_prompt_length=6, filter_overlong_prompts=True)
    assert [(p.index, p.text) for p in prompts] == [(0, "abc"), (2, "de")]
    assert "left out 1 of 3" in caplog.text
    with pytest.raises(DataError, match=r"all 3 prompts are longer than data.max_prompt_length=2"):
        load(file, max_prompt_length=2, filter_overlong_prompts=True)


def test_reading_is_quiet_and_leaves_nothing_behind(write, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    file = write([{"prompt": "x"}])
    before = sorted(tmp_path.iterdir())
    load(file)
    with pytest.raises(DataError):
        load(write("{", "rows.jsonl"))
    assert sorted(tmp_path.iterdir()) == before
    assert capfd.readouterr() == ("", "")
    assert not datasets.are_progress_bars_disabled()

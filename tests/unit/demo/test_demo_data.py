import json
import stat
from dataclasses import replace

import pytest
from transformers import AutoTokenizer, Qwen2Config

from hybrid_gkd.config.loading import load_config
from hybrid_gkd.demo import __main__ as command
from hybrid_gkd.demo import sorting as demo
from hybrid_gkd.demo.folders import build_once
from hybrid_gkd.demo.use import used_demos
from hybrid_gkd.errors import ConfigError

SMALL = demo.DemoRecipe(num_train=300, num_val=50)


def test_held_out_prompts_are_never_trained_on_and_answers_are_right():
    train, val = demo.make_data(SMALL, seed=0)
    assert (len(train), len(val)) == (300, 50)
    assert len({row["prompt"] for row in train + val}) == 350
    for row in train + val:
        assert len(row["prompt"]) == SMALL.num_digits
        assert row["answer"] == "".join(sorted(row["prompt"]))


def test_the_data_depends_on_the_seed_alone():
    assert demo.make_data(SMALL, seed=3) == demo.make_data(SMALL, seed=3)
    assert demo.make_data(SMALL, seed=3) != demo.make_data(SMALL, seed=4)


@pytest.mark.parametrize("text", ["123", "naïve €5 日本 🙂", " a  b\n\tc ", "\x00\x7f", "<|user", ""])
def test_the_tokenizer_covers_any_text_also_after_loading(text, tmp_path):
    tokenizer = demo.make_byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    Qwen2Config().save_pretrained(tmp_path)  # AutoTokenizer goes by the model type
    for some in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert len(some) == 261
        ids = some(text, add_special_tokens=False).input_ids
        assert len(ids) == len(text.encode())
        assert some.decode(ids) == text


def test_chat_template_and_special_tokens():
    tokenizer = demo.make_byte_tokenizer()
    assert tokenizer.decode([tokenizer.eos_token_id, tokenizer.pad_token_id]) == "<|end|><|endoftext|>"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "42"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|system|>s<|end|><|user|>42<|end|><|assistant|>"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) == 8
    assert tokenizer.decode(ids, skip_special_tokens=True) == "s42"
    whole = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": "24"}], tokenize=False)
    assert whole == text + "24<|end|>"


def test_labels_are_the_response_and_its_end():
    tokenizer = demo.make_byte_tokenizer()
    ids, labels = demo.encode_labels([{"prompt": "21", "answer": "12"}, {"prompt": "3", "answer": "3"}], tokenizer)
    assert ids.shape == labels.shape == (2, 8)
    assert tokenizer.decode(labels[0][labels[0] >= 0]) == "12<|end|>"
    assert tokenizer.decode(labels[1][labels[1] >= 0]) == "3<|end|>"
    for row in range(2):  # a label is the next token
        where = (labels[row] >= 0).nonzero().flatten()
        assert (labels[row][where] == ids[row][where + 1]).all()


def test_the_folder_is_named_by_recipe_and_seed(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    default = demo.demo_dir()
    assert default.parent == tmp_path / "hybrid_gkd"
    assert default == demo.demo_dir(0, demo.DemoRecipe())
    assert len({default, demo.demo_dir(1), demo.demo_dir(0, replace(SMALL, version=2)), demo.demo_dir(0, SMALL)}) == 4


def test_the_weak_teacher_has_the_data_and_the_student_of_the_demo(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert replace(demo.WEAK_TEACHER, teacher=demo.DemoRecipe().teacher) == demo.DemoRecipe()
    config = load_config(config_name="weak_teacher")
    root = demo.demo_dir(recipe=demo.WEAK_TEACHER)
    assert list(used_demos(config)) == [root]
    assert config.actor_rollout_ref.teacher.model.path == str(root / "teacher")


def test_others_can_read_a_demo_whatever_wrote_its_files(tmp_path):
    def fill(paths):
        for path in (paths.teacher / "model.safetensors", paths.student / "config.json", paths.train, paths.val):
            path.parent.mkdir(exist_ok=True)
            path.touch(mode=0o600)
        paths.manifest.write_text(json.dumps({"key": "k"}), encoding="utf-8")

    root = build_once(tmp_path / "demo", "k", fill).root
    found = {path.is_dir(): set[int]() for path in [root, *root.rglob("*")]}
    for path in [root, *root.rglob("*")]:
        found[path.is_dir()].add(stat.S_IMODE(path.stat().st_mode))
    assert found == {True: {0o755}, False: {0o644}}


def test_a_folder_that_is_no_demo_is_refused_and_left_alone(tmp_path):
    (tmp_path / "demo.json").write_text(json.dumps({"mine": 1}), encoding="utf-8")
    for force in (False, True):
        with pytest.raises(ConfigError, match=r"--out.*or a demo"):
            demo.build_demo(tmp_path, force=force)
    assert [file.name for file in tmp_path.iterdir()] == ["demo.json"]


def test_a_demo_that_cannot_be_built_has_an_error_in_one_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["demo", "--out", str(tmp_path / "file" / "demo")])
    assert command.main() == 1
    assert str(tmp_path / "file") in (error := capsys.readouterr().err)
    assert error.startswith("error: ")
    monkeypatch.setattr("sys.argv", ["demo", "--seed=-1"])
    with pytest.raises(SystemExit):
        command.main()
    assert "--seed must not be negative, got -1" in capsys.readouterr().err

"""A very small demo is built for real; the full one takes about half a minute and differs in numbers only."""

import json
import threading
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybrid_gkd.demo import folders
from hybrid_gkd.demo import sorting as demo
from hybrid_gkd.errors import ConfigError

TINY_MODEL = demo.SortingModelRecipe(
    hidden_size=32, num_layers=1, max_steps=10, learning_rate=1e-3, stop_at_accuracy=0.5, init_seed=1
)
TINY = demo.DemoRecipe(
    num_digits=2, num_train=60, num_val=8, batch_size=8, teacher=TINY_MODEL, student=replace(TINY_MODEL, init_seed=2)
)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return demo.build_demo(tmp_path_factory.mktemp("demo") / "built", recipe=TINY)


def test_both_folders_load_and_answer(paths):
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (paths.teacher, paths.student)]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    for folder, tokenizer in zip((paths.teacher, paths.student), tokenizers, strict=True):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.config.architectures == ["Qwen2ForCausalLM"]
        assert model.config.vocab_size == len(tokenizer)
        assert model.config.max_position_embeddings == 4096
        assert model.config.hidden_size // model.config.num_attention_heads in (32, 64)
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": "21"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        assert model.generate(**ids, max_new_tokens=4).shape[1] > ids.input_ids.shape[1]


def test_the_manifest_holds_what_was_measured(paths):
    manifest = json.loads(paths.manifest.read_text(encoding="utf-8"))
    assert manifest["seed"] == 0
    assert manifest["versions"]["torch"] == torch.__version__
    assert 0 <= manifest["student"]["held_out_accuracy"] <= 1
    assert 0 <= manifest["teacher"]["held_out_accuracy"] <= 1
    assert len(paths.train.read_text(encoding="utf-8").splitlines()) == manifest["num_train"] == 60
    assert len(paths.val.read_text(encoding="utf-8").splitlines()) == manifest["num_val"] == 8


def test_a_second_build_gives_the_same_weights(paths, tmp_path):
    again = demo.build_demo(tmp_path / "again", recipe=TINY)
    for folder in ("teacher", "student"):
        one, two = (p.root / folder / "model.safetensors" for p in (paths, again))
        assert one.read_bytes() == two.read_bytes()


def test_a_built_demo_is_kept_and_a_damaged_one_is_built_again(tmp_path):
    root = tmp_path / "demo"
    paths = demo.build_demo(root, recipe=TINY)
    inode = root.stat().st_ino
    demo.build_demo(root, recipe=TINY)
    assert root.stat().st_ino == inode
    paths.val.unlink()
    demo.build_demo(root, recipe=TINY)
    assert paths.val.exists()
    with pytest.raises(ConfigError, match="another seed or recipe"):
        demo.build_demo(root, seed=1, recipe=TINY)
    demo.build_demo(root, seed=1, recipe=TINY, force=True)
    assert json.loads(paths.manifest.read_text(encoding="utf-8"))["seed"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["demo"]  # no temporary folder is left


def test_an_interrupted_build_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "greedy_accuracy", interrupt)
    with pytest.raises(KeyboardInterrupt):
        demo.build_demo(tmp_path / "demo", recipe=TINY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("force", [False, True])
def test_of_two_builds_that_finish_together_one_is_kept(tmp_path, monkeypatch, force):
    root = tmp_path / "demo"
    if force:
        demo.build_demo(root, recipe=TINY)
    together, move, errors = threading.Barrier(2, timeout=60), folders.move_into_place, []

    def move_together(*args):
        together.wait()
        move(*args)

    def build():
        try:
            demo.build_demo(root, recipe=TINY, force=force)
        except BaseException as error:
            errors.append(error)

    monkeypatch.setattr(folders, "move_into_place", move_together)
    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []
    assert folders.is_complete(root, folders.recipe_key(TINY, 0))
    assert [file.name for file in tmp_path.iterdir()] == ["demo"]

"""The models of the recipe gpu_demo, made on a GPU."""

from dataclasses import replace

import pytest
import torch

from hybrid_gkd.demo.gpu_demo import RECIPES, build_gpu_demo

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_the_same_seed_gives_the_same_models(tmp_path):
    def shortened(model, steps):
        return replace(model, training=replace(model.training, max_steps=steps))

    recipe = RECIPES["cuda"]
    recipe = replace(
        recipe, num_train=64, num_val=32, teacher=shortened(recipe.teacher, 40), student=shortened(recipe.student, 40)
    )
    first, second = (build_gpu_demo("cuda", tmp_path / str(i), recipe=recipe) for i in range(2))
    for name in ("teacher", "student"):
        assert (getattr(first, name) / "model.safetensors").read_bytes() == (
            getattr(second, name) / "model.safetensors"
        ).read_bytes()

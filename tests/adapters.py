"""LoRA adapters of tiny models, as folders of peft's, and the same weights merged into whole models."""

import torch

from hybrid_gkd.testing import make_tiny_model

SETTINGS = {
    "a": {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.1},
    "b": {"r": 17, "lora_alpha": 9, "target_modules": ["v_proj", "o_proj", "gate_proj"], "use_rslora": True},
}  # fmt: skip
"""Different layers, ranks and scales."""


def make_adapter(model, folder, *, seed, merged=None, **settings):
    """Write an adapter with random A and B to `folder`, and the merged model with its tokenizer to `merged`."""
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), peft.LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn(weight.shape, generator=generator) * 0.1
    adapted.save_pretrained(folder)
    if merged is not None:
        adapted.merge_and_unload().save_pretrained(merged)
        AutoTokenizer.from_pretrained(model).save_pretrained(merged)
    return folder


def make_adapters(folder):
    """Write `base`, and for each of SETTINGS the adapter `<name>` and the model `<name>-merged`; return the folder."""
    make_tiny_model(folder / "base", seed=1)
    for seed, (name, settings) in enumerate(SETTINGS.items()):
        make_adapter(folder / "base", folder / name, seed=seed, merged=folder / f"{name}-merged", **settings)
    return folder

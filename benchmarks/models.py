"""Model folders with random weights in the shapes of Qwen2.5 (135m: of SmolLM2), and random teacher scores.

    python benchmarks/models.py FOLDER --shape 7b         a folder for benchmarks/teacher.py --model
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from hybrid_gkd.testing import make_tokenizer
from hybrid_gkd.types import TopK

SHAPES = {
    # name: hidden, intermediate, layers, heads, kv heads, vocabulary, tied embeddings
    "tiny": (64, 128, 2, 2, 1, 9001, True),
    "narrow": (64, 128, 30, 2, 1, 9001, True),
    "135m": (576, 1536, 30, 9, 3, 49152, True),
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
}
NUM_UNUSED_ROWS = 271
"""Rows of the embedding matrix that stand for no token, as in Qwen2.5."""


def full_tokenizer(shape: str) -> PreTrainedTokenizerFast:
    """A tokenizer that fills the vocabulary of a model of this shape; the same for 0.5b, 1.5b and 7b."""
    rows = min(SHAPES[shape][5], SHAPES["1.5b"][5])
    return make_tokenizer(num_words=rows - NUM_UNUSED_ROWS - len(make_tokenizer()))


def empty_model(shape: str) -> Qwen2ForCausalLM:
    """The shape without memory for its weights."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = SHAPES[shape]
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=4096,
        tie_word_embeddings=tied, rope_theta=1e6, dtype="bfloat16", eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None, architectures=["Qwen2ForCausalLM"],
    )
    with init_empty_weights():
        model = Qwen2ForCausalLM(config)
    model.tie_weights()  # init_empty_weights makes two parameters of a tied one
    return model


def make_model(folder: Path, shape: str, tokenizer: PreTrainedTokenizerFast | None = None, *, seed: int = 0) -> Path:
    """A folder of random bf16 weights."""
    model = empty_model(shape)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for name, parameter in model.named_parameters():
        values = torch.ones(parameter.shape, device=device)
        if parameter.ndim > 1 or name.endswith("bias"):
            values.normal_(0, 0.02, generator=generator)
        weights[name] = values.to(torch.bfloat16).cpu()
    folder.mkdir(parents=True)
    model.config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    if device == "cuda":
        torch.cuda.empty_cache()
    return folder


def random_scores(rng: np.random.Generator, count: int, vocabulary: int, topk: int) -> TopK:
    """Valid scores; ids are consecutive, which costs the loss what any others do."""
    first = rng.integers(0, vocabulary - topk, count)
    ids = (first[:, None] + np.arange(topk)).astype(np.int32)
    logprobs = np.full((count, topk), np.log(0.9 / topk), np.float32)
    tail = np.full(count, np.log(0.1), np.float32)
    return TopK(ids=ids, logprobs=logprobs, tail_logprobs=tail, sampled_logprobs=logprobs[:, 0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    args = parser.parse_args()
    make_model(args.folder, args.shape, full_tokenizer(args.shape))

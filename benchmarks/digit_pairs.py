"""The sorting demo with a student whose BPE merges pairs of digits, for a teacher whose tokens are bytes.

    python benchmarks/digit_pairs.py FOLDER --pairs 30

Writes a folder like the demo's, for `--models` of results_trl.py; benchmarks/log/other_tokenizers.md has the runs.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as kinds
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hybrid_gkd.demo import models, sorting
from hybrid_gkd.demo.models import CHAT_TEMPLATE, END, PAD


def make_tokenizer(number: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and some pairs of digits; the demo's class would split all digits."""
    pairs = [divmod(int(each), 10) for each in np.random.default_rng(0).permutation(100)[:number]]
    merges = [(str(first), str(second)) for first, second in pairs]
    texts = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(first + second for first, second in merges)]
    plain = Tokenizer(kinds.BPE(vocab={text: place for place, text in enumerate(texts)}, merges=merges))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token=END, pad_token=PAD, model_max_length=4096, clean_up_tokenization_spaces=False,
        extra_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
    )  # fmt: skip
    found.chat_template = CHAT_TEMPLATE
    return found


def make_model(shape: models.Shape, tokenizer: Any, seed: int) -> LlamaForCausalLM:
    """Return a Llama of the shape: a folder of a Qwen2 model is loaded with Qwen2's tokenizer."""
    num_heads = shape.hidden_size // shape.head_dim
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers, num_attention_heads=num_heads, num_key_value_heads=num_heads,
        max_position_embeddings=shape.max_length, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(1000 * seed + shape.init_seed)
    return LlamaForCausalLM(config).float()


def main() -> None:
    """Build the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", type=int, default=30)
    args = parser.parse_args()
    shutil.copytree(sorting.build_demo().root, args.folder)
    tokenizer, recipe, student = make_tokenizer(args.pairs), sorting.DemoRecipe(), args.folder / "student"
    train, val = sorting.make_data(recipe, 0)
    models.make_model = make_model
    model, steps = sorting._train("student", recipe.student, recipe.batch_size, train, tokenizer, 0)
    shutil.rmtree(student)
    model.save_pretrained(student)
    tokenizer.save_pretrained(student)
    print(f"{steps} steps, accuracy {sorting.greedy_accuracy(model, tokenizer, val):.3f}")


if __name__ == "__main__":
    main()

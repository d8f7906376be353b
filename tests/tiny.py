"""Tiny Hugging Face folders for tests: random weights, byte-level tokenizer, real files."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
)


def make_tokenizer(extra_tokens: tuple[str, ...] = (), num_words: int = 0) -> PreTrainedTokenizerFast:
    """256 bytes, `num_words` tokens that no text gives, three special tokens, no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) + [f"word {i}" for i in range(num_words)]
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|a|>", *extra_tokens]})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(
    folder: Path, *, seed: int = 0, hidden: int = 64, layers: int = 2, tied: bool = True, std: float = 0.2,
    extra_tokens: tuple[str, ...] = (), num_words: int = 0, vocab_size: int | None = None,
) -> Path:
    """A random Qwen2 with head dimension 32, the smallest that vLLM runs on the CPU.

    `vocab_size`: rows of its embeddings; None: as many as the tokenizer has tokens.
    """
    tokenizer = make_tokenizer(extra_tokens, num_words)
    config = Qwen2Config(
        vocab_size=vocab_size or len(tokenizer), hidden_size=hidden, intermediate_size=2 * hidden,
        num_hidden_layers=layers, num_attention_heads=hidden // 32, num_key_value_heads=1, max_position_embeddings=2048,
        tie_word_embeddings=tied, initializer_range=std, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

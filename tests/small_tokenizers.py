"""Small tokenizers of three kinds, trained on a few lines."""

import functools
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers import models as kinds
from transformers import PreTrainedTokenizerFast

from hybrid_gkd.testing import make_tiny_model

TEXT = """def add(first, second):
    return first + second  # the sum of both
The teacher reads the theory of the other; they gather there, and the weather is rather interesting.
Interest rates were 12.5 % in 2019, 3,700 in 1984 and 007 before: 123 + 456 = 579.
Two Words: the QUICK brown fox jumps over a lazy dog. Wx Xy Yz Za.
Füße, naïve café, 東京 is 東の京, привет мир, 🙂 and 👩‍🔬.
"""
ALPHABET = pre_tokenizers.ByteLevel.alphabet()


@functools.cache
def byte_level(size=400, *, end="<|end|>", digits=1, added=()):
    """Return a byte-level BPE which splits numbers after `digits` digits."""
    tokenizer = Tokenizer(kinds.BPE())
    words = Regex(rf" ?\p{{L}}+|\p{{N}}{{1,{digits}}}| ?[^\s\p{{L}}\p{{N}}]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trained = trainers.BpeTrainer(vocab_size=size, initial_alphabet=sorted(ALPHABET), show_progress=False)
    return _trained(tokenizer, trained, end, added)


@functools.cache
def sentence_piece(size=400, *, end="</s>"):
    """Return a BPE of SentencePiece's kind: a space before the text, and bytes for unknown characters."""
    tokenizer = Tokenizer(kinds.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = trainers.BpeTrainer(
        vocab_size=size + 256, special_tokens=special, limit_alphabet=80, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT.replace(" ", "▁").splitlines(), trained)
    plain = Tokenizer(kinds.BPE(
        vocab=tokenizer.get_vocab(), merges=_merges(tokenizer), byte_fallback=True, fuse_unk=True, unk_token="<unk>"
    ))  # fmt: skip
    plain.normalizer, plain.decoder = tokenizer.normalizer, tokenizer.decoder
    return PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>", eos_token=end, pad_token="<pad>")


@functools.cache
def word_piece(size=400, *, lowercase=False):
    """Return a WordPiece, whose spaces are not tokens."""
    tokenizer = Tokenizer(kinds.WordPiece(unk_token="[UNK]"))
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    trained = trainers.WordPieceTrainer(vocab_size=size, special_tokens=["[UNK]"], show_progress=False)
    return _trained(tokenizer, trained, "[SEP]", (), unk_token="[UNK]")


def _trained(tokenizer, trainer, end, added, **more):
    tokenizer.train_from_iterator([TEXT], trainer)
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token="<pad>", **more)
    found.add_tokens(list(added))
    return found


def _merges(tokenizer):
    found = json.loads(tokenizer.to_str())["model"]["merges"]
    return [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in found]


def make_model_with(tokenizer, folder: Path, **options) -> Path:
    """Write a `make_tiny_model` with another tokenizer."""
    make_tiny_model(folder, vocab_size=max(300, len(tokenizer)), **options)
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text(encoding="utf-8")) | {
            "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        }  # fmt: skip
        (folder / name).write_text(json.dumps(values), encoding="utf-8")
    return folder

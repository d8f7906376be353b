"""Shape, tokenizer, chat template and greedy decoding of the demos' models. Imports torch on use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hybrid_gkd.demo.folders import Row

if TYPE_CHECKING:  # torch and transformers are imported where they are used: a cached demo needs neither
    from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

PAD, END = "<|endoftext|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size of a model, and the seed of its weights."""

    hidden_size: int
    num_layers: int
    head_dim: int
    """Size of a head: vLLM's attention supports 64, on CPUs also 32."""
    max_length: int
    """Longest sequence in tokens."""
    init_seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTRecipe:
    """Supervised fine-tuning on solutions."""

    max_steps: int
    """Maximum number of optimizer steps; a decreasing schedule ends with them."""
    batch_size: int
    """Samples per step."""
    learning_rate: float
    warmup_steps: int = 50
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    stop_at: float | None = None
    """Training ends when this fraction of held-out solutions has a probability above 0.5 at every token; None trains
    for `max_steps`. It is a lower bound of the greedy accuracy: at 0.15, a third of a small model's answers were
    right."""
    max_tokens: int = 32768
    """Maximum number of tokens of a packed micro-batch."""
    compile: bool = False
    """Use torch.compile for the decoder blocks, which pays off in trainings of minutes."""


def make_bpe_tokenizer(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Qwen2Tokenizer:
    """Return a byte-level BPE with the demos' special tokens and chat template; it encodes any text (in Unicode NFC).

    The class is Qwen2's own, because AutoTokenizer loads every folder of a Qwen2 model with it; a plain
    PreTrainedTokenizerFast would be loaded with one token more than the model has.
    """
    from transformers import Qwen2Tokenizer

    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=merges, eos_token=END, pad_token=PAD, unk_token=PAD, model_max_length=4096,
        extra_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"], clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(shape: Shape, tokenizer: Qwen2Tokenizer, seed: int, *, intermediate_size: int) -> Qwen2ForCausalLM:
    """Return a model with random float32 weights determined by shape and seed; torch's random state is unchanged."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    num_heads = shape.hidden_size // shape.head_dim
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=shape.hidden_size, intermediate_size=intermediate_size,
        num_hidden_layers=shape.num_layers, num_attention_heads=num_heads, num_key_value_heads=num_heads,
        max_position_embeddings=shape.max_length, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 * seed + shape.init_seed)
        return Qwen2ForCausalLM(config).float()


def prompt_text(prompt: str) -> str:
    """Return the text of CHAT_TEMPLATE for one question."""
    return f"<|user|>{prompt}{END}<|assistant|>"


def greedy_answers(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, rows: list[Row], *, limit: int, batch_size: int = 512
) -> list[str]:
    """Return the greedy completion of every row's prompt, of at most `limit` tokens, without special tokens."""
    import torch

    texts = list[str]()
    for start in range(0, len(rows), batch_size):
        prompts = [prompt_text(row["prompt"]) for row in rows[start : start + batch_size]]
        tokens = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt").to(model.device)
        with torch.inference_mode():
            output = model.generate(**tokens, max_new_tokens=limit, do_sample=False)
        texts += tokenizer.batch_decode(output[:, tokens.input_ids.shape[1] :], skip_special_tokens=True)
    return texts

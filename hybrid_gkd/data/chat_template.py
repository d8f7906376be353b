"""Render conversations with a chat template, a program by the model's author, and tokenize them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hybrid_gkd.data.tables import short
from hybrid_gkd.errors import DataError
from hybrid_gkd.models.tokenizer import encode_open
from hybrid_gkd.runtime.waiting import Timeout, interrupted_after

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Chat = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None
TOOLS = "tools"
"""Optional column with tools for the chat template."""
REMEDY = "set a tokenizer_path with one, or use texts"
TEMPLATE_SECONDS = 10.0
"""Timeout for one conversation."""
ADDED_CHARACTERS, CHARACTERS_FACTOR = 2**16, 8
"""A rendered conversation may have this many characters, and this many times those of its messages and tools."""
BATCH = 1024
"""Number of texts that are tokenized at once."""


def plain_text(chat: Chat, tools: Tools, who: str) -> str:
    """Return the text of a chat for a tokenizer without a chat template.

    Raises DataError unless it is one user message.
    """
    if [message["role"] for message in chat] != ["user"]:
        rule = f"which a conversation with roles needs ({REMEDY})"
        raise DataError(f"{who} has no chat template, {rule}; got {short(chat)}")
    if tools:
        raise DataError(f"{who} has no chat template, which tools need ({REMEDY}); got {short(tools)}")
    return str(chat[0]["content"])


def tokenize_chats(
    messages: list[Chat], tokenizer: PreTrainedTokenizerBase, options: dict[str, Any], where: str,
    templates: Sequence[str | None] | None = None, tools: list[Tools] | None = None,
    rows: Sequence[int] | None = None,
) -> list[list[int]]:  # fmt: skip
    """Return token ids of each conversation.

    Args:
        templates: replace the tokenizer's chat template where not None.
        rows: numbers of the conversations in messages; None: from 1 on.
    """
    number = len(messages)
    tools, templates, rows = tools or [None] * number, templates or [None] * number, rows or range(1, number + 1)
    plain, rendered = list[int](), list[int]()
    for place, template in enumerate(templates):
        (rendered if template or tokenizer.chat_template else plain).append(place)
    texts = [plain_text(messages[each], tools[each], f"{where}, row {rows[each]}: the tokenizer") for each in plain]
    found = dict(zip(plain, encode_open(tokenizer, texts) if texts else [], strict=True))
    for start in range(0, len(rendered), BATCH):
        batch, texts = rendered[start : start + BATCH], []
        for place in batch:
            own, at = tools[place], f"{where}, row {rows[place]}"
            render = renderer(tokenizer, options, at, templates[place])
            texts.append(render(messages[place], tools=own, add_generation_prompt=True))
            if own and not any(tools[:place]) and texts[-1] == render(messages[place], add_generation_prompt=True):
                logger.warning("%s: the chat template ignores the column %r", at, TOOLS)
        found |= zip(batch, tokenizer(texts, add_special_tokens=False).input_ids, strict=True)
    return [found[place] for place in range(number)]


def tokenize_chat(
    chat: Chat, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any], where: str, template: str | None = None,
    tools: Tools = None,
) -> list[int]:  # fmt: skip
    """Return token ids of one conversation, as `tokenize_chats` does."""
    if not template and not tokenizer.chat_template:
        return encode_open(tokenizer, [plain_text(chat, tools, f"{where}: the tokenizer")])[0]
    text = renderer(tokenizer, options, where, template)(chat, tools=tools, add_generation_prompt=True)
    found: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return found


def renderer(
    tokenizer: PreTrainedTokenizerBase, options: dict[str, Any], where: str, template: str | None = None
) -> Callable[..., str]:
    """Return a function that renders a conversation with a chat template.

    It raises DataError if the template rejects the conversation, takes longer than `TEMPLATE_SECONDS`, or makes too
    long a text.
    """
    named = f"the chat template of {tokenizer.name_or_path}"
    if template:
        named = "the chat_template of its teacher (actor_rollout_ref.teacher or distillation.teacher_models)"

    def late() -> DataError:
        return DataError(f"{where}: {named} did not render it within {Timeout(TEMPLATE_SECONDS)}")

    def render(conversation: Chat, *, tools: Tools = None, add_generation_prompt: bool = False) -> str:
        try:
            with interrupted_after(TEMPLATE_SECONDS, late):
                text: Any = tokenizer.apply_chat_template(
                    conversation, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt,
                    **options | ({"tools": tools} if tools else {}),
                )  # fmt: skip
        except DataError:
            raise
        # A template is a program by the model's author with its own errors, for example for the order of roles.
        except Exception as error:
            reason = f"the chat template rejects it: {error}; got {short(conversation)}"
            raise DataError(f"{where}: {reason}") from error
        given = len(str(conversation)) + len(str(tools))
        if len(text := str(text)) > ADDED_CHARACTERS + CHARACTERS_FACTOR * given:
            rule = f"the limit is {CHARACTERS_FACTOR} times as many and {ADDED_CHARACTERS}"
            raise DataError(f"{where}: {named} makes {len(text)} characters of {given}, {rule}")
        return text

    return render

"""Render conversations with a chat template, a program by the model's author, and tokenize them."""

from __future__ import annotations

import itertools
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
) -> list[list[int]]:
    """Return token ids of each conversation; `templates` replace the tokenizer's chat template where not None."""
    tools, templates = tools or [None] * len(messages), templates or [None] * len(messages)
    if not any(templates) and not tokenizer.chat_template:
        places = (f"{where}, row {row}: the tokenizer" for row in itertools.count(1))
        return encode_open(tokenizer, list(map(plain_text, messages, tools, places)))
    texts, ids = list[str](), list[list[int]]()
    for row, (conversation, own, template) in enumerate(zip(messages, tools, templates, strict=True), 1):
        render = renderer(tokenizer, options, f"{where}, row {row}", template)
        text = render(conversation, tools=own, add_generation_prompt=True)
        if own and not any(tools[: row - 1]) and text == render(conversation, add_generation_prompt=True):
            logger.warning("%s, row %d: the chat template ignores the column %r", where, row, TOOLS)
        texts.append(text)
        if len(texts) == BATCH or row == len(messages):
            ids += tokenizer(texts, add_special_tokens=False).input_ids
            texts.clear()
    return ids


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
    named = "actor_rollout_ref.teacher.chat_template" if template else f"the chat template of {tokenizer.name_or_path}"

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

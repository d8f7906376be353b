"""Given completions: read them from a column of a table, tokenize them, and select the trained tokens.

A completion is tokenized separately from its prompt, like one that the student generates for the same prompt ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid_gkd.data.tables import of_json, short
from hybrid_gkd.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Chat = list[dict[str, Any]]
FINISH_REASON, CUT = "finish_reason", "length"
"""A column, and its value for completions that reached a limit, as servers of the OpenAI API write them."""
Span = tuple[int, int]
"""First character and end of a range of characters."""
CONTENTS = ("content", "reasoning_content", "tool_calls")
"""Fields of a message, of which a completion must have one that is not empty."""
Render = Callable[..., str]
"""A conversation -> its text; `add_generation_prompt=True` appends the template's beginning of a completion."""
MARK = "<<mark>>"
"""Text in place of a field whose place in a rendered conversation is searched."""
ANSWER, ASSISTANT, ALL = "answer", "assistant", "all"
"""Values of data.loss_mask: the assistant's turns of the given completion; all of the assistant's turns; all tokens."""


@dataclass(frozen=True)
class GivenCompletion:
    """The given completion of a row, before it is tokenized."""

    messages: Chat
    """The assistant's turns, possibly with turns of tools or users between them."""
    excluded: list[Span]
    """Character ranges of its only message that are not trained on."""
    is_cut: bool
    """Whether its writer reached a limit, so that it has no end."""


def split_chat(value: object, where: str) -> tuple[object, Chat]:
    """Split a chat after its last user message; the second part is empty unless it ends with the assistant's.

    A value that is not a list is returned whole, for the check of the prompt. Raises DataError with `where`: all
    messages are the assistant's.
    """
    chat = value if isinstance(value, list) else []
    roles = [message.get("role") if isinstance(message, dict) else None for message in chat]
    if roles[-1:] != ["assistant"]:
        return value, []
    if all(role == "assistant" for role in roles):
        raise DataError(f"{where}: must have a message before those of the assistant; got {short(value)}")
    start = max((place for place, role in enumerate(roles, 1) if role == "user"), default=len(chat) - 1)
    return chat[:start], chat[start:]


def parse_completion(
    value: object, excluded: object, where: str, check: Callable[[object, str], Any], *, is_cut: bool,
    excluded_where: str,
) -> GivenCompletion | None:  # fmt: skip
    """Return the completion in a cell, None for an empty one; a text is one message of the assistant.

    `check` validates a message. Raises DataError with `where`, or with `excluded_where` for excluded spans.
    """
    if value is None or value != value:  # NaN in a column of numbers
        return None
    chat = [{"role": "assistant", "content": value}] if isinstance(value, str) else value
    if not isinstance(chat, list):
        raise DataError(f"{where}: must be a text or a list of chat messages; got {short(value)}")
    messages = [check(message, where) for message in chat]
    if not any(str(message.get(name) or "").strip() for message in messages for name in CONTENTS):
        return None
    if not messages[0]["role"] == messages[-1]["role"] == "assistant":
        raise DataError(f"{where}: must begin and end with a message of the assistant; got {short(value)}")
    return GivenCompletion(messages, _spans(excluded, messages, excluded_where), is_cut)


def _spans(value: object, messages: Chat, where: str) -> list[Span]:
    spans = of_json(value)
    if spans is None or spans != spans:
        return []
    if spans and len(messages) > 1:
        rule = f"must be empty for a completion of several messages ({len(messages)}), since spans are those of a text"
        raise DataError(f"{where}: {rule}; got {short(value)}")
    size = len(messages[0]["content"] or "")
    rule = f"must be a list of spans [start, end) within the {size} characters of the completion, or its JSON"
    if not isinstance(spans, list):
        raise DataError(f"{where}: {rule}; got {short(value)}")
    for span in spans:
        numbers = isinstance(span, list) and len(span) == 2 and all(type(each) is int for each in span)
        if not numbers or not 0 <= span[0] <= span[1] <= size:
            raise DataError(f"{where}: {rule}; got {short(span)} in {short(value)}")
    return [(start, end) for start, end in spans]


@dataclass(frozen=True)
class GivenTokens:
    """A tokenized completion."""

    token_ids: list[int]
    """A token ids."""
    loss_mask: np.ndarray
    """bool [P + A], trained tokens, including those of the P prompt tokens."""
    missing: list[str]
    """Fields of the messages, of `CONTENTS`, that the chat template does not render, or not completely."""


def tokenize_completion(
    answer: GivenCompletion, prompt: Chat, prompt_ids: list[int], *, tokenizer: PreTrainedTokenizerBase,
    render: Render | None, mask: str, where: str,
) -> GivenTokens:
    """Tokenize a given completion of a prompt.

    Args:
        prompt_ids: the whole prompt, as given to the student.
        render: the chat template; None: the tokenizer has none, and a text ends with the end-of-sequence token.
        mask: ANSWER, ASSISTANT or ALL.

    Raises DataError: the template renders the prompt differently before a completion, or changes the text of one that
    has excluded spans or was cut, or the tokenizer lacks required character offsets.
    """
    if render is None:
        if len(answer.messages) > 1:
            raise DataError(f"{where}: several messages need a chat template, which the tokenizer does not have; set "
                "actor_rollout_ref.model.tokenizer_path to one with a template")
        opening, text = "", answer.messages[0].get("content") or ""
    else:
        opening, text = _rendered(answer, prompt, render, where)
        if (ended_once := _ended_once(answer, text)) is not answer:
            answer = ended_once
            text = _rendered(answer, prompt, render, where)[1]
    content, whole = answer.messages[0].get("content") or "", [*prompt, *answer.messages]
    encoded = Encoded(tokenizer, text, where)
    trained = np.ones(len(encoded.ids), bool)
    if render is not None and len(answer.messages) > 1:
        turns, before = _turns(whole, len(prompt), opening + text, render, where), len(opening)
        spans = [(start - before, end - before) for start, end in turns]  # a check of the template with ALL too
        trained = trained if mask == ALL else encoded.within(spans)
    if answer.excluded:
        start, end = _range_of("content", whole, text, render)
        if end - start < len(content):
            raise DataError(f"{where}: the chat template changes the text, so no spans of it can be excluded")
        trained &= ~encoded.within([(start + first, start + last) for first, last in answer.excluded])
    ids = encoded.ids
    if answer.is_cut:
        ends = (_range_of(name, whole, text, render)[1] for name in CONTENTS[:2])
        if not (end := next(filter(None, ends), 0)):
            rule = f"the chat template changes the text, so a completion with {FINISH_REASON}={CUT} cannot lose its end"
            raise DataError(f"{where}: {rule}")
        written = int(encoded.within([(0, end)]).sum())
        ids, trained = ids[:written], trained[:written]
    elif render is None and ids[-1:] != [tokenizer.eos_token_id]:
        ids, trained = [*ids, tokenizer.eos_token_id], np.append(trained, True)
    front = np.zeros(len(prompt_ids), bool)
    if mask == ALL:
        front[1:] = True
    elif mask == ASSISTANT and render is not None and any(each["role"] == "assistant" for each in prompt):
        of_prompt = render(prompt, add_generation_prompt=True)
        front = Encoded(tokenizer, of_prompt, where).within(_turns(prompt, 0, of_prompt, render, where))
        front[:1] = False
    return GivenTokens(ids, np.concatenate([front, trained]), _missing(answer.messages, text))


def _missing(messages: Chat, text: str) -> list[str]:
    """Return the fields with contents of the assistant that are not in a text, regardless of white space."""
    squeezed, found = "".join(text.split()), set[str]()
    for message in (each for each in messages if each["role"] == "assistant"):
        calls = message.get("tool_calls")
        calls = [each for each in calls if isinstance(each, dict)] if isinstance(calls, list) else []
        functions = [each.get("function", each) for each in calls]
        parts = [("tool_calls", each.get("name")) for each in functions if isinstance(each, dict)]
        parts += [(name, message.get(name)) for name in CONTENTS if name != "tool_calls"]
        found |= {name for name, part in parts if "".join(str(part or "").split()) not in squeezed}
    return sorted(found)


def _ended_once(answer: GivenCompletion, text: str) -> GivenCompletion:
    """Return a completion without the end token of its last text if the template writes one too, as in `text`."""
    *front, last = answer.messages
    content = (last.get("content") or "").rstrip()
    end = text.rpartition(content.lstrip())[2].strip() if content else ""
    if answer.is_cut or not end or not content.endswith(end):
        return answer
    return replace(answer, messages=[*front, last | {"content": content.removesuffix(end)}])


def _range_of(name: str, chat: Chat, text: str, render: Render | None) -> Span:
    """Return the characters of a field of the last message in a text, possibly stripped; (0, 0) if it is not there.

    The text may have the same words elsewhere, in the reasoning or a call of a tool, so the field is found by its place
    in the chat rendered with a mark for it.
    """
    value, after = chat[-1].get(name) or "", ""
    if value and render is not None:
        after = render([*chat[:-1], chat[-1] | {name: MARK}]).rpartition(MARK)[2]
    before = text.removesuffix(after)
    for part in (value, value.strip()):
        if part and before.endswith(part):
            return len(before) - len(part), len(before)
    return 0, 0


def _rendered(answer: GivenCompletion, prompt: Chat, render: Render, where: str) -> tuple[str, str]:
    """Return the text of the prompt and that of the completion after it."""
    front, text = render(prompt, add_generation_prompt=True), render([*prompt, *answer.messages])
    if not text.startswith(front):
        raise _changing_template_error(where, front)
    return front, text.removeprefix(front)


def _turns(chat: Chat, first: int, text: str, render: Render, where: str) -> Iterator[Span]:
    """Yield the character ranges of the assistant's turns from message `first` on, including end tokens."""
    for place, message in itertools.islice(enumerate(chat), first, None):
        if message["role"] == "assistant":
            before, until = render(chat[:place], add_generation_prompt=True), render(chat[: place + 1])
            for part in (before, until):
                if not text.startswith(part):
                    raise _changing_template_error(where, part)
            yield len(before), len(until)


def _changing_template_error(where: str, text: str) -> DataError:
    return DataError(
        f"{where}: the chat template renders the beginning of the conversation differently if more messages follow, so "
        f"the tokens of the completion cannot be identified; without them it is {short(text)}"
    )


class Encoded:
    """Token ids of a text, and their character ranges."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str, where: str):
        self.where = where
        offsets = {"return_offsets_mapping": True} if tokenizer.is_fast else {}
        found = tokenizer(text, add_special_tokens=False, **offsets)
        self.ids: list[int] = found.input_ids
        self._offsets = found.offset_mapping if offsets else None

    def within(self, spans: Iterable[Span]) -> np.ndarray:
        """Return for each token whether it overlaps one of the spans, bool [number of tokens].

        Raises DataError: the tokenizer does not provide character offsets.
        """
        if self._offsets is None:
            rule = "excluded spans, several messages and cut completions need a fast tokenizer (a tokenizer.json)"
            raise DataError(f"{self.where}: {rule}")
        starts, ends = np.array(self._offsets, np.int64).reshape(-1, 2).T
        ends = np.maximum(ends, starts + 1)
        found = np.zeros(len(starts), bool)
        for start, end in spans:
            found |= (starts < end) & (ends > start)
        return found

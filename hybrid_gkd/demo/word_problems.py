"""Word problems with worked solutions: two people, a few events, a question. Any number of them, by seed.

    In Corford Jorla has 23 apples. Pelin has 13 more apples than Jorla. Jorla buys 3 bags of 14 apples each. Pelin
    gives a third of the apples to Jorla. How many apples does Jorla have now?

The solution takes the events one by one, splits sums and products into parts and ends as GSM8K's do (`#### 77`). A
problem's level is the number of its events. Its template is what it asks and the kinds of its events in their order:
one in eight templates is held out, so that no training text has it. Of the others a prompt is for validation or for
training by its checksum, so that texts made in different places never overlap. Needs numpy alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

_BEGINNINGS = "Al Ber Car Dor El Fen Gil Har Il Jor Kar Lin Mar Nor Ol Pel Ros Sil Tam Ur Vel Wil Yor Zan".split()
_ENDINGS = "a am an as en ert ia ic im is la mir na o ric sa vin".split()
NAMES = tuple(first + last for last in _ENDINGS for first in _BEGINNINGS)
"""Of people: 400. The fewer there are, the sooner a model learns to copy them; with few it learns them by heart."""
_TOWN_ENDINGS = (
    "bach beck berg born bridge brook burg bury by cliff cote dale field fleet ford gate grove ham haven hill holm "
    "hurst land leigh mere moor mouth pool port ridge shaw side stead stoke stone stow thorpe vale water well wick "
    "wood worth"
).split()
TOWNS = tuple(first + last for last in _TOWN_ENDINGS for first in _BEGINNINGS)
"""Where a problem takes place: 1,000, which no solution names, so that a vocabulary of 2,000 tokens is of use."""
GOODS = {
    # what is counted: what it is packed in
    "apples": "bags", "pears": "crates", "plums": "baskets", "eggs": "trays", "rolls": "sacks", "cookies": "tins",
    "candles": "cartons", "pencils": "boxes", "stamps": "sheets", "cards": "packs", "marbles": "pouches",
    "shells": "jars", "tulips": "bunches", "roses": "bundles", "bricks": "pallets", "tiles": "stacks",
    "books": "shelves", "coins": "rolls", "beads": "strings", "buttons": "tubes", "nails": "cans", "bottles": "racks",
    "seeds": "packets", "badges": "folders",
}  # fmt: skip
PARTS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth"}
LARGEST = 99
"""No amount is larger."""
HELD_OUT_TEMPLATES, VALIDATION_PROMPTS = 8, 32
"""One in so many templates is held out; of the others, one in so many prompts is for validation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A prompt and its only right solution."""

    prompt: str
    solution: str
    level: int
    """Number of events."""
    template: str

    @property
    def held_out(self) -> bool:
        """Whether no training text has this template."""
        return zlib.crc32(self.template.encode()) % HELD_OUT_TEMPLATES == 0

    @property
    def for_training(self) -> bool:
        """Whether neither the template nor the prompt is for validation."""
        return not self.held_out and zlib.crc32(self.prompt.encode()) % VALIDATION_PROMPTS != 0


@dataclass(slots=True)
class Story:
    """The state of a problem that is being told."""

    rng: np.random.Generator
    town: str
    people: tuple[str, str]
    goods: str
    packs: str
    largest: int
    """Of the numbers that an event brings in."""
    amounts: list[int]

    def number(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def pick(self, *choices: str) -> str:
        return choices[self.rng.integers(len(choices))]


Event = tuple[str, str, list[int]]
"""The sentence of the problem, the calculation of the solution, and both amounts afterwards."""


def product(k: int, m: int) -> str:
    """`3 * 27 = 60 + 21 = 81`: tens and ones apart, where there are both."""
    tens, ones = m // 10 * 10, m % 10
    return f"{k} * {m} = {k * tens} + {k * ones} = {k * m}" if tens and ones else f"{k} * {m} = {k * m}"


def total(a: int, b: int) -> str:
    """`37 + 45 = 70 + 12 = 82`: tens and ones apart, where both numbers have both."""
    tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
    apart = min(a, b) > 10 and a % 10 and b % 10
    return f"{a} + {b} = {tens} + {ones} = {a + b}" if apart else f"{a} + {b} = {a + b}"


def rest(a: int, b: int) -> str:
    """`82 - 45 = 42 - 5 = 37`: first the tens, then the ones, where there are both."""
    tens, ones = b // 10 * 10, b % 10
    return f"{a} - {b} = {a - tens} - {ones} = {a - b}" if tens and ones else f"{a} - {b} = {a - b}"


def _with(amounts: list[int], who: int, amount: int) -> list[int]:
    return [amount if i == who else other for i, other in enumerate(amounts)]


def _find(s: Story, who: int) -> Event:
    name, n, before = s.people[who], s.number(2, s.largest), s.amounts[who]
    text = s.pick(
        f"{name} finds {n} more {s.goods}.", f"{name} gets {n} {s.goods} as a gift.",
        f"A friend brings {name} {n} {s.goods}.",
    )
    return text, f"{name} gets {n}: {total(before, n)}.", _with(s.amounts, who, before + n)


def _lose(s: Story, who: int) -> Event:
    name, before = s.people[who], s.amounts[who]
    n = s.number(1, max(1, min(s.largest, before - 1)))
    text = s.pick(
        f"{name} loses {n} {s.goods}.", f"{name} uses up {n} {s.goods}.", f"{name} sells {n} {s.goods} at the market."
    )
    return text, f"{name} is left with {rest(before, n)}.", _with(s.amounts, who, before - n)


def _buy(s: Story, who: int) -> Event:
    name, k, m = s.people[who], s.number(2, 9), s.number(2, max(3, s.largest // 2))
    before, more = s.amounts[who], k * m
    text = s.pick(
        f"{name} buys {k} {s.packs} of {m} {s.goods} each.", f"{name} orders {k} {s.packs} with {m} {s.goods} in each.",
        f"Then {k} {s.packs} of {m} {s.goods} each arrive for {name}.",
    )
    line = f"{name} buys {product(k, m)}, so {total(before, more)}."
    return text, line, _with(s.amounts, who, before + more)


def _give(s: Story, who: int) -> Event:
    name, other, before = s.people[who], s.people[1 - who], s.amounts
    n = s.number(1, max(1, min(s.largest, before[who] - 1)))
    text = s.pick(
        f"{name} gives {other} {n} {s.goods}.", f"{other} gets {n} {s.goods} from {name}.",
        f"{name} hands {n} {s.goods} to {other}.",
    )
    after = [a - n if i == who else a + n for i, a in enumerate(before)]
    line = (
        f"{name} gives {n}: {rest(before[who], n)}, and {other} has {total(before[1 - who], n)}."
    )
    return text, line, after


def _share(s: Story, who: int) -> Event:
    name, other, before = s.people[who], s.people[1 - who], s.amounts
    parts = [d for d in PARTS if before[who] % d == 0]
    d = parts[s.rng.integers(len(parts))] if parts else 1
    n = before[who] // d
    text = s.pick(
        f"{name} gives {PARTS.get(d, 'all')} of the {s.goods} to {other}.",
        f"{other} gets {PARTS.get(d, 'all')} of {name}'s {s.goods}.",
    )
    after = [a - n if i == who else a + n for i, a in enumerate(before)]
    line = (
        f"{name} gives {before[who]} / {d} = {n}: {rest(before[who], n)}, and {other} has "
        f"{total(before[1 - who], n)}."
    )
    return text, line, after


def _multiply(s: Story, who: int) -> Event:
    name, k, before = s.people[who], s.number(2, 4), s.amounts[who]
    text = s.pick(
        f"After that {name} has {k} times as many {s.goods}.", f"{name}'s {s.goods} become {k} times as many.",
    )
    return text, f"{name} now has {product(k, before)}.", _with(s.amounts, who, k * before)


EVENTS: dict[str, Callable[[Story, int], Event]] = {
    "find": _find, "lose": _lose, "buy": _buy, "give": _give, "share": _share, "multiply": _multiply,
}


def _one(s: Story) -> tuple[str, str, int]:
    who = s.number(0, 1)
    name, amount = s.people[who], s.amounts[who]
    return f"How many {s.goods} does {name} have now?", f"So {name} has {amount}.", amount


def _both(s: Story) -> tuple[str, str, int]:
    a, b = s.amounts
    text = s.pick(f"How many {s.goods} do they have together?", f"How many {s.goods} do both have in total?")
    return text, f"Together: {total(a, b)}.", a + b


def _difference(s: Story) -> tuple[str, str, int]:
    more, less = sorted((0, 1), key=lambda i: -s.amounts[i])
    a, b = s.amounts[more], s.amounts[less]
    text = f"How many more {s.goods} does {s.people[more]} have than {s.people[less]}?"
    return text, f"Difference: {rest(a, b)}.", a - b


QUESTIONS: dict[str, Callable[[Story], tuple[str, str, int]]] = {
    "one": _one, "both": _both, "difference": _difference,
}


def _beginning(s: Story) -> tuple[str, str, str]:
    """How it starts: the sentence, its calculation, and its kind."""
    (one, two), (a, b), town = s.people, s.amounts, s.town
    kind = s.pick("given", "more", "fewer") if a != b else "given"
    if kind == "more" and b > a:
        return (
            f"In {town} {one} has {a} {s.goods}. {two} has {b - a} more {s.goods} than {one}.",
            f"Start: {one} has {a}. {two} has {total(a, b - a)}.", "more",
        )  # fmt: skip
    if kind == "fewer" and b < a:
        return (
            f"In {town} {one} has {a} {s.goods}. {two} has {a - b} fewer {s.goods} than {one}.",
            f"Start: {one} has {a}. {two} has {rest(a, a - b)}.", "fewer",
        )  # fmt: skip
    return f"In {town} {one} has {a} {s.goods} and {two} has {b}.", f"Start: {one} has {a}. {two} has {b}.", "given"


def _attempt(rng: np.random.Generator, level: int, largest: int, num_names: int, num_towns: int) -> Problem | None:
    """A problem, or None where an amount left its range."""
    first, second = rng.choice(num_names, 2, replace=False)
    goods, packs = list(GOODS.items())[rng.integers(len(GOODS))]
    story = Story(
        rng=rng, town=TOWNS[rng.integers(num_towns)], people=(NAMES[first], NAMES[second]), goods=goods, packs=packs,
        largest=largest, amounts=[int(n) for n in rng.integers(2, largest + 1, 2)],
    )
    text, line, start = _beginning(story)
    texts, lines, kinds = [text], [line], [start]
    for _ in range(level):
        kind, who = list(EVENTS)[rng.integers(len(EVENTS))], story.number(0, 1)
        text, line, story.amounts = EVENTS[kind](story, who)
        if not all(0 < amount <= LARGEST for amount in story.amounts):
            return None
        state = ", ".join(f"{name} {amount}" for name, amount in zip(story.people, story.amounts, strict=True))
        texts.append(text)
        lines.append(f"{len(lines)}. {line} Now: {state}.")
        kinds.append(kind)
    asked = list(QUESTIONS)[rng.integers(len(QUESTIONS))]
    question, conclusion, answer = QUESTIONS[asked](story)
    return Problem(
        prompt=" ".join([*texts, question]), solution="\n".join([*lines, conclusion, f"#### {answer}"]), level=level,
        template=" ".join([asked, *kinds]),
    )


def problems(
    seed: int | list[int], *, levels: tuple[int, ...], largest: int, num_names: int = len(NAMES),
    num_towns: int = len(TOWNS),
) -> Iterator[Problem]:
    """Problems without end, of all levels in equal parts; the same ones for the same arguments.

    Args:
        levels: numbers of events.
        largest: the largest number that the text of an event brings in.
        num_names: how many of NAMES there are.
        num_towns: how many of TOWNS there are.
    """
    rng = np.random.default_rng(seed)
    while True:
        level, problem = levels[rng.integers(len(levels))], None
        while problem is None:
            problem = _attempt(rng, level, largest, num_names, num_towns)
        yield problem

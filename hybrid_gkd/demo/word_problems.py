"""Generate word problems with step-by-step solutions: an amount, several events, a question.

    In Corford Ilric has 9 apples. Alan gives Ilric 26 apples. Ilric sells 8 apples at the market. Ilric gives a third
    of the apples to Alan. Then 3 bags of 14 apples each arrive for Ilric. How many apples does Ilric have now?

    Start: 9.
    1. Gets 26: 9 + 26 = 35.
    2. Loses 8: 35 - 8 = 27.
    3. Gives away 27 / 3 = 9: 27 - 9 = 18.
    4. Gets 3 * 14 = 30 + 12 = 42: 18 + 42 = 60.
    Ilric has 60.
    #### 60

The solution computes the events one by one, splits sums and products into parts and ends as in GSM8K (`#### 60`). The
level of a problem is the number of its events. Its template is the question and the sequence of its kinds of events:
one in eight templates is held out of training. Prompts of other templates are assigned to validation or training by
their checksum, so that texts from different sources never overlap. Needs only numpy.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

_BEGINNINGS = "Al Ber Car Dor El Fen Gil Har Il Jor Kar Lin Mar Nor Ol Pel Ros Sil Tam Ur Vel Wil Yor Zan".split()
_ENDINGS = "a am an as en ert ia ic im is la mir na o ric sa vin".split()
NAMES = tuple(first + last for last in _ENDINGS for first in _BEGINNINGS)
"""Names of people: 400. With few names a model memorizes them; with many it learns to copy them."""
_TOWN_ENDINGS = (
    "bach beck berg born bridge brook burg bury by cliff cote dale field fleet ford gate grove ham haven hill holm "
    "hurst land leigh mere moor mouth pool port ridge shaw side stead stoke stone stow thorpe vale water well wick "
    "wood worth"
).split()
TOWNS = tuple(first + last for last in _TOWN_ENDINGS for first in _BEGINNINGS)
"""Names of towns: 1,000, which occur in no solution, so that a vocabulary of 2,000 tokens is useful."""
GOODS = {
    # goods: their packs
    "apples": "bags", "pears": "crates", "plums": "baskets", "eggs": "trays", "rolls": "sacks", "cookies": "tins",
    "candles": "cartons", "pencils": "boxes", "stamps": "sheets", "cards": "packs", "marbles": "pouches",
    "shells": "jars", "tulips": "bunches", "roses": "bundles", "bricks": "pallets", "tiles": "stacks",
    "books": "shelves", "coins": "rolls", "beads": "strings", "buttons": "tubes", "nails": "cans", "bottles": "racks",
    "seeds": "packets", "badges": "folders",
}  # fmt: skip
PARTS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth"}
LARGEST = 99
"""Largest amount."""
HELD_OUT_TEMPLATES, VALIDATION_PROMPTS = 8, 32
"""One in HELD_OUT_TEMPLATES templates is held out; of others, one in VALIDATION_PROMPTS prompts is for validation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A prompt and its solution."""

    prompt: str
    solution: str
    level: int
    """Number of events."""
    template: str

    @property
    def held_out(self) -> bool:
        """Return whether no training text has this template."""
        return zlib.crc32(self.template.encode()) % HELD_OUT_TEMPLATES == 0

    @property
    def for_training(self) -> bool:
        """Return whether neither the template nor the prompt is for validation."""
        return not self.held_out and zlib.crc32(self.prompt.encode()) % VALIDATION_PROMPTS != 0


@dataclass(slots=True, kw_only=True)
class Story:
    """State of a problem during its generation."""

    rng: np.random.Generator
    town: str
    name: str
    other: str
    """Name of another person."""
    goods: str
    packs: str
    largest: int
    """Largest number in the text of an event."""
    amount: int = 0

    def number(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def small(self) -> int:
        """Return a number below the amount; of an amount of 1 all of it, which no problem keeps."""
        return self.number(1, max(1, min(self.largest, self.amount - 1)))

    def pick(self, *choices: str) -> str:
        return choices[self.rng.integers(len(choices))]


Event = tuple[str, str, int]
"""Sentence of the problem, calculation of the solution, and resulting amount."""


def product(k: int, m: int) -> str:
    """Return a multiplication, with tens and ones separately if both are present: `3 * 27 = 60 + 21 = 81`."""
    tens, ones = m // 10 * 10, m % 10
    return f"{k} * {m} = {k * tens} + {k * ones} = {k * m}" if tens and ones else f"{k} * {m} = {k * m}"


def total(a: int, b: int) -> str:
    """Return an addition, with tens and ones separately if both numbers have both: `37 + 45 = 70 + 12 = 82`."""
    tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
    apart = min(a, b) > 10 and a % 10 and b % 10
    return f"{a} + {b} = {tens} + {ones} = {a + b}" if apart else f"{a} + {b} = {a + b}"


def rest(a: int, b: int) -> str:
    """Return a subtraction, first of the tens, then of the ones, if both are present: `82 - 45 = 42 - 5 = 37`."""
    tens, ones = b // 10 * 10, b % 10
    return f"{a} - {b} = {a - tens} - {ones} = {a - b}" if tens and ones else f"{a} - {b} = {a - b}"


def _get(s: Story) -> Event:
    n = s.number(2, s.largest)
    text = s.pick(
        f"{s.name} finds {n} more {s.goods}.", f"{s.name} gets {n} {s.goods} as a gift.",
        f"{s.other} gives {s.name} {n} {s.goods}.", f"A friend brings {s.name} {n} {s.goods}.",
    )
    return text, f"Gets {n}: {total(s.amount, n)}.", s.amount + n


def _lose(s: Story) -> Event:
    n = s.small()
    text = s.pick(
        f"{s.name} loses {n} {s.goods}.", f"{s.name} uses up {n} {s.goods}.",
        f"{s.name} sells {n} {s.goods} at the market.",
    )
    return text, f"Loses {n}: {rest(s.amount, n)}.", s.amount - n


def _give(s: Story) -> Event:
    n = s.small()
    text = s.pick(
        f"{s.name} gives {s.other} {n} {s.goods}.", f"{s.other} gets {n} {s.goods} from {s.name}.",
        f"{s.name} hands {n} {s.goods} to {s.other}.",
    )
    return text, f"Gives away {n}: {rest(s.amount, n)}.", s.amount - n


def _buy(s: Story) -> Event:
    k, m = s.number(2, 9), s.number(2, max(3, s.largest // 2))
    text = s.pick(
        f"{s.name} buys {k} {s.packs} of {m} {s.goods} each.",
        f"{s.name} orders {k} {s.packs} with {m} {s.goods} in each.",
        f"Then {k} {s.packs} of {m} {s.goods} each arrive for {s.name}.",
    )
    return text, f"Gets {product(k, m)}: {total(s.amount, k * m)}.", s.amount + k * m


def _share(s: Story) -> Event:
    parts = [d for d in PARTS if s.amount % d == 0]
    d = parts[s.rng.integers(len(parts))] if parts else 1
    n = s.amount // d
    text = s.pick(
        f"{s.name} gives {PARTS.get(d, 'all')} of the {s.goods} to {s.other}.",
        f"{s.other} gets {PARTS.get(d, 'all')} of {s.name}'s {s.goods}.",
    )
    return text, f"Gives away {s.amount} / {d} = {n}: {rest(s.amount, n)}.", s.amount - n


def _multiply(s: Story) -> Event:
    k = s.number(2, 4)
    text = s.pick(
        f"After that {s.name} has {k} times as many {s.goods}.", f"{s.name}'s {s.goods} become {k} times as many.",
    )
    return text, f"Has {k} times as many: {product(k, s.amount)}.", k * s.amount


EVENTS: dict[str, Callable[[Story], Event]] = {
    "get": _get, "lose": _lose, "give": _give, "buy": _buy, "share": _share, "multiply": _multiply,
}


def _now(s: Story, _: int) -> Event:
    return f"How many {s.goods} does {s.name} have now?", f"{s.name} has {s.amount}.", s.amount


def _together(s: Story, _: int) -> Event:
    n = s.number(2, s.largest)
    text = f"{s.other} has {n} {s.goods}. " + s.pick(
        f"How many {s.goods} do they have together?", f"How many {s.goods} do both have in total?"
    )
    return text, f"Together: {total(s.amount, n)}.", s.amount + n


def _change(s: Story, first: int) -> Event:
    less, more = sorted((first, s.amount))
    text = f"How many {'more' if s.amount > first else 'fewer'} {s.goods} are that than in the beginning?"
    return text, f"Change: {rest(more, less)}.", more - less


def _missing(s: Story, _: int) -> Event:
    n = LARGEST + 1
    return f"How many {s.goods} are missing to {n}?", f"Missing: {rest(n, s.amount)}.", n - s.amount


QUESTIONS: dict[str, Callable[[Story, int], Event]] = {
    "now": _now, "together": _together, "change": _change, "missing": _missing,
}
"""Questions: functions of the story and its first amount that return sentence, calculation and answer."""


def _given(s: Story) -> Event:
    a = s.number(2, s.largest)
    return f"In {s.town} {s.name} has {a} {s.goods}.", f"Start: {a}.", a


def _packed(s: Story) -> Event:
    k, m = s.number(2, 9), s.number(2, max(3, s.largest // 2))
    return f"In {s.town} {s.name} has {k} {s.packs} of {m} {s.goods} each.", f"Start: {product(k, m)}.", k * m


def _compared(s: Story) -> Event:
    a, b = s.number(2, s.largest), s.number(1, s.largest)
    text = f"In {s.town} {s.other} has {a} {s.goods}. {s.name} has {b} more {s.goods} than {s.other}."
    return text, f"Start: {total(a, b)}.", a + b


BEGINNINGS: dict[str, Callable[[Story], Event]] = {"given": _given, "packed": _packed, "compared": _compared}


def _attempt(rng: np.random.Generator, level: int, largest: int, num_names: int, num_towns: int) -> Problem | None:
    """Return a problem, or None if an amount left its range."""
    first, second = rng.choice(num_names, 2, replace=False)
    goods, packs = list(GOODS.items())[rng.integers(len(GOODS))]
    story = Story(
        rng=rng, town=TOWNS[rng.integers(num_towns)], name=NAMES[first], other=NAMES[second], goods=goods, packs=packs,
        largest=largest,
    )
    texts, lines, kinds, amounts = list[str](), list[str](), list[str](), list[int]()
    for number in range(level + 1):
        table = EVENTS if number else BEGINNINGS
        kind = list(table)[rng.integers(len(table))]
        text, line, story.amount = table[kind](story)
        if not 0 < story.amount <= LARGEST:
            return None
        texts.append(text)
        lines.append(f"{number}. {line}" if number else line)
        kinds.append(kind)
        amounts.append(story.amount)
    asked = list(QUESTIONS)[rng.integers(len(QUESTIONS))]
    question, conclusion, answer = QUESTIONS[asked](story, amounts[0])
    if answer == 0:  # no change, or nothing missing
        return None
    return Problem(
        prompt=" ".join([*texts, question]), solution="\n".join([*lines, conclusion, f"#### {answer}"]), level=level,
        template=" ".join([asked, *kinds]),
    )


def problems(
    seed: int | list[int], *, levels: tuple[int, ...], largest: int, num_names: int = len(NAMES),
    num_towns: int = len(TOWNS),
) -> Iterator[Problem]:
    """Yield problems without end, of all levels with equal probability; the same ones for the same arguments.

    Args:
        levels: numbers of events.
        largest: largest number in the text of an event.
        num_names: number of NAMES in use.
        num_towns: number of TOWNS in use.
    """
    rng = np.random.default_rng(seed)
    while True:
        level, problem = levels[rng.integers(len(levels))], None
        while problem is None:
            problem = _attempt(rng, level, largest, num_names, num_towns)
        yield problem

"""The texts of gpu_demo: solutions are right by a solver that reads the prompt alone, and validation is held out."""

import re
from fractions import Fraction
from itertools import islice

import pytest

from hybrid_gkd.demo import word_problems
from hybrid_gkd.demo.gpu_demo import RECIPES, is_right, make_data
from hybrid_gkd.scoring.builtin_rewards import gsm8k

PARTS = {"half": 2, "a third": 3, "a quarter": 4, "a fifth": 5}
EVENTS = (
    # a pattern of the whole sentence about X (the name) and another person, and the amount afterwards
    (r"X (?:finds|gets) (\d+) (?:more )?\w+(?: as a gift)?", lambda has, n: has + int(n)),
    (r"(?:A friend brings|\w+ gives) X (\d+) \w+", lambda has, n: has + int(n)),
    (r"X (?:loses|uses up|sells) (\d+) \w+(?: at the market)?", lambda has, n: has - int(n)),
    (r"(?:X gives \w+|\w+ gets|X hands) (\d+) \w+(?: from X| to \w+)?", lambda has, n: has - int(n)),
    (r"(?:X (?:buys|orders)|Then) (\d+) \w+ (?:of|with) (\d+) \w+ (?:each|each arrive for X|in each)",
     lambda has, k, m: has + int(k) * int(m)),
    (r"(?:X gives|\w+ gets) (half|a \w+) of (?:the|X's) \w+(?: to \w+)?",
     lambda has, part: has - Fraction(has, PARTS[part])),
    (r"(?:After that X has|X's \w+ become) (\d+) times as many(?: \w+)?", lambda has, k: has * int(k)),
)


def solve(prompt):
    """The answer, by the prompt alone."""
    first, *events, question = re.split(r"(?<=[.?]) ", prompt)
    name, a, rest = re.fullmatch(r"In \w+ (\w+) has (\d+) (.*)\.", first).groups()
    if match := re.fullmatch(r"\w+ of (\d+) \w+ each", rest):
        start = int(a) * int(match[1])
    elif events and (match := re.fullmatch(r"(\w+) has (\d+) more \w+ than (\w+)\.", events[0])):
        assert match[3] == name
        name, start = match[1], int(a) + int(match[2])
        del events[0]
    else:
        start = int(a)
    has = start
    other = events.pop() if "they have together" in question or "both have" in question else None
    for event in events:
        told = re.sub(rf"\b{name}\b", "X", event.rstrip("."))
        ((after, numbers),) = [(after, m.groups()) for pattern, after in EVENTS if (m := re.fullmatch(pattern, told))]
        has = after(has, *numbers)
    if other is not None:
        return has + int(re.fullmatch(r"\w+ has (\d+) \w+\.", other)[1])
    if "in the beginning" in question:
        assert (" more " in question) == (has > start)
        return abs(has - start)
    if match := re.search(r"missing to (\d+)", question):
        return int(match[1]) - has
    assert question.endswith(f"does {name} have now?")
    return has


@pytest.mark.slow
@pytest.mark.parametrize("device", RECIPES)
def test_solutions_are_right_and_their_calculations_hold(device):
    for problem in islice(RECIPES[device].texts(0, seed=1), 400):
        answer = solve(problem.prompt)
        assert problem.solution.endswith(f"\n#### {answer}"), problem.prompt
        assert gsm8k(problem.solution, f"#### {answer}") == 1
        for chain in re.findall(r"\d+(?: [-+*/] \d+)+(?: = \d+(?: [-+] \d+)*)+", problem.solution):
            values = {Fraction(eval(part)) for part in chain.split(" = ")}
            assert len(values) == 1, chain
        assert len(problem.solution.splitlines()) == problem.level + 3  # start, events, conclusion, mark


def test_texts_follow_from_their_seed():
    def first(seed):
        return list(islice(word_problems.problems(seed, levels=(1, 3), largest=20), 50))

    assert first(3) == first(3)
    assert first(3) != first(4)
    assert {p.level for p in first(3)} == {1, 3}


@pytest.mark.slow
def test_validation_has_prompts_and_templates_that_training_never_has():
    recipe = RECIPES["cpu"]
    train, val = make_data(recipe, seed=0)
    assert (len(train), len(val)) == (recipe.num_train, recipe.num_val)
    assert sum(row["held_out_template"] for row in val) == recipe.num_val // 2
    trained, templates = {row["prompt"] for row in train}, {row["template"] for row in train}
    for row in val:
        assert row["prompt"] not in trained
        assert row["held_out_template"] == (row["template"] not in templates)
    streamed = [p for p in islice(recipe.texts(7, seed=5), 2000) if p.for_training]  # any other stream for training
    assert not {p.prompt for p in streamed} & {row["prompt"] for row in val}
    assert not {p.template for p in streamed} & {row["template"] for row in val if row["held_out_template"]}


@pytest.mark.parametrize(
    ("text", "right"), [("1 + 1 = 2.\n#### 2", True), ("#### 3", False), ("2", False), ("#### 2 \n", True)]
)
def test_an_answer_is_what_follows_the_mark(text, right):
    assert is_right(text, "1 + 1 = 2.\n#### 2") == right

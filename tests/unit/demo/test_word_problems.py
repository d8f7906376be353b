"""The texts of gpu_demo: solutions are right by a solver that reads the prompt alone, and validation is held out."""

import re
from fractions import Fraction
from itertools import islice

import pytest

from hybrid_gkd.demo import word_problems
from hybrid_gkd.demo.gpu_demo import RECIPES, is_right, make_data
from hybrid_gkd.ppo.rewards import gsm8k

NUMBER = r"(\d+) "
GET = rf"(?:(\w+) finds|(\w+) gets|A friend brings (\w+)) {NUMBER}(?:more )?\w+(?: as a gift)?"
LOSE = rf"(\w+) (?:loses|uses up|sells) {NUMBER}"
BUY = rf"(?:(\w+) (?:buys|orders)|Then) {NUMBER}\w+ (?:of|with) {NUMBER}\w+ (?:each(?: arrive for (\w+))?|in each)"
GIVE = rf"(?:(\w+) gives (\w+) {NUMBER}|(\w+) hands {NUMBER}\w+ to (\w+)|(\w+) gets {NUMBER}\w+ from (\w+))"
SHARE = r"(?:(\w+) gives (half|a \w+) of the \w+ to (\w+)|(\w+) gets (half|a \w+) of (\w+)'s \w+)"
TIMES = rf"(?:After that (\w+) has {NUMBER}times|(\w+)'s \w+ become {NUMBER}times) as many.*"
PARTS = {"half": 2, "a third": 3, "a quarter": 4, "a fifth": 5}


def tell(sentence, has):
    """One event on the amounts."""
    def groups(pattern, whole=False):
        match = (re.fullmatch if whole else re.match)(pattern, sentence)
        return match and [g for g in match.groups() if g]

    if found := groups(GET, whole=True):
        has[found[0]] += int(found[1])
    elif found := groups(LOSE):
        has[found[0]] -= int(found[1])
    elif found := groups(BUY):
        numbers = [int(g) for g in found if g.isdigit()]
        (name,) = (g for g in found if not g.isdigit())
        has[name] += numbers[0] * numbers[1]
    elif found := groups(TIMES):
        has[found[0]] *= int(found[1])
    elif found := groups(SHARE):
        one, part, two = found
        giver, taker = (two, one) if " gets " in sentence else (one, two)
        moved = Fraction(has[giver], PARTS[part])
        has[giver], has[taker] = has[giver] - moved, has[taker] + moved
    else:
        found = groups(GIVE)
        names, (n,) = [g for g in found if not g.isdigit()], [int(g) for g in found if g.isdigit()]
        giver, taker = reversed(names) if " gets " in sentence else names
        has[giver], has[taker] = has[giver] - n, has[taker] + n


def solve(prompt):
    """The answer, by the prompt alone."""
    first, *events, question = re.split(r"(?<=[.?]) ", prompt)
    if match := re.match(r"In \w+ (\w+) has (\d+) \w+ and (\w+) has (\d+)\.", first):
        has = {match[1]: int(match[2]), match[3]: int(match[4])}
    else:
        one, a = re.match(r"In \w+ (\w+) has (\d+) ", first).groups()
        two, b, how = re.match(r"(\w+) has (\d+) (more|fewer) ", events.pop(0)).groups()
        has = {one: int(a), two: int(a) + (int(b) if how == "more" else -int(b))}
    for event in events:
        tell(event.rstrip("."), has)
    if match := re.search(r"does (\w+) have now", question):
        return has[match[1]]
    if match := re.search(r"does (\w+) have than (\w+)\?", question):
        return has[match[1]] - has[match[2]]
    return sum(has.values())


@pytest.mark.parametrize("device", RECIPES)
def test_solutions_are_right_and_their_calculations_hold(device):
    for problem in islice(RECIPES[device].texts(0, seed=1), 400):
        answer = solve(problem.prompt)
        assert problem.solution.endswith(f"\n#### {answer}"), problem.prompt
        assert gsm8k(problem.solution, f"#### {answer}") == 1
        for chain in re.findall(r"\d+(?: [-+*/] \d+)+(?: = \d+(?: [-+] \d+)*)+", problem.solution):
            values = {Fraction(eval(part)) for part in chain.split(" = ")}
            assert len(values) == 1, chain
        assert problem.solution.count("Now: ") == problem.level


def test_texts_follow_from_their_seed():
    def first(seed):
        return list(islice(word_problems.problems(seed, levels=(1, 3), largest=20), 50))

    assert first(3) == first(3)
    assert first(3) != first(4)
    assert {p.level for p in first(3)} == {1, 3}


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

"""Scores of a teacher with another tokenizer as scores of the student's tokens."""

import itertools

import documented
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_tokenizers import ALPHABET, TEXT, byte_level, sentence_piece, word_piece
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as kinds
from transformers import PreTrainedTokenizerFast

from hybrid_gkd import testing
from hybrid_gkd.losses import divergence
from hybrid_gkd.losses.head import head_loss
from hybrid_gkd.losses.table import user_divergence
from hybrid_gkd.losses.terms import Student, by_event, distillation
from hybrid_gkd.models.spelling import Spelling
from hybrid_gkd.runtime.spans import Clock
from hybrid_gkd.scoring.cross_tokenizer import Aligner, CrossTokenizerScorer, student_scores
from hybrid_gkd.scoring.teacher_router import TeacherRouter
from hybrid_gkd.scoring.token_events import TokenEvents
from hybrid_gkd.scoring.token_spans import TokenSpans
from hybrid_gkd.testing import LocalTeacher
from hybrid_gkd.types import GenerationRequest, SampleId, Task, TopK, generated_sample

TOKENIZERS = {
    "bytes": byte_level(330, added=("<think>",)), "digits": byte_level(420, end="</s>", digits=3),
    "pieces": sentence_piece(), "words": word_piece(),
}  # fmt: skip
PAIRS = [pair for pair in itertools.permutations(TOKENIZERS, 2) if pair[0] != "words"]
TASK = Task(index=0, token_ids=np.array([1, 2], np.int32), teacher_ids=np.array([3], np.int32), text="")


def spelled(name):
    tokenizer = TOKENIZERS[name]
    return Spelling(tokenizer, name, ends=[tokenizer.eos_token_id])


def make_events(teacher, student, *, columns=64):
    """The student is the first of a pair."""
    own, other = spelled(student), spelled(teacher)
    ends = {TOKENIZERS[teacher].eos_token_id: [TOKENIZERS[student].eos_token_id]}
    return TokenEvents(other, own, ends, num_ids=len(own.bytes), num_columns=columns)


EVENTS = {pair: make_events(pair[1], pair[0]) for pair in PAIRS}
SPANS = {pair: TokenSpans(events) for pair, events in EVENTS.items()}


def make_sample(ids, status="stop"):
    request = GenerationRequest(id=SampleId(1, 0, 0), prompt_ids=TASK.token_ids, seed=0)
    return generated_sample(request, np.array(ids, np.int32), version=0, status=status)


def random_scores(ids, vocabulary, *, topk=32, seed=0, flat=1.0):
    """Scores of these tokens by a teacher, float32, and the whole distributions, float64."""
    logits = flat * np.random.default_rng(seed).normal(size=(len(ids), vocabulary)) * 3
    whole = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    order = np.argsort(-whole, 1)
    chosen, tail = order[:, :topk], np.take_along_axis(whole, order[:, topk:], 1)
    with np.errstate(divide="ignore"):
        tails = np.log(np.exp(tail).sum(1))
    return TopK(
        ids=chosen.astype(np.int32), logprobs=np.take_along_axis(whole, chosen, 1).astype(np.float32),
        tail_logprobs=tails.astype(np.float32),
        sampled_logprobs=whole[np.arange(len(ids)), ids].astype(np.float32),
    ), whole  # fmt: skip


def aligned(pair, data, *, ended=True, limit=10_000, seed=None):
    """A text in the student's tokens: as its tokenizer splits it, or in random ones (`seed`)."""
    events = EVENTS[pair]
    own, ids = events.student, list[int]()
    if seed is None:
        ids = own.encode(data)[0]
    else:
        rng, place = np.random.default_rng(seed), 0
        while place < len(data):
            ends = [end for end in range(place + 1, len(data) + 1) if data[place:end] in own.by_bytes]
            place, start = int(rng.choice(ends)), place
            ids.append(own.by_bytes[data[start:place]])
    if ended:
        ids.append(TOKENIZERS[pair[0]].eos_token_id)
    return events, Aligner(events, limit=limit).align(TASK, make_sample(ids))


texts = st.one_of(
    st.text(alphabet=TEXT, max_size=40).map(str.encode), st.text(max_size=12).map(str.encode), st.binary(max_size=12),
    st.from_regex(r"\A( {1,5}x[0-9]{1,4} = \(y\)\n){1,2}", fullmatch=True).map(str.encode),
)  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@settings(max_examples=25, deadline=None)
@given(data=texts, seed=st.sampled_from([None, 1, 2]))
@example(data="  the weather in 東京 is 🙂".encode(), seed=1)
@example(data="Füße 🙂".encode()[:-2], seed=None)
@example(data=b"<think>12345</think>", seed=None)
@example(data=b"\r", seed=None)
@example(data=b"0", seed=None)
def test_log_probabilities_of_a_text_have_the_teachers_sum(pair, data, seed):
    """So they have over each span; every row is a distribution over distinct tokens. Where a token of the teacher has a
    space that the text does not have, this is given."""
    events, alignment = aligned(pair, data, seed=seed)
    ids = alignment.teacher.ids
    scores, _ = random_scores(ids, len(events.teacher.bytes))
    found = student_scores(events, alignment, scores, spans=SPANS[pair])
    if alignment.covered.all():
        total, expected = found.sampled_logprobs.sum(), scores.sampled_logprobs.sum()
        has_space = (alignment.teacher.starts < np.concatenate([[0], alignment.teacher.ends[:-1]])).any()
        assert total == pytest.approx(expected, rel=1e-4) or (has_space and total > expected)
        assert alignment.teacher.ends[-1] == alignment.student.ends[-1]
    else:  # a byte without token, from which on nothing is scored
        assert pair[1] == "words"
        assert (np.isnan(found.sampled_logprobs) == ~alignment.covered).all()
    masses = np.exp(found.logprobs).sum(1) + np.exp(found.tail_logprobs)
    assert masses == pytest.approx(np.ones(len(found.ids)), abs=1e-3)
    assert all(len(set(row)) == len(row) for row in found.ids.tolist())
    assert 0 <= found.ids.min() <= found.ids.max() < events.num_ids
    only = student_scores(events, alignment, scores, spans=None)
    matched = alignment.matched >= 0
    assert (only.groups[~matched] == -1).all()
    assert (only.tail_logprobs[~matched] == 0).all()
    for name, array in only.parts().items():
        assert np.array_equal(array[matched], found.parts()[name][matched]), name


@pytest.mark.parametrize("name", ["bytes", "digits", "pieces"])
def test_with_the_same_tokenizer_the_scores_are_the_teachers_to_the_last_digit(name):
    own, other = spelled(name), spelled(name)
    end = TOKENIZERS[name].eos_token_id
    ids = [*own.encode("The theory of 東京, 12345 🙂!\n".encode())[0], end]
    sample = make_sample(ids)
    for teacher in (own, other):  # known to be the same, and aligned by bytes
        events = TokenEvents(teacher, own, {end: [end]}, num_ids=len(own.bytes), num_columns=64)
        alignment = Aligner(events, limit=100).align(TASK, sample)
        assert alignment.teacher.ids.tolist() == ids
        scores, _ = random_scores(alignment.teacher.ids, len(own.bytes))
        scores = TopK(**scores.parts() | {"ids": without_unknown(scores.ids, own)})
        found = student_scores(events, alignment, scores, spans=TokenSpans(events))
        chosen = np.isfinite(found.logprobs)
        assert (chosen.sum(1) == 32).all()
        assert np.array_equal(found.logprobs[chosen], scores.logprobs.ravel())
        assert np.array_equal(found.ids[chosen], scores.ids.ravel())
        assert np.array_equal(found.tail_logprobs, scores.tail_logprobs)
        assert np.array_equal(found.sampled_logprobs, scores.sampled_logprobs)


def test_with_the_same_tokenizer_the_teacher_reads_what_is_not_trained():
    """Given completions have such tokens between those that are trained; with another tokenizer it is so, too."""
    own = spelled("bytes")
    ids = own.encode(b"a tool has said 7")[0]
    mask = [place % 3 > 0 for place in range(len(ids))]
    sample = testing.make_sample(prompt=TASK.token_ids, completion=ids, loss_mask=[False, False, *mask], status="given")
    events = [TokenEvents(teacher, own, {}, num_ids=len(own.bytes), num_columns=64)
              for teacher in (own, spelled("bytes"))]  # fmt: skip
    same, aligned = (Aligner(each, limit=100).align(TASK, sample) for each in events)
    assert events[0].is_same
    assert not events[1].is_same
    assert same.teacher.ids.tolist() == aligned.teacher.ids.tolist() == ids
    assert same.matched.tolist() == aligned.matched.tolist() == np.flatnonzero(mask).tolist()
    assert same.student.ids.tolist() == aligned.student.ids.tolist()


def without_unknown(ids, spelling):
    """Candidates of each row, without special tokens that have no role."""
    usable = [number for number, each in enumerate(spelling.bytes) if each]
    return np.stack([np.roll(usable, -row)[: ids.shape[1]] for row in ids[:, 0]]).astype(np.int32)


def toy(merges):
    """A tokenizer of bytes with merged digits."""
    texts = [*sorted(ALPHABET), *(a + b for a, b in merges)]
    tokenizer = Tokenizer(kinds.BPE(vocab={text: number for number, text in enumerate(texts)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Spelling(PreTrainedTokenizerFast(tokenizer_object=tokenizer), "toy")


def dense(teacher, student, *, length, seed=0, before=b""):
    """The exact probabilities of the student's first token behind `before`, by all texts of the teacher of `length`
    tokens, each a digit or a merged one, and the teacher's first probabilities, by token."""
    tokens = [number for number, each in enumerate(teacher.bytes) if each and set(each) <= set(b"012")]
    rng = np.random.default_rng(seed)
    table = {}

    def probabilities(context):
        return table.setdefault(context, dict(zip(tokens, rng.dirichlet(np.ones(len(tokens))), strict=True)))

    exact = np.zeros(len(student.bytes))
    for path in itertools.product(tokens, repeat=length):
        mass = np.prod([probabilities(path[:place])[number] for place, number in enumerate(path)])
        text = teacher.spell(path)
        if text.startswith(before) and len(text) > len(before) + 3:
            exact[student.split([text[len(before) :]])[0][0]] += mass
    return exact, probabilities


MERGES = [("1", "2"), ("2", "1"), ("1", "1"), ("12", "1")]


@pytest.mark.parametrize(("ours", "theirs"), [(MERGES, []), ([], MERGES), (MERGES[:2], [("2", "0"), ("0", "1")])])
def test_events_have_the_probability_of_all_texts_that_begin_with_them(ours, theirs):
    """Dense, in float64."""
    teacher, student = toy(theirs), toy(ours)
    events = TokenEvents(teacher, student, {}, num_ids=len(student.bytes), num_columns=64)
    exact, probabilities = dense(teacher, student, length=5)
    candidates = probabilities(())
    ids, logprobs = np.array([[*candidates]]), np.log([[*candidates.values()]])
    found, without = events.matched(ids, logprobs)
    assert not found.rows.any()
    assert without.tolist() == [0]
    for start, size, logprob in zip(found.starts, found.sizes, found.logprobs, strict=True):
        members = found.members[start : start + size]
        assert exact[members].sum() == pytest.approx(np.exp(logprob), abs=1e-6), student.spell(members)


def test_a_token_of_several_tokens_of_the_teacher_is_one_of_its_continuations():
    """The student's 12 is 1 and 2 of the teacher: dense, in float64, up to the tokens that its BPE makes of what
    follows."""
    teacher, student = toy([]), toy([("1", "2"), ("1", "0"), ("2", "0"), ("0", "0"), ("0", "2")])
    events = TokenEvents(teacher, student, {}, num_ids=len(student.bytes), num_columns=64)
    exact, probabilities = dense(teacher, student, length=5)
    one, two = teacher.by_bytes[b"1"], teacher.by_bytes[b"2"]
    rows = [probabilities(()), probabilities((one,))]
    tokens = np.array([[*row] for row in rows], np.int32)
    logprobs = np.log([[*row.values()] for row in rows]).astype(np.float32)
    sampled = np.log([rows[0][one], rows[1][two]]).astype(np.float32)
    none = np.full(2, -np.inf, np.float32)
    scores = TopK(ids=tokens, logprobs=logprobs, tail_logprobs=none, sampled_logprobs=sampled)
    sample = make_sample([student.by_bytes[b"12"]], "length")
    alignment = Aligner(events, limit=10).align(TASK, sample)
    found = student_scores(events, alignment, scores, spans=TokenSpans(events))
    assert found.sampled_logprobs[0] == pytest.approx(sampled.sum())
    for column in np.flatnonzero(np.isfinite(found.logprobs[0])):
        members = found.ids[0][found.groups[0] == column]
        assert exact[members].sum() == pytest.approx(np.exp(found.logprobs[0, column]), abs=1e-6), members
    own = found.groups[0][found.ids[0] == student.by_bytes[b"12"]][0]
    assert found.ids[0][found.groups[0] == own].tolist() == [student.by_bytes[b"12"]]  # by itself


def test_an_event_within_a_token_of_the_teacher_has_no_token_that_begins_before():
    """The teacher reads 12 and 0, the student 1 and 20: its 1200 is 12, 0 and 0, and no continuation of 1."""
    teacher, student = toy([("1", "2")]), toy([("2", "0"), ("1", "20"), ("120", "0")])
    events = TokenEvents(teacher, student, {}, num_ids=len(student.bytes), num_columns=16)
    sample = make_sample([student.by_bytes[b"1"], student.by_bytes[b"20"]], "length")
    alignment = Aligner(events, limit=10).align(TASK, sample)
    scores, _ = random_scores(alignment.teacher.ids, len(teacher.bytes))
    found = student_scores(events, alignment, scores, spans=TokenSpans(events))
    own = found.groups[1][found.ids[1] == student.by_bytes[b"20"]][0]
    assert found.ids[1][found.groups[1] == own].tolist() == [student.by_bytes[b"20"]]


@pytest.mark.parametrize("function", [divergence.forward_kl, divergence.reverse_kl])
def test_the_loss_of_events_is_that_of_dense_distributions(function):
    """Values and gradients are those of autograd on whole distributions, in float64."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3, 4), (9, 4)))
    weight.requires_grad_()
    ids = torch.tensor([[0, 1, 2, 3, 4], [8, 7, 6, 5, 4], [1, 3, 5, 7, 0]])
    groups = torch.tensor([[0, 0, 2, 2, -1], [0, 1, 1, 1, -1], [-1, -1, -1, -1, -1]])
    teacher = torch.full((3, 6), -torch.inf, dtype=torch.float64)
    for row, columns in enumerate(([0, 2], [0, 1], [])):
        masses = torch.rand(len(columns) + 1, generator=generator, dtype=torch.float64).log_softmax(0)
        teacher[row, [*columns, 5]] = masses

    def of_events(logprobs, rows):
        student = by_event(Student(logprobs[:, 0], logprobs[:, :5], logprobs[:, 5]), groups[rows])
        tails = {"teacher_tail": teacher[rows, 5], "student_tail": student.tail}
        return function(teacher[rows, :5], student.candidates, tail="bucket", **tails), {}

    loss, _ = head_loss(hidden, weight, ids, of_events, tail_topk=5)
    (gradient,) = torch.autograd.grad(loss, weight)
    logprobs, expected = (hidden @ weight.T).log_softmax(1), 0.0
    for row in range(3):
        inside = [ids[row][groups[row] == column] for column in groups[row].unique() if column >= 0]
        rest = [number for number in range(9) if number not in torch.cat([ids.new_empty(0), *inside])]
        q = torch.stack([logprobs[row, each].logsumexp(0) for each in (*inside, rest)])
        p = teacher[row][teacher[row].isfinite()]
        p, q = (p, q) if function is divergence.forward_kl else (q, p)
        expected = expected + (p.exp() * (p - q)).sum()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert torch.allclose(gradient, torch.autograd.grad(expected, weight)[0], atol=1e-12)


def test_a_loss_of_the_user_gets_finite_log_probabilities_of_events(tmp_path):
    """Columns without an event are -inf for both sides, and the example of the pages multiplies p by log p."""
    file = tmp_path / "my_loss.py"
    file.write_text(documented.example("my_loss.py"), encoding="utf-8")
    own = user_divergence(f"{file}:skewed_kl")
    term = distillation([(1.0, own)], tail="bucket", beta=0.5, coefficient=1.0)
    logprobs = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).log_softmax(1).requires_grad_()
    chunk = {
        "teacher.logprobs": torch.tensor([[0.5, 0, 0.2], [0, 0, 0]]).log(),
        "teacher.tail_logprobs": torch.tensor([0.3, 1.0]).log(), "teacher.sampled_logprobs": torch.zeros(2),
        "teacher.groups": torch.tensor([[0, 0, 2], [-1, -1, -1]]),
    }  # fmt: skip
    student = Student(logprobs[:, 0], logprobs[:, :3], logprobs[:, 3:].logsumexp(1))
    value, _ = term.function(chunk, student)
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    assert value.isfinite().all()
    assert gradient.isfinite().all()
    events = torch.stack([logprobs[0, :2].logsumexp(0), logprobs[0, 2]])[None]
    tails = {"teacher_tail": chunk["teacher.tail_logprobs"][:1], "student_tail": student.tail[:1]}
    expected = own.function(chunk["teacher.logprobs"][:1, [0, 2]], events, tail="bucket", **tails)
    assert value[0].item() == pytest.approx(expected.item(), rel=1e-6)


def test_columns_of_single_tokens_keep_the_log_probabilities_to_the_last_digit():
    logprobs = torch.randn(4, 7, generator=torch.Generator().manual_seed(0)).log_softmax(1)
    found = by_event(Student(logprobs[:, 0], logprobs[:, :6], logprobs[:, 6]), torch.arange(6).repeat(4, 1))
    assert torch.equal(found.candidates, logprobs[:, :6])
    assert torch.equal(found.tail, logprobs[:, 6])


def test_special_tokens_are_aligned_by_role_and_those_without_are_not_scored():
    pair = ("bytes", "digits")
    events, own = EVENTS[pair], TOKENIZERS["bytes"]
    ids = [*own("The sum ").input_ids, own.pad_token_id, *own("of both").input_ids, own.eos_token_id]
    alignment = Aligner(events, limit=100).align(TASK, make_sample(ids))
    assert alignment.teacher.ids.tolist() == TOKENIZERS["digits"]("The sum ").input_ids + TOKENIZERS["digits"](
        "of both"
    ).input_ids + [TOKENIZERS["digits"].eos_token_id]
    place = ids.index(own.pad_token_id)
    assert not alignment.covered[place]
    assert alignment.covered.sum() == len(ids) - 1
    assert alignment.matched[-1] == len(alignment.teacher.ids) - 1
    scores, _ = random_scores(alignment.teacher.ids, len(events.teacher.bytes))
    found = student_scores(events, alignment, scores, spans=TokenSpans(events))
    assert np.isnan(found.sampled_logprobs[place])
    assert found.tail_logprobs[place] == 0


@pytest.mark.parametrize("pair", [("bytes", "digits"), ("digits", "pieces")], ids="-".join)
def test_the_name_of_a_special_token_in_a_text_is_text_for_the_teacher(pair):
    end = TOKENIZERS[pair[1]].eos_token
    events, alignment = aligned(pair, f"the sum {end} of both".encode())
    ids = alignment.teacher.ids.tolist()
    assert ids.count(TOKENIZERS[pair[1]].eos_token_id) == 1  # behind the text
    assert events.teacher.spell(ids).strip().decode().replace(" ", "") == f"thesum{end}ofboth"
    assert TOKENIZERS[pair[1]](end, add_special_tokens=False).input_ids == [TOKENIZERS[pair[1]].eos_token_id]


def test_beyond_the_teachers_length_nothing_is_scored():
    _, whole = aligned(("digits", "bytes"), b"The weather of the teacher 123")
    _, cut = aligned(("digits", "bytes"), b"The weather of the teacher 123", limit=6)
    assert cut.teacher.ids.tolist() == whole.teacher.ids[:5].tolist()
    assert cut.covered.tolist() == [end <= cut.teacher.ends[-1] for end in whole.student.ends]
    assert not cut.covered[-1]


@pytest.mark.parametrize("spans", [True, False])
def test_the_scorer_sends_the_teachers_tokens_and_counts_the_students(spans):
    pair = ("bytes", "digits")
    texts, read = [b"The sum of 12345", b"", b"  the weather"], []

    def score(reading):
        read.append(reading)
        return random_scores(reading.token_ids[reading.positions], len(EVENTS[pair].teacher.bytes))[0]

    samples = [make_sample([*EVENTS[pair].student.encode(text)[0], *([] if not text else [TOKENIZERS[
        "bytes"].eos_token_id])]) for text in texts]  # fmt: skip
    aligner = Aligner(EVENTS[pair], limit=100)
    scorer = CrossTokenizerScorer(LocalTeacher(score, delay=0.01), aligner, spans=spans)
    found = [each.result(20) for each in scorer.submit([(TASK, sample) for sample in samples])]
    read.sort(key=lambda reading: -len(reading.token_ids))
    assert [reading.token_ids.tolist()[:1] for reading in read] == [[3], [3]]  # the teacher's prompt
    assert [bytes(EVENTS[pair].teacher.spell(reading.token_ids[reading.positions])) for reading in read] == [
        texts[0], texts[2],
    ]  # fmt: skip
    counts = [0, 0]
    for sample, scores in zip(samples, found, strict=True):
        alignment, vocabulary = aligner.align(TASK, sample), len(EVENTS[pair].teacher.bytes)
        own = random_scores(alignment.teacher.ids, vocabulary)[0] if len(alignment.teacher.ids) else None
        expected = student_scores(EVENTS[pair], alignment, own, spans=SPANS[pair] if spans else None)
        for name, array in expected.parts().items():
            assert np.array_equal(array, scores.parts()[name], equal_nan=True), name
        counts = [counts[0] + (alignment.matched >= 0).sum(), counts[1] + len(alignment.matched)]
    with scorer.uncounted():
        scorer.submit([(TASK, samples[0])])
    metrics = TeacherRouter({"default": scorer}).take_metrics(Clock())
    matched = counts[0] / counts[1]
    assert 0 < matched < 1
    assert metrics["teacher/tokens/matched_fraction"] == matched
    assert metrics["teacher/tokens/span_fraction"] == pytest.approx((1 - matched) * spans)
    assert metrics["teacher/tokens/unscored_fraction"] == pytest.approx((1 - matched) * (not spans))


def test_an_error_of_the_teacher_reaches_the_trainer():
    def fail(_reading):
        raise ValueError("broken")

    scorer = CrossTokenizerScorer(LocalTeacher(fail), Aligner(EVENTS[("bytes", "digits")], limit=100), spans=True)
    (future,) = scorer.submit([(TASK, make_sample([5, 6]))])
    with pytest.raises(ValueError, match="broken"):
        future.result(20)

"""Scores on disk: what belongs to which teacher, what is looked up, and what damage, kills and full disks do."""

import contextlib
import dataclasses
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from unittest import mock

import msgspec
import numpy as np
import pytest
from processes import TIMEOUT, wait_until

from hybrid_gkd.errors import TeacherError, TeacherMismatch
from hybrid_gkd.runtime.spans import Clock
from hybrid_gkd.runtime.waiting import Timeout
from hybrid_gkd.scoring.cached_teacher import CachedTeacher, stored_teacher
from hybrid_gkd.scoring.teacher_scorer import TeacherScorer, completion_view
from hybrid_gkd.teacher.client.connection import StudentNeeds
from hybrid_gkd.teacher.client.score_store import FILE, ScoredBy, ScoreStore
from hybrid_gkd.teacher.protocol import ModelInfo
from hybrid_gkd.teacher.server.local import child_environment
from hybrid_gkd.testing import LocalTeacher, make_sample, tail_of
from hybrid_gkd.types import Reading, Task, TopK

K, V = 3, 50
MODEL = ModelInfo(
    model="teacher", backend="hf", vocab_size=V, num_embeddings=V, tokenizer_hash="h", max_topk=8,
    max_sequence_length=64, any_temperature=True, weights="w",
)  # fmt: skip
SCORED_BY = ScoredBy(model=MODEL, topk=K, temperature=1.0, num_ids=V)
NEEDS = StudentNeeds(tokenizer_hash="h", tokenizer_size=V, max_sequence_length=64, topk=K, temperature=1.0)
FIELDS = ("ids", "logprobs", "tail_logprobs", "sampled_logprobs")


def scores_of(reading):
    """Scores that depend on all tokens, as they come over the wire."""
    targets = reading.token_ids[reading.positions]
    logprobs = np.sort(-1.5 - np.arange(K) - reading.token_ids.sum() % 7 / 8 * np.ones((len(targets), K)))[:, ::-1]
    logprobs = logprobs.astype(np.float16).astype(np.float32)
    return TopK(
        ids=(targets[:, None] + np.arange(K)).astype(np.int32) % V, logprobs=logprobs, tail_logprobs=tail_of(logprobs),
        sampled_logprobs=logprobs[:, 0],
    )  # fmt: skip


def pair(row, *ids, status="given"):
    task = Task(index=row, token_ids=np.array([row + 1, 2], np.int32), text="")
    return task, make_sample(row, prompt=task.token_ids, completion=ids, status=status)


def reading(row, *ids, **options):
    return completion_view(*pair(row, *ids, **options))


def expect_same(found, expected):
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        assert getattr(found, name).dtype == getattr(expected, name).dtype


@pytest.fixture
def store(tmp_path):
    store = ScoreStore(tmp_path / "store")
    yield store
    store.close()


def asked_of():
    """A teacher, and the names of the readings that it has scored."""
    asked = []

    def score(reading):
        asked.append(reading.name)
        return scores_of(reading)

    return LocalTeacher(score), asked


def results(teacher, readings):
    return [future.result(0) for future in teacher.submit(readings)]


def get(store, reading, scored_by=SCORED_BY):
    return store.get(scored_by, reading)


def keep(store, scored_by):
    """Store the scores of a reading by a teacher."""
    store.put(scored_by, reading(0, 7), scores_of(reading(0, 7)))


def damage(store, change):
    """Change the content of all entries on disk."""
    with sqlite3.connect(store.folder / FILE) as database:
        for key, blob in database.execute("SELECT key, scores FROM entries").fetchall():
            database.execute("UPDATE entries SET scores = ? WHERE key = ?", (change(blob), key))


def test_an_entry_is_what_came_over_the_wire(store):
    asked = reading(0, 7, 8, 9)
    assert get(store, asked) is None
    assert store.put(SCORED_BY, asked, scores_of(asked))
    store.close()
    again = ScoreStore(store.folder)
    expect_same(get(again, asked), scores_of(asked))
    assert len(again) == 1
    again.close()


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(SCORED_BY, topk=2),
        dataclasses.replace(SCORED_BY, temperature=0.5),
        dataclasses.replace(SCORED_BY, num_ids=V - 1),
        dataclasses.replace(SCORED_BY, model=msgspec.structs.replace(MODEL, weights="x")),
    ],
)
def test_another_teacher_or_setting_has_entries_of_its_own(other):
    assert other.key(reading(0, 7)) != SCORED_BY.key(reading(0, 7))


def test_so_have_other_tokens_and_positions():
    first = reading(0, 7, 8)
    others = [
        reading(0, 7, 9), reading(1, 7, 8), reading(0, 7), dataclasses.replace(first, positions=first.positions[:1]),
        dataclasses.replace(first, positions=first.positions[1:]),
    ]  # fmt: skip
    assert len({SCORED_BY.key(each) for each in [first, *others]}) == 6
    as_lists = Reading(token_ids=first.token_ids.tolist(), positions=first.positions.tolist(), name="another name")
    assert SCORED_BY.key(as_lists) == SCORED_BY.key(first)


def test_a_teacher_that_does_not_say_its_weights_is_refused():
    with pytest.raises(TeacherError, match="the teacher teacher reports no fingerprint of its weights"):
        dataclasses.replace(SCORED_BY, model=msgspec.structs.replace(MODEL, weights=""))


def test_given_answers_are_scored_once_and_others_every_time(store):
    client, asked = asked_of()
    teacher = CachedTeacher(store, SCORED_BY, client=client)
    mixed = [reading(0, 7), reading(1, 8, status="stop"), reading(2, 9)]
    first, second = results(teacher, mixed), results(teacher, mixed)
    for found in (first, second):
        for one, each in zip(found, mixed, strict=True):
            expect_same(one, scores_of(each))
    assert asked == [each.name for each in mixed] + [mixed[1].name]
    assert len(store) == 2
    assert store.teachers() == [SCORED_BY]


def test_the_fraction_of_hits_is_a_metric_and_a_validation_counts_in_none(store):
    client, _ = asked_of()
    scorer = TeacherScorer(CachedTeacher(store, SCORED_BY, client=client))

    def score(*pairs):
        found = scorer.start(list(pairs))
        return scorer.take_scores(found, len(pairs), timeout=Timeout(1.0), check=lambda: None)

    score(pair(0, 7), pair(1, 8))
    assert scorer.take_metrics(Clock())["teacher/cache_hit_fraction"] == 0.0
    score(pair(0, 7), pair(1, 8), pair(2, 9), pair(3, 9, status="stop"))
    with scorer.uncounted():
        score(pair(2, 9))
    assert scorer.take_metrics(Clock())["teacher/cache_hit_fraction"] == pytest.approx(2 / 3)
    score(pair(3, 9, status="stop"))
    assert "teacher/cache_hit_fraction" not in scorer.take_metrics(Clock())


@pytest.mark.parametrize(
    "change",
    [
        lambda blob: blob[:-9] + bytes([blob[-9] ^ 1]) + blob[-8:],  # a bit of an array
        lambda blob: blob[:20] + bytes([blob[20] ^ 1]) + blob[21:],  # of the header
        lambda blob: blob[: len(blob) // 2],
        lambda blob: b"",
    ],
)
def test_a_damaged_entry_is_scored_again_and_replaced(store, caplog, change):
    client, asked = asked_of()
    teacher = CachedTeacher(store, SCORED_BY, client=client)
    given = reading(4, 7, 8, 9)
    results(teacher, [given])
    damage(store, change)
    expect_same(*results(teacher, [given]), scores_of(given))
    assert "row 5, sample 0: ignoring damaged scores in" in caplog.text
    assert asked == [given.name] * 2
    expect_same(get(store, given), scores_of(given))


def test_a_full_store_says_so_once_and_keeps_what_it_has(tmp_path, caplog):
    client, asked = asked_of()
    store = ScoreStore(tmp_path, max_bytes=40_000)
    teacher = CachedTeacher(store, SCORED_BY, client=client)
    many = [reading(row, *range(20)) for row in range(200)]
    results(teacher, many)
    assert 0 < len(store) < len(many)
    assert caplog.text.count("cache_gigabytes") == 1
    kept, before = len(store), len(asked)
    results(teacher, many)
    assert len(asked) == before + len(many) - kept
    store.close()


def test_a_disk_that_takes_no_more_does_not_end_the_run(store, caplog):
    client, _ = asked_of()
    teacher = CachedTeacher(store, SCORED_BY, client=client)
    store.put = lambda *args: (_ for _ in ()).throw(TeacherError("cannot be written: disk is full"))
    for row in range(2):
        expect_same(*results(teacher, [reading(row, 7)]), scores_of(reading(row, 7)))
    assert caplog.text.count("disk is full") == 1


def test_without_a_teacher_the_store_answers_and_what_it_lacks_is_an_error(store):
    client, _ = asked_of()
    results(CachedTeacher(store, SCORED_BY, client=client), [reading(0, 7)])
    alone = CachedTeacher(store, stored_teacher(store, NEEDS), client=None)
    kept, missing, drawn = alone.submit([reading(0, 7), reading(6, 7), reading(0, 7, status="stop")])
    expect_same(kept.result(0), scores_of(reading(0, 7)))
    with pytest.raises(TeacherError, match=r"^row 7, sample 0 has no readable scores in .*store .*score.*model.path"):
        missing.result(0)
    with pytest.raises(TeacherError, match=r"^row 1, sample 0 is not a given completion, and there is no teacher bes"):
        drawn.result(0)
    assert alone.describe().endswith("store, without a teacher")
    assert alone.drain_metrics().cache_lookups == 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"topk": 5}, r"has scores of teacher \(.*, K 3, temperature 1\.0, .*\); the student needs K 5"),
        ({"temperature": 0.5}, r"the student needs K 3 .*, temperature 0.5"),
        ({"tokenizer_hash": "other"}, "tokenizer hash: the teacher has h, the student needs other"),
    ],
)
def test_the_handshake_with_a_store(store, changed, message):
    with pytest.raises(TeacherMismatch, match=r"has no scores; create them: python -m hybrid_gkd.teacher score"):
        stored_teacher(store, NEEDS)
    keep(store, SCORED_BY)
    assert stored_teacher(store, NEEDS) == SCORED_BY
    with pytest.raises(TeacherMismatch, match=message):
        stored_teacher(store, dataclasses.replace(NEEDS, **changed))


def test_the_limits_of_a_service_are_not_those_of_its_scores(store):
    """The same weights, served in another way, are the same teacher."""
    for length in (8, 32):
        model = msgspec.structs.replace(MODEL, max_sequence_length=length, max_topk=K, backend=f"b{length}")
        keep(store, dataclasses.replace(SCORED_BY, model=model))
    assert stored_teacher(store, NEEDS).model.max_sequence_length == 8


def test_a_store_of_two_teachers_has_to_be_asked_through_one(store):
    for weights in ("w", "x"):
        model = msgspec.structs.replace(MODEL, weights=weights, model=f"teacher {weights}")
        scored_by = dataclasses.replace(SCORED_BY, model=model)
        CachedTeacher(store, scored_by, client=asked_of()[0])
        assert len(store.teachers()) == (weights == "x")  # one that has scored nothing is none of the store
        keep(store, scored_by)
    with pytest.raises(TeacherMismatch, match=r"several teachers: teacher w .*, teacher x .*into another folder"):
        stored_teacher(store, NEEDS)


@pytest.mark.parametrize(
    "changed",
    [
        {"num_ids": SCORED_BY.num_ids + 1}, {"topk": SCORED_BY.topk + 1}, {"temperature": 1.0000001},
        {"model": msgspec.structs.replace(MODEL, weights="other")},
    ],
    ids=str,
)
def test_teachers_with_other_scores_have_other_descriptions(changed):
    other = dataclasses.replace(SCORED_BY, **changed)
    assert other.key(reading(0, 7)) != SCORED_BY.key(reading(0, 7))
    assert str(other) != str(SCORED_BY)


def test_a_file_that_is_no_store_is_refused(tmp_path):
    (tmp_path / FILE).write_text("something else, and longer than the header of a database" * 20, encoding="utf-8")
    with pytest.raises(TeacherError, match=r"file is not a database"):
        ScoreStore(tmp_path)
    with pytest.raises(TeacherError, match="cannot be opened as a store of scores"):
        ScoreStore(tmp_path / FILE / "below")


def test_a_store_that_is_deleted_in_use_takes_no_more_and_says_so(store, caplog):
    client, asked = asked_of()
    teacher = CachedTeacher(store, SCORED_BY, client=client)
    results(teacher, [reading(0, 7)])
    shutil.rmtree(store.folder)
    for row in (1, 2):
        expect_same(*results(teacher, [reading(row, 7)]), scores_of(reading(row, 7)))
    assert caplog.text.count(f"{FILE} was deleted or replaced while it was in use") == 1
    assert len(asked) == 3


def test_damaged_pages_are_found_and_the_error_says_what_to_do(store, caplog):
    given = {row: reading(row, *range(40)) for row in range(200)}
    for each in given.values():
        store.put(SCORED_BY, each, scores_of(each))
    store.close()
    file = store.folder / FILE
    content = bytearray(file.read_bytes())
    for page in range(3, len(content) // 4096, 7):
        content[page * 4096 : page * 4096 + 400] = bytes(range(100)) * 4
    file.write_bytes(content)
    with contextlib.closing(ScoreStore(store.folder)) as again:
        lacking = again.missing(SCORED_BY, given)
        assert 0 < len(lacking) <= len(given)
        assert f"{store.folder}: {len(lacking)} stored scores are damaged, the first of row " in caplog.text
        rule = "malformed; the file is damaged: delete it, and its completions are scored again"
        with pytest.raises(TeacherError, match=rule):
            [again.put(SCORED_BY, given[row], scores_of(given[row])) for row in lacking]


def test_reading_creates_no_store(tmp_path):
    with pytest.raises(TeacherError, match=r"nothing has no scores; create them: python -m hybrid_gkd.teacher score"):
        ScoreStore(tmp_path / "nothing", create=False)
    assert not (tmp_path / "nothing").exists()


def test_a_folder_that_cannot_be_written_is_named_as_the_reason(tmp_path, monkeypatch):
    error = sqlite3.OperationalError("unable to open database file")
    error.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
    monkeypatch.setattr(sqlite3, "connect", mock.Mock(return_value=mock.Mock(execute=mock.Mock(side_effect=error))))
    with pytest.raises(TeacherError, match="unable to open database file; its folder must be writable, also to read"):
        ScoreStore(tmp_path)


def write_for_ever(folder):
    """Run in a process of its own."""
    store = ScoreStore(folder)
    for row in range(10**6):
        given = reading(row, *range(row % 40 + 1))
        store.put(SCORED_BY, given, scores_of(given))
        print(row, flush=True)


@pytest.mark.slow
def test_what_a_killed_process_has_written_is_whole(tmp_path):
    folder = tmp_path / "store"
    code = f"import sys; sys.path[:0] = {sys.path!r}; import {__name__} as own; own.write_for_ever({str(folder)!r})"
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=log, env=child_environment())
        wait_until(lambda: process.poll() is not None or (tmp_path / "log").read_bytes().count(b"\n") > 50)
        time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait(TIMEOUT)
    number = (tmp_path / "log").read_bytes().count(b"\n")
    store = ScoreStore(folder)
    assert len(store) >= number > 50
    for row in range(number):
        given = reading(row, *range(row % 40 + 1))
        expect_same(get(store, given), scores_of(given))
    store.put(SCORED_BY, reading(0, 5), scores_of(reading(0, 5)))
    store.close()

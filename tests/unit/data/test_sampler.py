import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_gkd.data.sampler import PromptSampler
from hybrid_gkd.errors import DataError


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 30), st.booleans(), st.integers(0, 5))
def test_every_epoch_holds_every_prompt_once_and_a_batch_none_twice(num_prompts, batch_size, shuffle, seed):
    batch_size = min(batch_size, num_prompts)
    sampler = PromptSampler(num_prompts, batch_size, shuffle, seed)
    steps, left = sampler.num_steps(5)
    assert steps * batch_size + left == 5 * num_prompts
    batches = [sampler.batch(step)[1] for step in range(1, steps + 1)]
    assert all(len(set(batch)) == len(batch) == batch_size for batch in batches)
    drawn = np.concatenate(batches)
    for epoch in range(len(drawn) // num_prompts):
        assert len(set(drawn[epoch * num_prompts : (epoch + 1) * num_prompts])) == num_prompts


def test_epochs_have_orders_of_their_own_and_a_batch_is_of_the_epoch_that_it_begins_in():
    sampler = PromptSampler(10, 4, shuffle=True, seed=1)
    epochs, batches = zip(*(sampler.batch(step) for step in range(1, 6)), strict=True)
    assert epochs == (0, 0, 0, 1, 1)
    drawn = np.concatenate(batches)
    assert not np.array_equal(drawn[:10], drawn[10:])


def test_a_batch_depends_on_the_step_and_the_seed_alone():
    """In whatever order the steps are asked for."""
    first, resumed = PromptSampler(50, 8, True, 7), PromptSampler(50, 8, True, 7)
    for step in range(1, 40):
        first.batch(step)
    np.testing.assert_array_equal(first.batch(20)[1], resumed.batch(20)[1])
    assert not np.array_equal(first.batch(20)[1], PromptSampler(50, 8, True, 8).batch(20)[1])


def test_without_shuffling_the_order_of_the_file_is_kept():
    sampler = PromptSampler(5, 2, shuffle=False, seed=0)
    found = [list(sampler.batch(step)[1]) for step in range(1, 7)]
    assert found == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4], [0, 1]]


def test_one_batch_may_be_the_whole_data_but_not_more():
    assert sorted(PromptSampler(4, 4, True, 0).batch(3)[1]) == [0, 1, 2, 3]
    with pytest.raises(DataError, match=r"data\.train_batch_size.*\(3\); got 4"):
        PromptSampler(3, 4, True, 0)
    rule = r"data\.train_batch_size: .* \(4 of 262 in an epoch, by the weights of data\.train_files\); got 8"
    with pytest.raises(DataError, match=rule):
        PromptSampler([(256, 0.01), (6, 0.1)], 8, True, 0)


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.floats(0.05, 1)), min_size=1, max_size=4), st.integers(1, 8),
    st.booleans(), st.integers(0, 3),
)  # fmt: skip
def test_an_epoch_takes_its_share_of_every_part_in_turns(parts, batch_size, shuffle, seed):
    counts = [max(1, round(number * share)) for number, share in parts]
    batch_size = min(batch_size, sum(counts))
    sampler = PromptSampler(parts, batch_size, shuffle, seed)
    steps, left = sampler.num_steps(6)
    assert steps * batch_size + left == 6 * sum(counts)
    batches = [sampler.batch(step)[1] for step in range(1, steps + 1)]
    assert all(len(set(batch)) == len(batch) == batch_size for batch in batches)
    drawn, start = np.concatenate(batches), 0
    whole = len(drawn) // sum(counts)
    for (number, _), count in zip(parts, counts, strict=True):
        own = drawn[: whole * sum(counts)]
        own = own[(own >= start) & (own < start + number)]
        assert len(own) == whole * count
        times = np.bincount(own - start, minlength=number)
        assert times.max() - times.min() <= 1  # none again before all others
        start += number


def test_a_share_is_drawn_the_same_after_a_resume():
    parts = [(9, 1.0), (20, 0.25)]
    first, resumed = PromptSampler(parts, 4, True, 7), PromptSampler(parts, 4, True, 7)
    for step in range(1, 30):
        first.batch(step)
    np.testing.assert_array_equal(first.batch(17)[1], resumed.batch(17)[1])

import numpy as np
import pytest

from hybrid_gkd.data.sampler import PromptSampler
from hybrid_gkd.errors import DataError


def test_an_epoch_holds_each_prompt_at_most_once_and_leaves_the_incomplete_batch_out():
    sampler = PromptSampler(10, 3, shuffle=True, seed=1)
    assert sampler.steps_per_epoch == 3
    epochs, batches = zip(*(sampler.batch(step) for step in range(1, 7)), strict=True)
    assert epochs == (0, 0, 0, 1, 1, 1)
    for epoch in (batches[:3], batches[3:]):
        assert all(len(batch) == 3 for batch in epoch)
        assert len(set(np.concatenate(epoch))) == 9
    assert not np.array_equal(np.concatenate(batches[:3]), np.concatenate(batches[3:]))


def test_a_batch_depends_on_the_step_and_the_seed_alone():
    first, resumed = PromptSampler(50, 8, True, 7), PromptSampler(50, 8, True, 7)
    for step in range(1, 20):
        first.batch(step)
    np.testing.assert_array_equal(first.batch(20)[1], resumed.batch(20)[1])
    assert not np.array_equal(first.batch(20)[1], PromptSampler(50, 8, True, 8).batch(20)[1])


def test_without_shuffling_the_order_of_the_file_is_kept():
    sampler = PromptSampler(5, 2, shuffle=False, seed=0)
    assert [list(sampler.batch(step)[1]) for step in (1, 2, 3)] == [[0, 1], [2, 3], [0, 1]]


def test_one_batch_may_be_the_whole_data_but_not_more():
    assert sorted(PromptSampler(4, 4, True, 0).batch(3)[1]) == [0, 1, 2, 3]
    with pytest.raises(DataError, match=r"data\.train_batch_size.*\(3\); got 4"):
        PromptSampler(3, 4, True, 0)

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import Counter

import pytest

from unirl.data import PromptSampler


@pytest.mark.parametrize(("length", "size"), [(10, 4), (7, 7), (12, 5), (3, 8)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_no_prompt_is_skipped_or_repeated_within_an_epoch(length, size, shuffle):
    sampler = PromptSampler(length, size, seed=3, shuffle=shuffle)
    # `size` epochs are exactly `length` batches.
    stream = [row for index in range(length) for row in sampler.batch(index)]
    for epoch in range(size):
        assert sorted(stream[epoch * length : (epoch + 1) * length]) == list(range(length))
    assert Counter(stream) == dict.fromkeys(range(length), size)


def test_batch_is_a_function_of_its_index():
    forward = PromptSampler(10, 4, seed=3)
    batches = [forward.batch(index) for index in range(20)]
    backward = PromptSampler(10, 4, seed=3)
    assert [backward.batch(index) for index in reversed(range(20))] == batches[::-1]


def test_epochs_and_seeds_give_different_orders():
    orders = {tuple(PromptSampler(20, 20, seed=seed).batch(epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert PromptSampler(4, 6, seed=0, shuffle=False).batch(1) == [2, 3, 0, 1, 2, 3]


def test_every_row_is_equally_likely_in_every_place():
    places = Counter(PromptSampler(4, 4, seed=0).batch(epoch)[0] for epoch in range(4000))
    # 1000 each; the standard deviation is 27.
    assert all(abs(count - 1000) < 130 for count in places.values())


def test_saved_cursor_goes_on_where_it_stopped():
    whole = PromptSampler(10, 4, seed=1)
    expected = [whole.take() for _ in range(9)]
    first = PromptSampler(10, 4, seed=1)
    taken = [first.take() for _ in range(4)]
    second = PromptSampler(10, 4, seed=1)
    second.load_state_dict(first.state_dict())
    assert taken + [second.take() for _ in range(5)] == expected


@pytest.mark.parametrize("changed", [{"seed": 2}, {"batch_size": 5}, {"dataset_len": 11}, {"shuffle": False}])
def test_a_cursor_of_other_batches_is_refused_by_name(changed):
    arguments = {"dataset_len": 10, "batch_size": 4, "seed": 1, "shuffle": True}
    state = PromptSampler(**arguments).state_dict()
    with pytest.raises(ValueError, match=next(iter(changed))):
        PromptSampler(**{**arguments, **changed}).load_state_dict(state)


def test_impossible_sizes_are_errors():
    with pytest.raises(ValueError, match="dataset has 0 rows"):
        PromptSampler(0, 4, seed=0)
    with pytest.raises(ValueError, match="batch_size is 0"):
        PromptSampler(4, 0, seed=0)
    with pytest.raises(ValueError, match="batch index is -1"):
        PromptSampler(4, 1, seed=0).batch(-1)

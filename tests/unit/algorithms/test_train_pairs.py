from collections import Counter
from types import SimpleNamespace

import pytest

from miles_core.algorithms.train_pairs import (
    convert_samples_to_train_data,
    expand_samples_to_train_pairs,
    micro_batches,
)
from miles_core.data.sample import Sample
from miles_core.errors import InputError, StageError

ARGS = SimpleNamespace(
    diffusion_num_steps=4,
    n_samples_per_prompt=2,
    disable_grpo_std_normalization=True,
    globalize_reward_mean=False,
    globalize_reward_std=False,
)


def sample(index: int, steps: list[int] | None, *, reward: float = 0.0, removed: bool = False) -> Sample:
    return Sample(
        group_index=index // 2,
        index=index,
        prompt="",
        seed=index,
        sde_step_indices=steps,
        reward=reward,
        remove_sample=removed,
    )


def grid(samples: int, steps: list[int]) -> dict[str, list[int]]:
    return {
        "sample": [s for s in range(samples) for _ in steps],
        "step": [t for _ in range(samples) for t in steps],
    }


def test_a_pair_for_each_sde_step_of_each_sample_in_the_order_given() -> None:
    given = [sample(12, [1, 3]), sample(11, None, removed=True)]
    pairs = expand_samples_to_train_pairs(ARGS, given, [0.5, -0.5], [1.0, 0.0])
    assert pairs == {
        "sample": [0, 0, 1, 1, 1, 1],
        "sample_index": [12, 12, 11, 11, 11, 11],
        "step": [1, 3, 0, 1, 2, 3],
        "advantage": [0.5, 0.5, -0.5, -0.5, -0.5, -0.5],
        "loss_mask": [1.0, 1.0, 0.0, 0.0, 0.0, 0.0],
    }


def test_conversion_normalizes_and_then_expands() -> None:
    given = [
        sample(0, [0], reward=1.0),
        sample(1, [0], reward=4.0),
        sample(2, [2], reward=7.0),
        sample(3, [2], reward=7.0),
    ]
    pairs = convert_samples_to_train_data(ARGS, given)
    assert pairs["advantage"] == [-1.5, 1.5, 0.0, 0.0] and pairs["step"] == [0, 0, 2, 2]


@pytest.mark.parametrize(("steps", "message"), [([], "has no step"), ([1, 4], "has 4"), ([-1], "has -1")])
def test_a_step_list_that_trains_nothing_is_an_error(steps: list[int], message: str) -> None:
    with pytest.raises(StageError, match=f"sample 5 {message} among its SDE steps"):
        expand_samples_to_train_pairs(ARGS, [sample(5, steps)], [0.0], [0.0])


def test_a_reward_for_each_sample_is_required() -> None:
    with pytest.raises(StageError, match="1 samples, 2 normalized"):
        expand_samples_to_train_pairs(ARGS, [sample(0, [1])], [0.0, 1.0], [0.0])


@pytest.mark.parametrize("order", ["sample_major", "timestep_major"])
@pytest.mark.parametrize(
    ("size", "tile"), [(1, None), (4, None), (100, None), (1, (1, 1)), (1, (2, 3)), (1, (9, 2)), (1, (3, 9))]
)
@pytest.mark.parametrize("windows", [[[2, 3, 4]] * 5, [[0, 1], [1, 2], [4], [0, 1, 2, 3, 4], [3, 4]]])
def test_every_pair_is_in_exactly_one_micro_batch(size, tile, order, windows) -> None:
    pairs = {
        "sample": [s for s, steps in enumerate(windows) for _ in steps],
        "step": [t for steps in windows for t in steps],
    }
    batches = micro_batches(pairs, micro_batch_size=size, tile=tile, order=order)
    counts = Counter(row for rows in batches for row in rows)
    assert counts == dict.fromkeys(range(len(pairs["step"])), 1)
    limit = size if tile is None else tile[0] * tile[1]
    assert all(1 <= len(rows) <= limit for rows in batches)


def test_flat_batches_follow_the_order() -> None:
    pairs = grid(3, [5, 7])
    assert micro_batches(pairs, micro_batch_size=4, tile=None, order="sample_major") == [[0, 1, 2, 3], [4, 5]]
    assert micro_batches(pairs, micro_batch_size=4, tile=None, order="timestep_major") == [[0, 2, 4, 1], [3, 5]]


def test_tiles_are_samples_times_timesteps() -> None:
    pairs = grid(3, [5, 6, 7])
    tiled = {
        order: micro_batches(pairs, micro_batch_size=1, tile=(2, 2), order=order)
        for order in ("sample_major", "timestep_major")
    }
    assert tiled["sample_major"] == [[0, 1, 3, 4], [2, 5], [6, 7], [8]]
    assert tiled["timestep_major"] == [[0, 3, 1, 4], [6, 7], [2, 5], [8]]


def test_a_tile_is_samples_first_in_both_orders() -> None:
    pairs = grid(4, [5, 6, 7])
    assert micro_batches(pairs, micro_batch_size=1, tile=(4, 1), order="timestep_major") == [
        [0, 3, 6, 9],
        [1, 4, 7, 10],
        [2, 5, 8, 11],
    ]
    assert micro_batches(pairs, micro_batch_size=1, tile=(1, 3), order="timestep_major") == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [9, 10, 11],
    ]
    by_sample = micro_batches(pairs, micro_batch_size=1, tile=(4, 1), order="sample_major")
    assert by_sample == micro_batches(pairs, micro_batch_size=1, tile=(4, 1), order="timestep_major")


def test_samples_keep_the_order_in_which_they_appear() -> None:
    pairs = {"sample": [4, 4, 1, 1], "step": [3, 2, 3, 2]}
    assert micro_batches(pairs, micro_batch_size=2, tile=None, order="sample_major") == [[1, 0], [3, 2]]
    assert micro_batches(pairs, micro_batch_size=2, tile=None, order="timestep_major") == [[1, 3], [0, 2]]


def test_no_pairs_make_no_batches_and_empty_batches_are_refused() -> None:
    assert micro_batches({"sample": [], "step": []}, micro_batch_size=2, tile=None, order="sample_major") == []
    with pytest.raises(InputError, match="0 pairs"):
        micro_batches(grid(1, [0]), micro_batch_size=0, tile=None, order="sample_major")
    with pytest.raises(InputError, match="2 x 0 pairs"):
        micro_batches(grid(1, [0]), micro_batch_size=1, tile=(2, 0), order="sample_major")

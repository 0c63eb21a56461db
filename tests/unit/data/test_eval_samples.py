"""An evaluation's samples: fixed, and with noise that no training sample has."""

import pytest
import torch

from miles_core.data.data_source import SEED_MODULUS, sample_seed
from miles_core.data.eval_samples import END_SEED, FIRST_SEED, eval_samples, eval_seed
from miles_core.data.prompts import Prompt
from miles_core.errors import InputError

PROMPTS = [Prompt(0, "a"), Prompt(1, "b", {"rm_type": "ocr"}), Prompt(2, "c")]
LARGEST_GROUP = 1_000_000


def noise(seed: int) -> torch.Tensor:
    return torch.randn(8, generator=torch.Generator("cpu").manual_seed(seed))


def test_samples_are_numbered_through_and_lie_n_seeds_apart() -> None:
    """Outputs of a request use seed + i: prompts that lie closer share noise."""
    groups = eval_samples(PROMPTS, 4)
    assert [[s.index for s in group] for group in groups] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [[s.group_index for s in group] for group in groups] == [[0] * 4, [1] * 4, [2] * 4]
    seeds = [s.seed for group in groups for s in group]
    assert seeds == list(range(FIRST_SEED, FIRST_SEED + 12))
    assert [group[0].rm_type for group in groups] == [None, "ocr", None]
    assert [group[0].prompt for group in groups] == ["a", "b", "c"]


def test_no_training_sample_has_a_seed_of_evaluation() -> None:
    largest = sample_seed(SEED_MODULUS - 1, 0, LARGEST_GROUP, LARGEST_GROUP - 1)
    assert largest < FIRST_SEED == eval_seed(0, LARGEST_GROUP, 0)


def test_no_seed_of_evaluation_means_the_noise_of_a_smaller_one() -> None:
    """A CPU generator takes a seed's low 32 bits: training's seed 42 far away is training's seed 42."""
    assert torch.equal(noise(42), noise(2**32 + 42))
    assert END_SEED <= 2**32
    assert not torch.equal(noise(FIRST_SEED + 42), noise(42))


def test_more_samples_than_seeds_are_refused() -> None:
    many = [Prompt(i, "a") for i in range(1074)]
    with pytest.raises(InputError, match="n-samples-per-eval-prompt"):
        eval_samples(many, LARGEST_GROUP)

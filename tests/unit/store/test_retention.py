"""The retention rule: which iterations' large files stay."""

import pytest

from miles_core.store.retention import kept, rules, to_prune


@pytest.mark.parametrize(
    ("line", "keep", "at", "stay", "go"),
    [
        ([], 2, 0, set(), []),
        ([0], 2, 0, {0}, []),
        ([0, 1], 2, 1, {0, 1}, []),
        ([0, 1, 2], 2, 2, {1, 2}, [0]),
        ([0, 1, 2, 3, 4], 2, 4, {3, 4}, [0, 1, 2]),
        ([0, 1, 2, 3, 4], 5, 4, {0, 1, 2, 3, 4}, []),
        ([0, 1, 2, 3, 4], 1, 4, {4}, [0, 1, 2, 3]),
        ([0, 1, 2, 3, 4], 0, 4, {0, 1, 2, 3, 4}, []),
        # An older iteration was healed: what the next one follows from stays beside the newest.
        ([0, 1, 2, 3, 4, 5], 2, 2, {1, 2, 4, 5}, [0, 3]),
        # An iteration that is not on the line goes when newer ones are.
        ([0, 3, 4], 2, 4, {3, 4}, [0, 1, 2]),
        # One that is not on the line yet stays.
        ([0, 1], 1, 1, {1}, [0]),
    ],
)
def test_the_rule(line: list[int], keep: int, at: int, stay: set[int], go: list[int]) -> None:
    existing = range(6)
    assert kept(line, keep, at) == stay
    assert to_prune([i for i in existing if i <= max(line, default=0) or i == 5], line, keep, at) == go


def test_each_option_rules_its_own_folders() -> None:
    latents, checkpoints = rules(full_checkpoints=3, latents_iterations=7)
    assert (latents.stage, latents.folders, latents.keep) == ("rollout", ("latents", "conditioning"), 7)
    assert latents.option == "--keep-latents-iterations 7"
    assert (checkpoints.stage, checkpoints.folders, checkpoints.keep) == ("update", ("checkpoint",), 3)
    assert checkpoints.option == "--keep-full-checkpoints 3"

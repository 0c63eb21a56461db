"""How ranks share samples, and how they name the one that is late."""

import time

import pytest
import torch.distributed as dist

from miles_core.errors import StageError
from miles_core.training.distributed import slice_of
from miles_core.training.roll_call import RollCall

LOST = RuntimeError("[/src/gloo/transport/tcp/pair.cc:561] Connection closed by peer\nmore")
PLACE = "update: step 2 of 4, forward 3 of 8"


@pytest.mark.parametrize("mode", ["contiguous", "stride"])
@pytest.mark.parametrize(("count", "world"), [(12, 1), (12, 4), (6, 4), (2, 5), (0, 2)])
def test_every_sample_is_one_ranks(mode: str, count: int, world: int) -> None:
    shares = [range(count)[slice_of(count, rank, world, mode)] for rank in range(world)]
    assert sorted(i for share in shares for i in share) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_split_modes_take_neighbours_or_every_nth() -> None:
    assert [list(range(6)[slice_of(6, r, 2, "contiguous")]) for r in (0, 1)] == [[0, 1, 2], [3, 4, 5]]
    assert [list(range(6)[slice_of(6, r, 2, "stride")]) for r in (0, 1)] == [[0, 2, 4], [1, 3, 5]]


def ranks(world: int = 3, seconds: float = 0.3) -> list[RollCall]:
    """All of them in the same verb at PLACE."""
    store = dist.HashStore()
    made = [RollCall(store, rank, world, seconds) for rank in range(world)]
    for one in made:
        one.begin()
        one.tell(PLACE)
    return made


def test_silent_rank_is_named_with_the_place_it_was_last_seen_in() -> None:
    """(pitfall 31)"""
    first, second, third = ranks()
    second.tell("update: step 2 of 4, forward 4 of 8")
    first.report(PLACE, LOST)
    third.report(PLACE, LOST)
    said = third.verdict(PLACE, LOST)
    assert said.startswith("trainer rank 2 waited 0.0")
    assert f"in {PLACE} for trainer rank 1: hangs or died (--distributed-timeout-minutes 0.005)" in said
    assert "rank 1 was last seen in update: step 2 of 4, forward 4 of 8" in said
    assert "rank 0" not in said and "\n" not in said


def test_fault_of_another_rank_is_the_cause() -> None:
    first, second, third = ranks()
    second.report(PLACE, ValueError("no such file\nand more"))
    first.report(PLACE, LOST)
    third.report(PLACE, LOST)
    assert first.verdict(PLACE, LOST).endswith(f"for trainer rank 1, which failed in {PLACE}: ValueError: no such file")
    assert second.verdict(PLACE, ValueError("no such file")) == (
        f"trainer rank 1 failed in {PLACE}: ValueError: no such file"
    )


def test_rank_that_comes_too_late_blames_nobody() -> None:
    made = ranks()
    for one in made:
        one.report(PLACE, LOST)
    assert "lost the other ranks, which had stopped" in made[1].verdict(PLACE, LOST)


def test_faults_of_an_earlier_verb_are_forgotten() -> None:
    first, second, third = ranks()
    for one in (first, second, third):
        one.report(PLACE, ValueError("earlier"))
        one.begin()
    first.report(PLACE, LOST)
    third.report(PLACE, LOST)
    said = first.verdict(PLACE, LOST)
    assert "earlier" not in said and "for trainer rank 1: hangs or died" in said


def test_rank_that_does_not_come_is_named_within_the_limit() -> None:
    store = dist.HashStore()
    first = RollCall(store, 0, 3, 0.3)
    first.tell("start")
    RollCall(store, 2, 3, 0.3).tell("start")
    began = time.monotonic()
    with pytest.raises(StageError, match=r"trainer rank 0 waited 0.005 minutes for trainer rank 1 to start"):
        first.assemble()
    assert 0.3 <= time.monotonic() - began < 2

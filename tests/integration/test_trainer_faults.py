"""A trainer rank that hangs, dies or fails: the others say which and where within the time limit, and nothing that it
left half-made loads."""

import re
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "training"))

from rank_processes import Fault, RankProcesses
from trained_rollouts import Iteration, adapter_file, run_config

from miles_core.families.tiny_sd3 import make_tiny_sd3
from miles_core.store.parts import Part, read_bytes, write_file

pytestmark = pytest.mark.integration

MINUTES = 0.2
SECONDS = 60 * MINUTES
ANSWERS, SLACK = 5.0, 30.0
TWO_STEPS = {"num_steps_per_rollout": 2, "diffusion_kl_beta": 0.5, "micro_batch_size": 1}
SECOND_STEP = "update: step 2 of 2, forward 2 of 3"


@pytest.fixture(scope="module")
def iteration(tmp_path_factory):
    torch.set_num_threads(1)
    model = make_tiny_sd3(tmp_path_factory.mktemp("model") / "tiny-stable-diffusion-3.5-medium")
    return Iteration(tmp_path_factory.mktemp("artifacts"), model, adapter_file(model, scale=0.1))


@pytest.fixture(scope="module")
def inputs(iteration):
    return iteration.inputs("inputs", shifted=True)


@pytest.fixture(scope="module")
def ranks(iteration):
    made = RankProcesses(4, iteration.model, iteration.files.root)
    yield made
    made.end()


def options(world=3, minutes=MINUTES, **changes):
    return run_config(**TWO_STEPS, actor_num_gpus_per_node=world, distributed_timeout_minutes=minutes, **changes)


def start(ranks, world, fault=None, **changes):
    """Without a fault first, so that no rank is late only because its imports take long."""
    assert ranks.start(world, options(world, minutes=10)) == [None] * world
    assert ranks.start(world, options(world, **changes), fault) == [None] * world


@pytest.mark.parametrize(
    ("kind", "late", "world", "changes"),
    [
        ("hang", 1, 3, {}),
        ("die", 2, 3, {}),
        ("hang", 0, 3, {}),
        ("die", 0, 3, {}),
        ("hang", 3, 4, {"dp_replicate_size": 2}),
    ],
    ids=lambda value: "hybrid" if isinstance(value, dict) and value else str(value),
)
def test_rank_that_hangs_or_dies_is_named_with_the_place(iteration, ranks, inputs, kind, late, world, changes):
    """No collective waits for ever, also not on the groups of a hybrid mesh (pitfall 31)."""
    start(ranks, world, Fault(late, SECOND_STEP, kind), **changes)
    out = f"named/{kind}-{late}-{world}"
    began = time.monotonic()
    said = ranks.call("update", inputs, out)
    took = time.monotonic() - began
    assert said[late] is None
    for rank, text in enumerate(said):
        if rank != late:
            waited = rf"StageError: trainer rank {rank} waited [\d.]+ minutes in update: step 2 of 2, .* "
            assert re.match(rf"{waited}for trainer rank {late}: hangs or died", text)
            assert f"rank {late} was last seen in {SECOND_STEP}" in text or (kind, late) == ("die", 0)
            assert f"--distributed-timeout-minutes {MINUTES}" in text
    assert took < (SECONDS if kind == "hang" else 0) + ANSWERS + SLACK
    assert iteration.files.list(out) == []


def test_rank_with_a_fault_of_its_own_is_named_with_the_cause(ranks, inputs):
    """Out of memory on one rank alone, where the others wait for its gradients (pitfall 31)."""
    start(ranks, 3, Fault(1, SECOND_STEP, "raise"))
    said = ranks.call("update", inputs, "cause/out")
    cause = f"failed in {SECOND_STEP}: MemoryError: no room for the activations"
    assert said[1] == f"StageError: trainer rank 1 {cause}"
    for rank in (0, 2):
        assert said[rank].startswith(f"StageError: trainer rank {rank} waited") and said[rank].endswith(
            f"for trainer rank 1, which {cause}"
        )


def test_rank_that_does_not_come_to_the_start_is_named(ranks):
    """pitfall 31"""
    assert ranks.start(3, options(minutes=10)) == [None] * 3
    for rank, text in enumerate(ranks.start(3, options(), absent=(2,))[:2]):
        assert f"trainer rank {rank} waited {MINUTES} minutes for trainer rank 2 to start" in text


@pytest.mark.parametrize("place", ["update: writing the policy, file 1 of 1", "update: the policy is written"])
def test_save_in_which_a_rank_dies_leaves_nothing_that_loads(iteration, ranks, inputs, place):
    """No mixture of old and new files, and no rank that waits for ever (pitfalls 31, 45)."""
    folder = f"save/{place[-7:].strip().replace(' ', '-')}"
    start(ranks, 2)
    whole = ranks.update(inputs, f"{folder}/whole")
    start(ranks, 2, Fault(1, place, "die"))
    said = ranks.call("update", inputs, f"{folder}/broken")
    assert said[1] is None
    assert "for trainer rank 1: hangs or died" in said[0] and f"last seen in {place}" in said[0]
    left = iteration.files.list(f"{folder}/broken/checkpoint")
    assert "trainer_state.json" in left
    shards = [name for name in left if name.startswith("shard-")]
    assert len(shards) == (1 if "file" in place else 2)

    start(ranks, 2)
    refused = ranks.call("update", inputs, f"{folder}/broken")
    assert "never overwritten" in refused[0] and "never overwritten" in refused[1]
    start(ranks, 2)
    again = ranks.update(inputs, f"{folder}/again")
    assert [p.sha256 for p in again.parts] == [p.sha256 for p in whole.parts]


def test_mixture_of_two_checkpoints_is_refused(iteration, ranks, inputs):
    """A shard of the save before, of another number of ranks, and one that is there twice (pitfall 45)."""
    start(ranks, 2)
    old = ranks.update(inputs, "mixture/old")
    following = iteration.inputs("mixture-next", policy=(old.parts, old.policy_digest, 2))
    new = ranks.update(following, "mixture/new")
    start(ranks, 3)
    three = ranks.update(following, "mixture/three")
    start(ranks, 2)

    def parts(**taken: Part) -> list[Part]:
        """The new checkpoint with the bytes of other parts under its own names."""
        mixed = []
        for part in new.parts:
            ending = part.path.removeprefix("mixture/new/")
            source = next((p for name, p in taken.items() if name in ending), part)
            path = f"mixture/{len(iteration.files.list('mixture'))}/{ending}"
            mixed.append(write_file(iteration.files, path, read_bytes(iteration.files, source)))
        return mixed

    def shard(result, number: int) -> Part:
        return next(p for p in result.parts if f"shard-{number:05d}" in p.path)

    for mixed, words in (
        (parts(**{"shard-00002": shard(old, 2)}), "has digest"),
        (parts(**{"shard-00002": shard(three, 3)}), "other tensors"),
        (parts(**{"shard-00001": shard(three, 1)}), "elements of"),
        (parts(**{"shard-00001": shard(new, 2)}), "twice at"),
    ):
        said = ranks.call("load", mixed, new.policy_digest)
        assert words in said[0] and said[0] == said[1]
        assert ranks.call("policy") == ["", ""]
    assert ranks.call("load", parts(), new.policy_digest) == [None, None]
    assert ranks.call("policy") == [new.policy_digest] * 2

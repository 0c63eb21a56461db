"""What a run takes on the disk: the rule's arithmetic, the estimate against what is really written, the line."""

import pytest
from tiny_run import TinyRun

from miles_core.families.sizes import SHAPES, lora_parameters
from miles_core.pipeline.budget import (
    Sizes,
    budget_line,
    disk_line,
    estimate,
    fitting,
    free_bytes,
    held,
    measured,
)
from miles_core.pipeline.retention import retain
from miles_core.store.files import Files
from miles_core.words import CHECKPOINT

SIZES = Sizes(latents=100.0, checkpoint=10.0, rest=1.0)


@pytest.mark.parametrize(
    ("iterations", "checkpoints", "latents", "most"),
    [
        (0, 2, 5, 0),
        (1, 2, 5, 111),
        (3, 2, 5, 333),
        (4, 2, 5, 4 + 400 + 30),
        (6, 2, 5, 6 + 600 + 30),
        (7, 2, 5, 7 + 600 + 30),
        (1000, 2, 5, 1000 + 600 + 30),
        (1000, 2, 1, 1000 + 200 + 30),
        (10, 0, 5, 10 + 600 + 100),
        (10, 2, 0, 10 + 1000 + 30),
    ],
)
def test_most_bytes_held(iterations: int, checkpoints: int, latents: int, most: float) -> None:
    assert held(SIZES, iterations, full_checkpoints=checkpoints, latents_iterations=latents) == most


@pytest.mark.parametrize(
    ("done", "free", "fit"),
    [(0, 110, 0), (0, 111, 1), (0, 332, 2), (0, 333, 3), (0, 636, 6), (0, 637, 7), (0, 700, 70), (6, 0, 0), (6, 9, 9)],
)
def test_how_many_fit(done: int, free: float, fit: int) -> None:
    assert fitting(SIZES, done, free, full_checkpoints=2, latents_iterations=5) == fit


def test_all_kept_is_a_plain_quotient() -> None:
    assert fitting(SIZES, 7, 1110, full_checkpoints=0, latents_iterations=0) == 10


@pytest.mark.parametrize("kind", ["latents", "checkpoint", "rest", "total"])
def test_the_estimate_lies_within_a_quarter_of_what_an_iteration_writes(run: TinyRun, kind: str) -> None:
    known = measured(run.store, run.config)
    assert known is not None and known[0] == 3
    real, guess = getattr(known[1], kind), getattr(estimate(run.config, run.inputs), kind)
    assert abs(guess - real) < 0.25 * real, (guess, real)


def test_the_estimate_follows_the_options(run: TinyRun) -> None:
    base = estimate(run.config, run.inputs)
    more = estimate(run.config.replace(lora_rank=8, n_samples_per_prompt=4), run.inputs)
    assert more.checkpoint > 1.5 * base.checkpoint
    assert more.latents > base.latents and more.rest > 1.2 * base.rest
    all_steps = estimate(run.config.replace(diffusion_num_sde_steps=0, diffusion_sde_window_range=None), run.inputs)
    assert all_steps.latents - base.latents == 4 * 2 * 4 * 1024


def test_what_is_measured_does_not_shrink_by_pruning(run: TinyRun) -> None:
    before = measured(run.store, run.config)
    retain(run.step(3, keep_latents_iterations=1))
    assert measured(run.store, run.config) == before


def test_the_line_before_there_is_an_iteration(run: TinyRun) -> None:
    config = run.config.replace(num_rollout=40)
    line = budget_line(config, Sizes(3e9, 1e9, 1e8), "estimated", 0, 100_000_000_000)
    assert (
        line
        == "disk: 4.1 GB an iteration (estimated), at most 25.0 GB for 40 iterations, 100.0 GB free: 790 more iterations fit"
    )


def test_the_line_warns_where_it_does_not_fit(run: TinyRun) -> None:
    config = run.config.replace(num_rollout=40)
    line = budget_line(config, Sizes(3e9, 1e9, 1e8), "as iteration 9", 10, 2_000_000_000)
    assert "2.0 GB free: WARNING: only 20 of the 30 iterations left fit; make room, or lower --keep-latents" in line
    assert "\n" not in line
    assert budget_line(config, SIZES, "estimated", 0, None).endswith("free space is not known there")


def test_the_line_of_a_run(run: TinyRun) -> None:
    line = disk_line(run.step(3))
    assert "an iteration (as iteration 3), at most " in line and "more iterations fit" in line
    assert free_bytes(Files("s3://bucket/x")) is None
    assert free_bytes(Files(run.store.files.root + "/not/there/yet"))


def test_the_family_and_its_sizes_say_the_same(run: TinyRun) -> None:
    shapes = SHAPES["sd3"]
    assert list(shapes.text_tokens(run.inputs.checkpoint).values()) == [77, 77, 256]
    assert set(shapes.text_tokens(CHECKPOINT).values()) == {24}
    policy = run.store.on_line("policy", -1)
    assert policy is not None
    pairs = lora_parameters(run.inputs.checkpoint, shapes.lora_target_modules, run.config.lora.lora_rank)
    assert (sum(pairs), len(pairs)) == (policy.summary["parameters"], policy.summary["modules"])

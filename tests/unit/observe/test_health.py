"""The figures that the guard looks at are those that the stages committed, and those of the images that were made."""

import io
from typing import Any

import numpy as np
import pytest
from made_up import PictureRun
from PIL import Image
from roots import Root
from test_spectrum import leaves, seams, whole

from miles_core.observe.health import GRID, IMAGES, Health, HeldOut, grid_of, health_of
from miles_core.observe.history import History
from miles_core.store.manifest import Manifest

SIDE = 64


class Drawn(PictureRun):
    """Images with edges, and with the seams of a grid of 8 pixels from iteration 1 on."""

    def change(self, row: dict[str, Any]) -> dict[str, Any]:
        picture = leaves(np.random.default_rng(row["sample_index"]), SIDE, SIDE)
        if row["group_index"] >= self.groups:
            picture = whole(picture + 12 * seams(8, SIDE, SIDE))
        return row | {"image": {"bytes": encoded(picture), "path": None}}


class Unlike(PictureRun):
    """An image of another size among the others, and one that is no image."""

    def change(self, row: dict[str, Any]) -> dict[str, Any]:
        side = 80 if row["sample_index"] == 2 else SIDE
        data = encoded(leaves(np.random.default_rng(row["sample_index"]), side, side))
        return row | {"image": {"bytes": b"no image" if row["sample_index"] == 3 else data, "path": None}}


class WithoutImages(PictureRun):
    def change(self, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"image": None}


def encoded(picture: np.ndarray) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(picture.astype(np.uint8)).convert("RGB").save(sink, "PNG")
    return sink.getvalue()


def rollouts(run: PictureRun, iterations: int) -> list[Manifest]:
    store = run.whole(iterations)
    found = [store.on_line("rollout", i) for i in range(iterations)]
    return [manifest for manifest in found if manifest]


def test_a_grid_on_the_images_of_a_rollout_is_seen(root: Root) -> None:
    """(pitfall 28)"""
    run = Drawn(root.files, "drawn", groups=6, samples_per_group=4)
    plain, with_grid = (grid_of(root.files, rollout)[GRID] for rollout in rollouts(run, 2))
    assert with_grid["8"] > 2 * plain["8"]
    assert grid_of(root.files, run.line["rollout"])[GRID] == with_grid


def test_of_many_images_a_few_are_read_spread_over_the_prompts(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Drawn(root.files, "many", groups=9, samples_per_group=8)
    (rollout,) = rollouts(run, 1)
    seen: list[int] = []
    monkeypatch.setattr("miles_core.observe.health.grid_energy", lambda images: seen.append(len(list(images))) or {})
    parts: list[str] = []
    read = root.files.read
    monkeypatch.setattr(type(root.files), "read", lambda self, path: parts.append(path) or read(path))
    assert grid_of(root.files, rollout) == {}
    assert seen == [IMAGES]
    assert sorted({path.rsplit("/", 1)[1] for path in parts}) == [f"{i:08d}-1.parquet" for i in (0, 2, 4, 8)]


def test_images_that_are_not_like_the_first_are_left_out(root: Root) -> None:
    (rollout,) = rollouts(Unlike(root.files, "unlike"), 1)
    assert grid_of(root.files, rollout)[GRID].keys() == {"8", "16"}
    (rollout,) = rollouts(WithoutImages(root.files, "without"), 1)
    assert grid_of(root.files, rollout) == {}


def test_figures_are_read_from_the_summaries(root: Root) -> None:
    run = Drawn(root.files, "read")
    run.iterate(0)
    rewards, advantages, update = (run.line[stage] for stage in ("rewards", "advantages", "update"))
    made = {"reward_mean": 0.25, "reward_std": 0.5, GRID: {"8": 1.5}}
    figures = [
        (rewards, made),
        (advantages, {"groups": 4, "zero_std_groups": 1}),
        (update, {"kl_loss": 0.125, "grad_norm": 2.0}),
    ]
    for manifest, summary in figures:
        manifest.summary.clear()
        manifest.summary.update(summary)
    assert health_of(rewards, advantages, update, None) == Health(0, 0.25, 0.5, 4, 1, 0.125, 2.0, {}, {8: 1.5})
    evaluated = {"words": {"reward_mean": 0.75, "reward_std": 0.1, "samples": 9}, "older": {"reward_mean": 0.5}}
    update.summary["sets"] = evaluated
    found = health_of(rewards, advantages, update, update)
    assert found.held_out == {"words": HeldOut(0.75, 0.1, 9)}
    rewards.summary.clear()
    rewards.summary["reward_mean"] = 0.25
    assert health_of(rewards, advantages, update, None).reward_std is None


def test_a_history_gives_those_of_whole_iterations(root: Root) -> None:
    run = Drawn(root.files, "history")
    for iteration in range(3):
        run.iterate(iteration)
    run.make("prompts", 3)
    history = History(run.draw_line())
    history.refresh()
    assert [h.iteration for h in history.healths(0, 9)] == [0, 1, 2]
    assert [h.iteration for h in history.healths(1, 1)] == [1]

"""The contact sheet: who is on it, and that it fits."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from made_up import FramesRun, NoiseRun, noise
from PIL import Image
from roots import FolderRoot, Root
from synthetic_run import SyntheticRun

from miles_core.observe.rows import Row, Score
from miles_core.observe.samples import contact_sheet, pick, sample_sheet


def scores(*rewards: float | None) -> dict[int, Score]:
    return {i: Score(reward, None, {}) for i, reward in enumerate(rewards)}


class TestPick:
    def test_best_median_worst(self) -> None:
        found = pick(range(5), scores(0.1, 0.9, 0.5, 0.3, 0.7), 3)
        assert found == {1: "best", 2: "median", 0: "worst"}
        assert list(found) == [1, 2, 0]

    def test_those_between_say_their_rank(self) -> None:
        assert pick(range(5), scores(5, 4, 3, 2, 1), 5) == {
            0: "best",
            1: "2 of 5",
            2: "median",
            3: "4 of 5",
            4: "worst",
        }

    def test_without_rewards_the_first(self) -> None:
        assert pick([7, 3, 5], {}, 2) == {3: "", 5: ""}
        assert pick([0, 1, 2], scores(None, None, None), 2) == {0: "", 1: ""}

    def test_few(self) -> None:
        assert pick([0], scores(1.0), 6) == {0: "best"}
        assert pick([], {}, 6) == {}


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize(("max_bytes", "kind"), [(10**7, "image/png"), (200_000, "image/jpeg"), (20_000, "image/jpeg")])
def test_it_fits(max_bytes: int, kind: str) -> None:
    rows = [Row(0, i, 0, f"prompt {i}", i, (noise(i, 256),), reward=0.5, advantage=0.1) for i in range(6)]
    sheet = contact_sheet(rows, {}, max_bytes=max_bytes)
    assert sheet is not None and len(sheet.data) <= max_bytes and sheet.kind == kind
    assert sheet.url == f"data:{kind};base64,{base64.b64encode(sheet.data).decode()}"
    assert opened(sheet.data).format == kind.removeprefix("image/").upper()


def test_what_cannot_fit_is_said() -> None:
    with pytest.raises(ValueError, match="1 images do not fit 100 bytes"):
        contact_sheet([Row(0, 0, 0, "p", 0, (noise(0, 256),))], {}, max_bytes=100)


def solid(colour: tuple[int, int, int], size: tuple[int, int] = (16, 16)) -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", size, colour).save(sink, "PNG")
    return sink.getvalue()


def test_each_image_is_whole_in_its_place_and_its_words_stand_below() -> None:
    rows = [Row(0, 0, 0, "x" * 5000, 0, (solid((255, 0, 0)),)), Row(0, 1, 0, "猫 " * 50, 1, (solid((0, 0, 255)),))]
    sheet = contact_sheet(rows, {0: "best", 1: "worst"}, side=64)
    assert sheet
    pixels = np.asarray(opened(sheet.data).convert("RGB")).astype(int)
    for colour, left in (((255, 0, 0), 12), ((0, 0, 255), 12 + 64 + 12)):
        rows_of, columns_of = np.nonzero(np.abs(pixels - colour).sum(-1) == 0)
        assert len(rows_of) == 64 * 64
        assert (rows_of.min(), columns_of.min()) == (12, left)
    assert (pixels[:, :, 0] < 128).sum() > 64 * 64 + 20, "there is ink below the images"


def test_a_picture_that_cannot_be_read_is_passed_over() -> None:
    rows = [Row(0, 0, 0, "p", 0, (b"none",)), Row(0, 1, 0, "p", 0, ())]
    assert contact_sheet(rows, {}) is None
    assert contact_sheet([*rows, Row(0, 2, 0, "p", 0, (solid((9, 9, 9)),))], {}) is not None


def test_a_committed_rollout_with_and_without_its_rewards(root: Root) -> None:
    run = NoiseRun(root.files, "r", groups=3, samples_per_group=4)
    store = run.whole(1)
    rollout, rewards, advantages = (store.on_line(s, 0) for s in ("rollout", "rewards", "advantages"))
    assert rollout and rewards
    scored = sample_sheet(root.files, rollout, rewards, advantages, count=3)
    first = sample_sheet(root.files, rollout, count=3)
    assert scored and first and scored.data != first.data
    assert opened(scored.data).size == opened(first.data).size


def test_only_the_parts_of_the_chosen_are_read(tmp_path: Path) -> None:
    root = FolderRoot(tmp_path)
    run = SyntheticRun(root.files, "r", groups=3, samples_per_group=4)
    for stage in ("prompts", "rollout"):
        run.make(stage, 0)
    rollout = run.line["rollout"]
    rewards = run.make("rewards", 0, reward=lambda sample, group: float(group == 1) * 10 + sample)
    # 4 to 7 are the best, 0 the worst; the third group's part is none of theirs.
    root.remove(rollout.data[2].path)
    assert sample_sheet(root.files, rollout, rewards, count=2) is not None


def test_a_video_s_frames_stand_side_by_side(root: Root) -> None:
    store = FramesRun(root.files, "r", groups=1, samples_per_group=4).whole(1)
    rollout, rewards = store.on_line("rollout", 0), store.on_line("rewards", 0)
    assert rollout
    assert sample_sheet(root.files, rollout, rewards, count=4) is not None

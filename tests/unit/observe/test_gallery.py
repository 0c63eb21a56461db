"""The gallery's page: all images where they fit, a fair choice where not, and nothing of a run becomes markup."""

import base64
import io
import json
from pathlib import Path

import pytest
from made_up import HOSTILE, FramesRun, HostileRun, NoiseRun, held
from PIL import Image
from roots import FolderRoot, Root
from synthetic_run import SyntheticRun, picture, reward_of

from flows.cli import main as cli
from miles_core.errors import InputError
from miles_core.observe.gallery import Gallery, make_gallery, select_iterations
from miles_core.observe.gallery_budget import ALWAYS, always, fair_shares, in_turn
from miles_core.observe.gallery_page import left_out, told
from miles_core.store.run_store import RunStore
from miles_core.words import CHECKPOINT

BIG = 10**8


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> RunStore:
    """6 iterations of 4 groups of 8 pictures of 48² pixels of noise, 7 kB each."""
    return NoiseRun(FolderRoot(tmp_path_factory.mktemp("noisy")).files, "r", groups=4, samples_per_group=8).whole(6)


def gallery(store: RunStore, max_bytes: int = BIG, iterations: list[int] | None = None) -> Gallery:
    return make_gallery(store, store.iterations() if iterations is None else iterations, max_bytes)


class TestBudget:
    @pytest.mark.parametrize(
        ("total", "needs", "shares"),
        [
            (30, [], []),
            (30, [10, 10, 10], [10, 10, 10]),
            (30, [100, 100, 100], [10, 10, 10]),
            (30, [2, 100, 100], [2, 14, 14]),
            (30, [100, 2, 9], [19, 2, 9]),
            (0, [1, 1], [0, 0]),
        ],
    )
    def test_shares(self, total: float, needs: list[float], shares: list[float]) -> None:
        assert fair_shares(total, needs) == shares

    def test_groups_take_turns(self) -> None:
        groups = {0: [1, 2, 3], 1: [4], 2: [5, 6]}
        assert in_turn(groups) == [1, 4, 5, 2, 6, 3]
        assert always(groups) == 3 + 1 + 2
        assert in_turn({}) == []


class TestIterations:
    @pytest.mark.parametrize(
        ("text", "chosen"),
        [
            ("all", [0, 1, 2, 5, 6]),
            ("latest", [6]),
            ("2", [2]),
            ("0:2", [0, 1]),
            ("1:6", [1, 2, 5]),
            ("5:", [5, 6]),
            (":1", [0]),
        ],
    )
    def test_words(self, text: str, chosen: list[int]) -> None:
        assert select_iterations(text, [0, 1, 2, 5, 6]) == chosen

    @pytest.mark.parametrize("text", ["", ":", "a", "0:1:2", "-1", "1.5", "0-5", "²", "9999999999", "3:5", "7", "5:2"])
    def test_other_words_are_refused(self, text: str) -> None:
        with pytest.raises(InputError, match="--iterations"):
            select_iterations(text, [0, 1, 2, 5, 6])


def test_all_images_as_they_are_where_they_fit(root: Root) -> None:
    run = SyntheticRun(root.files, "r", groups=2, samples_per_group=4)
    run.iterate(0)
    run.iterate(1)
    made = gallery(run.draw_line())
    page = held(made.html)
    assert (made.images, made.total, made.iterations, made.level, made.left_out) == (16, 16, 2, None, {})
    for iteration, rows in page.rows.items():
        columns = rows["columns"]
        assert columns["sample_index"] == list(range(iteration * 8, iteration * 8 + 8))
        for at, (index, group) in enumerate(zip(columns["sample_index"], columns["group_index"], strict=True)):
            assert base64.b64decode(page.pictures[iteration][at]) == picture(index, group, 16)
            assert columns["reward"][at] == pytest.approx(reward_of(index, group))
            assert columns["seed"][at] == 1000 + index
    assert "http" not in made.html.decode().replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


@pytest.mark.parametrize("max_bytes", [1_200_000, 500_000, 250_000])
def test_within_its_size_every_iteration_and_group_has_its_best_worst_and_middle(
    noisy: RunStore, max_bytes: int
) -> None:
    made = gallery(noisy, max_bytes)
    page = held(made.html)
    assert len(made.html) <= max_bytes
    assert made.images == page.images and made.level is not None and made.left_out == {}
    counts = {iteration: len(pictures) for iteration, pictures in page.pictures.items()}
    assert list(counts) == list(range(6))
    assert max(counts.values()) - min(counts.values()) <= 2, counts
    for rows in page.rows.values():
        assert len(rows["groups"]) == 4
        for group, shown in rows["groups"].items():
            assert {1, 8, 4} <= set(shown["ranks"]), (group, shown)
            columns = rows["columns"]
            mine = [i for i, g in enumerate(columns["group_index"]) if g == int(group)]
            assert len(mine) == len(shown["ranks"])
            best = max(reward_of(s, int(group)) for s in range(int(group) * 8, int(group) * 8 + 8))
            assert max(columns["reward"][i] for i in mine) == pytest.approx(best)
    for data in page.pictures[3]:
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            assert image.format == "WEBP" and max(image.size) <= made.level.side


def test_more_room_shows_more(noisy: RunStore) -> None:
    small, large = gallery(noisy, 250_000), gallery(noisy, 400_000)
    assert 6 * 4 * ALWAYS <= small.images < large.images <= small.total == 6 * 4 * 8
    assert len(large.html) > 0.75 * 400_000
    assert any(f"{small.total - small.images} images" in reason for reason in left_out(small))


def test_too_small_a_page_is_refused_with_what_it_needs(noisy: RunStore) -> None:
    with pytest.raises(InputError, match=r"need about 0\.\d MB more: raise --max-mb, or give fewer --iterations"):
        gallery(noisy, 100_000)


def test_what_cannot_be_read_is_left_out_and_named(tmp_path: Path) -> None:
    root = FolderRoot(tmp_path)
    run = SyntheticRun(root.files, "r", groups=2, samples_per_group=4)
    for iteration in range(3):
        run.iterate(iteration)
    run.make("prompts", 3)
    run.make("rollout", 3)
    run.make("prompts", 4)
    store = run.draw_line()
    rollout, rewards = store.on_line("rollout", 0), store.on_line("rewards", 1)
    assert rollout and rewards
    root.remove(rollout.data[1].path)
    root.put(rewards.data[0].path, b"x" * rewards.data[0].bytes)
    made = gallery(store)
    page = held(made.html)
    assert list(page.rows) == [2, 3]
    assert set(page.rows[3]["columns"]["reward"]) == {None}
    assert "is missing" in made.left_out[0] and rollout.data[1].path in made.left_out[0]
    assert "SHA-256" in made.left_out[1]
    assert made.left_out[4] == "its rollout is not committed yet"
    assert [reason.split(":")[0] for reason in left_out(made)] == ["iteration 0", "iteration 1", "iteration 4"]
    with pytest.raises(InputError, match="no image to show.*iteration 4: its rollout is not committed yet"):
        gallery(store, iterations=[4])


def test_evaluations_are_on_the_curve_and_one_is_no_plural(tmp_path: Path) -> None:
    run = SyntheticRun(FolderRoot(tmp_path).files, "r")
    run.iterate(0)
    for iteration, mean in ((-1, 0.25), (0, 0.5)):
        summary = {"sets": {"held-out": {"reward_mean": mean}}}
        run.put("evaluation", iteration, {}, lambda *_, summary=summary: ([], summary))
    made = gallery(run.draw_line())
    html = made.html.decode()
    assert html.count(">evaluation: held-out</text>") == 2, "the wide curve and the narrow one"
    assert "8 of 8 images of 1 iteration ·" in html
    assert told(made, "x.html")[0].startswith("8 of 8 images of 1 iteration, ")


def test_no_text_of_a_run_becomes_markup(root: Root) -> None:
    hostile = HostileRun(root.files, "r", groups=1, samples_per_group=4).whole(1)
    plain = SyntheticRun(root.files, "p", groups=1, samples_per_group=4)
    plain.iterate(0)
    taken, kept = gallery(hostile).html, gallery(plain.draw_line()).html
    page = held(taken)
    assert page.tags == held(kept).tags
    for mark in (b"<", b">"):
        assert taken.count(mark) == kept.count(mark)
    assert page.rows[0]["prompts"] == [HOSTILE]


def test_frames_of_a_video_stand_side_by_side(root: Root) -> None:
    made = gallery(FramesRun(root.files, "r", groups=2, samples_per_group=4).whole(1))
    page = held(made.html)
    assert (made.images, made.total, made.without_picture) == (6, 8, 2)
    assert page.rows[0]["columns"]["sample_index"] == [0, 1, 2, 3, 4, 5]
    with Image.open(io.BytesIO(base64.b64decode(page.pictures[0][0]))) as strip:
        assert strip.size == (3 * 48, 48)
    assert left_out(made) == ["2 samples whose picture is missing or cannot be read"]


class TestCommand:
    @pytest.fixture(autouse=True)
    def run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("MILES_HOME", str(tmp_path / "home"))
        monkeypatch.delenv("MILES_ARTIFACT_ROOT", raising=False)
        monkeypatch.chdir(tmp_path)
        made = SyntheticRun(FolderRoot(tmp_path / "runs").files, "r")
        made.iterate(0)
        made.iterate(1)
        made.draw_line()
        return tmp_path

    def miles(self, *arguments: str) -> int:
        return cli._run(cli.app, ["gallery", *arguments, "--artifact-root", "runs"])

    def test_the_page_is_in_the_current_folder(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.miles("r") == 0
        page = held((run / "r-gallery.html").read_bytes())
        assert page.images == 16
        assert page.page["command"] == ["miles lineage r", " --artifact-root runs"]
        assert capsys.readouterr().out.startswith("16 of 16 images of 2 iterations, ")

    def test_latest_to_a_file(self, run: Path) -> None:
        (run / "out.html").write_text("older")
        assert self.miles("r", "--iterations", "latest", "--output", "out.html") == 0
        assert list(held((run / "out.html").read_bytes()).rows) == [1]
        assert not list(run.glob(".tmp-*"))

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("none",), "there is no run none"),
            (("r", "--iterations", "7"), "--iterations 7"),
            (("r", "--max-mb", "0"), "--max-mb 0"),
            (("r", "--max-mb", "nan"), "--max-mb nan"),
            (("r", "--max-mb", "0.001"), "--max-mb"),
            (("r", "--output", "runs"), "--output runs is a folder"),
            (("r", "--output", "not/there.html"), "there is no folder"),
        ],
    )
    def test_bad_input(
        self, run: Path, arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = sorted(p for p in run.rglob("*"))
        assert self.miles(*arguments) == 2
        out, err = capsys.readouterr()
        assert out == "" and words in err and err.count("\n") == 1
        assert sorted(p for p in run.rglob("*")) == before


def test_what_stands_beside_the_code_is_part_of_a_wheel() -> None:
    import tomllib

    root = Path(__file__).parents[3]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    patterns = data["*"]
    assert data["miles_core.words"] == ["checkpoint/**"]
    beside = [p for p in (root / "miles_core").rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")]
    assert {p.name for p in beside} >= {"gallery.html", "gallery.css", "gallery.js", "list.js", "data.js"}
    for path in beside:
        if CHECKPOINT in path.parents:
            continue
        assert any(path.match(pattern) for pattern in patterns), path
        assert (path.parent / "__init__.py").exists(), path


def test_the_numbers_of_a_page_are_json_that_every_browser_reads(tmp_path: Path) -> None:
    run = SyntheticRun(FolderRoot(tmp_path).files, "r")
    run.make("prompts", 0)
    run.make("rollout", 0)
    run.make("rewards", 0, reward=lambda sample, group: float("inf"))
    page = held(gallery(run.draw_line()).html)
    assert set(page.rows[0]["columns"]["reward"]) == {None}
    assert json.loads(json.dumps(page.page["points"], allow_nan=False)) == page.page["points"]

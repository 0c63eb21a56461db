"""The gallery's page in a real browser, opened from a file."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Page
from made_up import HOSTILE, HostileRun, NoiseRun
from roots import FolderRoot
from synthetic_run import SyntheticRun, reward_of

from miles_core.observe.gallery import make_gallery
from miles_core.store.run_store import RunStore

CARDS = "[...document.querySelectorAll('.card')].sort((a, b) => a.dataset.number - b.dataset.number)"


def shown(
    page: Page, store: RunStore, folder: Path, max_bytes: int = 10**8, iterations: list[int] | None = None
) -> None:
    """Write a run's gallery and open it."""
    path = folder / "gallery.html"
    path.write_bytes(make_gallery(store, iterations or store.iterations(), max_bytes, ("miles lineage r", "")).html)
    page.events.clear()
    page.size(1200, 900)
    page.open(path)
    page.wait(lambda: page.js("document.querySelectorAll('.card img').length"), "images")


@pytest.fixture
def page(browser: Page, tmp_path: Path) -> Page:
    """A run of 3 iterations of 7 groups of 4."""
    run = SyntheticRun(FolderRoot(tmp_path / "runs").files, "r", groups=7, samples_per_group=4)
    for iteration in range(3):
        run.iterate(iteration)
    shown(browser, run.draw_line(), tmp_path)
    return browser


def order(page: Page, name: str) -> list[Any]:
    found: list[Any] = page.js(f"list.order.map((row) => row.{name})")
    return found


def click(page: Page, share: float) -> None:
    """Click the curve that is in view at a share of its iterations, 0 the first."""
    x, y = page.js(
        "(() => { const svg = [...document.querySelectorAll('#curve svg')].find((s) => s.clientWidth);"
        f" const at = +svg.dataset.left + (svg.dataset.right - svg.dataset.left) * {share};"
        " const { x, y } = new DOMPoint(at, 90).matrixTransform(svg.getScreenCTM()); return [x, y]; })()"
    )
    for kind in ("mousePressed", "mouseReleased"):
        page.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    page.settle()


def quiet(page: Page) -> None:
    """Nothing was asked of the network, nothing failed, the page's own rules were kept."""
    page.settle()
    assert [url for url in page.requests() if not url.startswith("file:")] == []
    assert page.complaints() == []


def test_every_image_is_there_and_is_drawn(page: Page) -> None:
    assert len(order(page, "sample")) == 3 * 7 * 4
    page.wait(lambda: page.js("[...document.images].every((i) => i.complete)"), "pictures")
    widths = page.js("[...document.querySelectorAll('.card img')].map((i) => i.naturalWidth)")
    assert set(widths) == {16}
    assert page.js("document.querySelector('.card img').alt") == page.js("list.order[0].prompt")
    quiet(page)


def test_sort(page: Page) -> None:
    rewards = order(page, "reward")
    assert rewards == sorted(rewards, reverse=True)
    assert rewards[0] == pytest.approx(max(reward_of(s, s // 4) for s in range(84)))
    page.choose("order", "up")
    for key in ("reward", "advantage", "iteration", "seed"):
        page.choose("sort", key)
        assert order(page, key) == sorted(order(page, key)), key
    quiet(page)


def test_filter(page: Page) -> None:
    for name, value in {"from": "1", "to": "1", "low": "0.2", "high": "0.6", "prompt": "CAT"}.items():
        page.choose(name, value)
    some = page.js("list.order.map(({ iteration, reward, prompt }) => [iteration, reward, prompt])")
    expected = [s for s in range(28, 56) if 0.2 <= reward_of(s, s // 4) <= 0.6 and s // 4 % 7 == 0]
    assert len(some) == len(expected) > 0
    assert all(i == 1 and 0.2 <= r <= 0.6 and p == "a red cat" for i, r, p in some)
    assert page.js("document.getElementById('count').textContent") == f"{len(expected)} of 84 images"
    page.choose("prompt", "unicorn")
    assert page.js("document.getElementById('none').hidden") is False
    page.js("form.reset()")
    page.wait(lambda: len(order(page, "sample")) == 84, "the reset")
    quiet(page)


def test_a_group_stands_side_by_side(page: Page) -> None:
    page.choose("view", "groups")
    page.choose("sort", "iteration")
    page.choose("order", "up")
    sections = page.js("list.sections.map((s) => [s.title, s.detail, s.rows.map((row) => row.group)])")
    assert len(sections) == 21
    for number, (_, detail, groups) in enumerate(sections):
        assert groups == [number] * 4
        assert detail.startswith(f"iteration {number // 7}, group {number} · mean ") and detail.endswith("4 images")
    tops = page.js(f"{CARDS}.slice(0, 4).map((c) => c.getBoundingClientRect().top)")
    assert len(set(tops)) == 1
    quiet(page)


def test_groups_are_sorted_by_mean_reward_span_of_advantages_iteration_and_seed(page: Page) -> None:
    page.choose("view", "groups")
    rewards = [[reward_of(s, g) for s in range(g * 4, g * 4 + 4)] for g in range(21)]
    by = {
        "reward": [sum(r) / 4 for r in rewards],
        "advantage": [(max(r) - min(r)) / (float(np.std(r)) + 1e-4) for r in rewards],
        "iteration": [float(g // 7) for g in range(21)],
        "seed": [float(g) for g in range(21)],
    }
    for sort, keys in by.items():
        for way, sign in (("down", -1), ("up", 1)):
            page.choose("sort", sort)
            page.choose("order", way)
            groups = page.js("list.sections.map((s) => s.rows[0].group)")
            assert sorted(groups) == list(range(21))
            found = [sign * keys[g] for g in groups]
            assert all(a <= b + 1e-4 for a, b in itertools.pairwise(found)), (sort, way, groups)
    quiet(page)


def test_a_prompt_stands_beside_itself_over_the_iterations(page: Page) -> None:
    page.choose("view", "prompts")
    sections = page.js("list.sections.map((s) => s.rows.map((row) => [row.prompt, row.iteration, row.reward]))")
    assert len(sections) == 7
    for rows in sections:
        assert len({prompt for prompt, _, _ in rows}) == 1
        assert [iteration for _, iteration, _ in rows] == [0, 1, 2]
    for pick, choose in (("best", max), ("worst", min)):
        page.choose("pick", pick)
        rewards = page.js("list.sections.find((s) => s.title === 'a red cat').rows.map((row) => row.reward)")
        assert rewards == [pytest.approx(choose(reward_of(s, g) for s in range(g * 4, g * 4 + 4))) for g in (0, 7, 14)]
    page.choose("pick", "all")
    assert len(order(page, "sample")) == 84
    quiet(page)


def test_an_image_opens_with_every_figure_and_the_keys_lead_on(page: Page, tmp_path: Path) -> None:
    page.js("list.focus(0)")
    page.key("ArrowRight")
    page.key("Enter")
    assert page.js("large.open")
    names = "iteration, sample, group, reward, seed"
    row = page.js(f"(({{ {names} }}) => ({{ {names} }}))(list.order[1])")
    figures = dict(
        page.js(
            "[...document.querySelectorAll('#large-figures tr')].map((r) => [...r.children].map((c) => c.innerText))"
        )
    )
    assert figures["reward"] == f"{row['reward']:g}" and figures["seed"] == str(row["seed"])
    assert {"advantage", "group_mean", "score_jpeg_compressibility", "noise_level", "width", "kept"} <= set(figures)
    assert (figures["rm_type"], figures["rm_version"]) == ("jpeg_compressibility", "jpeg_compressibility-1")
    assert (figures["engine_seconds"], figures["scoring_seconds"]) == (str(1 + row["group"] % 5), "0.01")
    store = RunStore(FolderRoot(tmp_path / "runs").files, "r")
    for stage in ("rollout", "rewards", "advantages"):
        made = store.on_line(stage, row["iteration"])
        assert made and figures[f"{stage} attempt"] == made.attempt
    command = page.js("document.getElementById('large-command').textContent")
    assert command == f"miles lineage r {row['iteration']} {row['sample']}"
    first = page.js("document.getElementById('large-picture').src")
    page.key("ArrowRight")
    assert page.js("openNumber") == 2 and page.js("document.getElementById('large-picture').src") != first
    page.key("ArrowLeft")
    assert page.js("document.getElementById('large-picture').src") == first
    page.key("ArrowDown")
    assert page.js("openNumber") == 1 + page.js("list.columns")
    page.key("Escape")
    assert not page.js("large.open")
    assert page.js("Number(document.activeElement.dataset.number)") == 1 + page.js("list.columns")
    quiet(page)


def test_a_click_on_the_curve_shows_that_iteration(page: Page) -> None:
    for width in (1200, 420):
        page.size(width, 900)
        page.js("form.reset()")
        click(page, 1 / 2)
        assert set(order(page, "iteration")) == {1}
        page.wait(lambda: len(order(page, "sample")) == 28, "the iteration")
    quiet(page)


def test_an_iteration_that_is_not_in_the_page_says_so(browser: Page, tmp_path: Path) -> None:
    run = SyntheticRun(FolderRoot(tmp_path / "runs").files, "r")
    for iteration in range(5):
        run.iterate(iteration)
    shown(browser, run.draw_line(), tmp_path, iterations=[2, 3])
    says = "document.getElementById('curve-says').textContent"
    assert browser.js(says) == "Click an iteration with a dot to see its images. The others are not in this page."
    dots = browser.js("document.querySelector('.wide .marked').getAttribute('d')")
    assert dots.count("M") == 2
    assert "of 1 iteration " not in browser.js("document.querySelector('.facts').innerText")
    click(browser, 0)
    assert browser.js(says) == (
        "The images of iteration 0 are not in this page: write one that shows it with --iterations 0, or all."
    )
    assert len(order(browser, "sample")) == 16
    click(browser, 3 / 4)
    assert set(order(browser, "iteration")) == {3}
    quiet(browser)


def test_the_labels_of_the_curve_can_be_read_on_a_narrow_screen(page: Page) -> None:
    for width in (1200, 901, 900, 420):
        page.size(width, 900)
        heights = page.js(
            "[...document.querySelectorAll('#curve svg text')].map((t) => t.getBoundingClientRect().height)"
            ".filter((h) => h)"
        )
        assert heights and min(heights) > 9, (width, heights)
        assert page.js("document.documentElement.scrollWidth") <= width


def test_negative_numbers_have_a_true_minus(page: Page) -> None:
    page.choose("order", "up")
    page.js("openLarge(0)")
    text = page.js("document.getElementById('large-figures').innerText")
    assert "advantage\t−" in text and "\t-" not in text


def test_a_fork_says_so_and_whose_attempts_it_shows(browser: Page, tmp_path: Path) -> None:
    files = FolderRoot(tmp_path / "runs").files
    run = SyntheticRun(files, "p")
    run.iterate(0)
    line = (run.draw_line().record() or {})["line"]
    own = SyntheticRun(files, "f").store
    parent = {"run": "p", "iteration": 1, "stage": "rewards", "attempt": None, "kept": {}}
    kept = {slot: f"p/{attempt}" for slot, attempt in line.items()}
    own.update_record(lambda record: record | {"line": kept, "parent": parent})
    shown(browser, own, tmp_path)
    assert browser.js("document.querySelector('.fork').innerText") == "a fork of p at iteration 1"
    browser.js("openLarge(0)")
    attempt = line["000000/rewards"]
    assert f"rewards attempt\tp/{attempt}" in browser.js("document.getElementById('large-figures').innerText")
    shown(browser, run.store, tmp_path)
    assert browser.js("document.querySelector('.fork').hidden")
    quiet(browser)


def test_prompts_are_text(browser: Page, tmp_path: Path) -> None:
    shown(browser, HostileRun(FolderRoot(tmp_path / "runs").files, "r", 1, 4).whole(1), tmp_path)
    for view in ("images", "groups", "prompts"):
        browser.choose("view", view)
    browser.js("list.focus(0)")
    browser.key("Enter")
    assert browser.js("document.getElementById('large-prompt').textContent") == HOSTILE
    assert browser.js("document.querySelector('.card img').alt") == HOSTILE
    assert browser.js("document.querySelectorAll('img[src=x]').length") == 0
    assert browser.js("document.title") == "r — images"
    quiet(browser)


def test_the_page_runs_no_script_but_its_own(page: Page) -> None:
    page.js("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title = 1\">')")
    page.js(
        "document.body.append(Object.assign(document.createElement('script'), { textContent: 'document.title = 2' }))"
    )
    page.settle()
    assert page.js("document.title") == "r — images"


def test_only_what_is_in_view_is_in_the_document(browser: Page, tmp_path: Path) -> None:
    run = SyntheticRun(FolderRoot(tmp_path / "runs").files, "r", groups=8, samples_per_group=32, image_pixels=4)
    for iteration in range(8):
        run.iterate(iteration)
    shown(browser, run.draw_line(), tmp_path)
    assert len(order(browser, "sample")) == 2048
    for place in (0, 0.5, 1):
        browser.js(f"scrollTo(0, document.body.scrollHeight * {place})")
        browser.settle()
        browser.wait(
            lambda: browser.js(
                f"{CARDS}.some((c) => {{ const r = c.getBoundingClientRect(); return r.bottom > 400 && r.top < 800 }})"
            ),
            "what is in view",
        )
        assert browser.js("document.querySelectorAll('.card').length") < 150
    assert browser.js(f"{CARDS}.at(-1).dataset.number") == "2047"
    quiet(browser)


def test_what_a_group_does_not_show_is_said(browser: Page, tmp_path: Path) -> None:
    store = NoiseRun(FolderRoot(tmp_path / "runs").files, "r", groups=2, samples_per_group=8).whole(6)
    shown(browser, store, tmp_path, 120_000)
    browser.choose("view", "groups")
    details = browser.js("list.sections.map((s) => s.detail)")
    assert all(" of 8 in this page, by reward number 1, " in detail for detail in details), details
    left_out = browser.js("document.querySelector('.left-out').textContent")
    assert "so that the page stays within its size" in left_out
    assert json.loads(browser.js("JSON.stringify(page.reduced)")).startswith("WebP of at most ")

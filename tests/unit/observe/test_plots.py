"""The reward curve: from manifests alone, every figure where it belongs."""

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from roots import FolderRoot, Root
from synthetic_run import SyntheticRun

from miles_core.observe.history import History
from miles_core.observe.plots import Point, reward_svg, svg_url

SVG = "{http://www.w3.org/2000/svg}"
POINTS = [Point(i, mean=i / 10, low=-1.0, high=1.0, zero_std=0.5 if i == 2 else 0.0) for i in range(5)]


def drawn(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def pairs(element: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", element.get("points", ""))]


def test_the_points_are_what_the_manifests_say_and_no_row_is_read(root: Root) -> None:
    run = SyntheticRun(root.files, "r", groups=7, samples_per_group=4)
    for iteration in range(3):
        run.iterate(iteration)
    run.make("prompts", 3)
    run.make("rollout", 3)
    run.make("rewards", 3)
    store = run.draw_line()
    for name in root.names():
        if name.endswith(".parquet"):
            root.remove(name)
    history = History(store)
    history.refresh()
    points = history.points()
    assert [p.iteration for p in points] == [0, 1, 2, 3]
    rewards = store.on_line("rewards", 1)
    assert rewards
    told = (points[1].mean, points[1].low, points[1].high)
    assert told == tuple(rewards.summary[name] for name in ("reward_mean", "reward_min", "reward_max"))
    assert [p.zero_std for p in points] == [1 / 7, 1 / 7, 1 / 7, None]


def test_an_iteration_whose_rewards_are_no_numbers_is_no_point(tmp_path: Path) -> None:
    run = SyntheticRun(FolderRoot(tmp_path).files, "r")
    run.iterate(0)
    for stage in ("prompts", "rollout"):
        run.make(stage, 1)
    run.make("rewards", 1, reward=lambda sample, group: float("nan"))
    store = run.draw_line()
    history = History(store)
    history.refresh()
    assert [p.iteration for p in history.points()] == [0]


def test_the_mean_is_a_line_inside_the_band() -> None:
    svg = drawn(reward_svg(POINTS))
    (line,), (band,) = svg.findall(f"{SVG}polyline"), svg.findall(f"{SVG}polygon")
    mean, edge = pairs(line), pairs(band)
    assert len(mean) == 5 and len(edge) == 10
    assert [x for x, _ in mean] == sorted(x for x, _ in mean)
    heights = [y for _, y in mean]
    assert heights == sorted(heights, reverse=True), "a larger mean stands higher, which is a smaller y"
    assert min(y for _, y in edge) < min(heights) and max(heights) < max(y for _, y in edge)
    assert svg.get("aria-label") == "reward of iterations 0 to 4: mean 0 to 0.4"
    assert (svg.get("data-first"), svg.get("data-last")) == ("0", "4")


def test_the_share_of_groups_without_spread_is_a_bar_where_there_are_any() -> None:
    bars = [r for r in drawn(reward_svg(POINTS)).findall(f"{SVG}rect") if r.get("fill-opacity")]
    (bar,) = bars
    (line,) = drawn(reward_svg(POINTS)).findall(f"{SVG}polyline")
    middle = float(bar.get("x", "")) + float(bar.get("width", "")) / 2
    assert middle == pytest.approx(pairs(line)[2][0], abs=0.2)
    full = [Point(0, 0, 0, 0, zero_std=1.0)]
    (whole,) = [r for r in drawn(reward_svg(full)).findall(f"{SVG}rect") if r.get("fill-opacity")]
    assert float(bar.get("height", "")) == pytest.approx(float(whole.get("height", "")) / 2)


def test_several_scorers_and_further_curves_have_a_line_and_a_name_each() -> None:
    points = [Point(i, 0.5, 0.0, 1.0, {"ocr": i / 4, "jpeg": 1 - i / 4}) for i in range(5)]
    svg = drawn(reward_svg(points, further={"evaluation <b>": {0: 0.2, 4: 1.5}}))
    texts = [t.text for t in svg.findall(f"{SVG}text")]
    assert {"ocr", "jpeg", "evaluation <b>"} <= set(texts)
    assert len(svg.findall(f"{SVG}polyline")) == 4
    assert all(0 <= y <= 300 for line in svg.findall(f"{SVG}polyline") for _, y in pairs(line))
    one = [Point(i, 0.5, 0.0, 1.0, {"ocr": 0.5}) for i in range(5)]
    assert len(drawn(reward_svg(one)).findall(f"{SVG}polyline")) == 1, "one scorer's curve is the reward's"


def test_a_further_value_that_is_no_number_is_not_drawn() -> None:
    svg = reward_svg(POINTS, further={"lost": {0: float("nan")}, "kept": {0: 0.2, 2: float("inf"), 4: 0.3}})
    assert "nan" not in svg and "inf" not in svg and "lost" not in svg
    assert [len(pairs(line)) for line in drawn(svg).findall(f"{SVG}polyline")] == [2, 5]


def test_a_dot_stands_on_the_mean_of_each_marked_iteration() -> None:
    svg = drawn(reward_svg(POINTS, marked={1, 4, 9}, mark="in this page"))
    (line,), (dots,) = svg.findall(f"{SVG}polyline"), svg.findall(f"{SVG}path")
    places = [(float(x), float(y)) for x, y in re.findall(r"M([\d.]+) ([\d.]+)h0", dots.get("d", ""))]
    assert places == [pairs(line)[1], pairs(line)[4]]
    assert "● in this page" in [t.text for t in svg.findall(f"{SVG}text")]
    assert not drawn(reward_svg(POINTS, marked={9}, mark="in this page")).findall(f"{SVG}path")


def test_a_narrow_curve_breaks_its_legend_and_has_fewer_labels() -> None:
    points = [Point(i, 0.5, -1.0, 1.0) for i in range(300)]
    svg = drawn(reward_svg(points, further={"evaluation: held-out": {0: 0.2, 4: 1.5}}, width=400, height=260))
    texts = [(float(t.get("x", "")), float(t.get("y", "")), t.text or "") for t in svg.findall(f"{SVG}text")]
    assert len({y for _, y, text in texts if "mean reward" in text or "evaluation" in text}) == 2
    assert all(x + 6.6 * len(text) <= 400 for x, y, text in texts if y < 40)
    feet = sorted(x for x, y, _ in texts if y > 250)
    assert len(feet) <= 7 and all(b - a > 30 for a, b in itertools.pairwise(feet))
    assert "−1" in [text for _, _, text in texts] and not any("-1" in text for _, _, text in texts)


@pytest.mark.parametrize("points", [[], POINTS[:1], [Point(3, 0.0, 0.0, 0.0), Point(9, 0.0, 0.0, 0.0)]])
def test_few_points_and_no_spread_are_drawn(points: list[Point]) -> None:
    svg = reward_svg(points)
    assert "nan" not in svg and "inf" not in svg
    drawn(svg)
    assert ("no rewards yet" in svg) == (not points)


def test_three_hundred_iterations_are_small_enough_for_an_artifact() -> None:
    points = [Point(i, i / 300, -1.0, 1.0, zero_std=0.1) for i in range(300)]
    assert len(svg_url(reward_svg(points))) < 100_000

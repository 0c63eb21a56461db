"""The guard over a run: what it finds on the line, the way back, and the fork that takes it."""

import dataclasses
import shlex
from typing import Any

import lines
import pytest
from lines import Line
from roots import Root

from flows.cli import show
from flows.session import SAME, plan
from miles_core.config.guard import checkpoints_kept
from miles_core.config.overrides import as_flags, from_flags
from miles_core.errors import InputError
from miles_core.observe.guard import Finding
from miles_core.observe.history import History
from miles_core.pipeline import retention
from miles_core.pipeline.fork import begin_fork, plan_fork
from miles_core.pipeline.guard import action_of, carried, findings_of, guard_column, rewind, rewinds, way_back
from miles_core.pipeline.iteration import finished
from miles_core.pipeline.run import open_run
from miles_core.pipeline.stage import Product

FELL = 3


@pytest.fixture
def fallen(root: Root, places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Line:
    """A run of four iterations whose reward falls in the last one."""
    retention._PASSED.clear()
    plain = lines.made

    def made(step: Any, attempt: Any, upstream: Any) -> Product:
        product = plain(step, attempt, upstream)
        mean = 0.1 if step.iteration == FELL else 0.5
        own = {"reward_mean": mean, "reward_std": 0.1, "reward_min": 0.0, "reward_max": 1.0}
        figures = own | {"groups": 8, "zero_std_groups": 0, "grad_norm": 1.0, "steps": 1, "prompts": 8, "epoch": 0}
        figures |= {"engines": 1, "modules_bound": 1, "probe_diff": 0.0, "probe_moved": 1.0}
        return dataclasses.replace(product, summary=product.summary | figures)

    monkeypatch.setattr(lines, "made", made)
    run = Line.begin(root, places)
    for iteration in range(FELL + 1):
        run.iterate(iteration)
    return run


def history(run: Line) -> History:
    made = History(run.store)
    made.refresh()
    return made


def found(run: Line, passed: int = 0, **options: Any) -> list[Finding]:
    return findings_of(history(run), run.config.replace(**options), [FELL], passed).get(FELL, [])


def finding(iteration: int, healthy: int) -> Finding:
    return Finding("reward-drop", iteration, 4.0, 1.0, healthy, "it fell")


def test_a_finding_is_a_function_of_what_is_committed(fallen: Line) -> None:
    (fell,) = found(fallen)
    assert (fell.check, fell.iteration, fell.healthy) == ("reward-drop", FELL, 1)
    assert found(fallen) == [fell]
    assert findings_of(history(fallen), fallen.config, range(9)) == {0: [], 1: [], 2: [], FELL: [fell]}
    column = {i: {"guard": "reward-drop" if i == FELL else ""} for i in range(4)}
    assert guard_column(history(fallen), 100) == column
    assert guard_column(history(fallen), 1) == {FELL: column[FELL]}


def test_checks_that_are_off_find_nothing_and_each_acts_as_it_is_told(fallen: Line) -> None:
    off: list[dict[str, Any]] = [{"guard": "off"}, {"guard_reward_drop": 0}, {"guard_actions": ("reward-drop=off",)}]
    assert [found(fallen, **options) for options in off] == [[], [], []]
    assert len(found(fallen, guard="off", guard_actions=("reward-drop=warn",))) == 1
    two = [finding(3, 1), dataclasses.replace(finding(3, 1), check="grid")]
    for options, expected in (
        ({}, "warn"),
        ({"guard": "rewind"}, "rewind"),
        ({"guard_actions": ("grid=suspend",)}, "suspend"),
        ({"guard": "suspend", "guard_actions": ("grid=rewind",)}, "rewind"),
    ):
        assert action_of(fallen.config.replace(**options), two) == expected
    assert action_of(fallen.config, []) == "off"


def test_what_was_passed_is_judged_no_more(fallen: Line) -> None:
    assert len(found(fallen)) == 1
    assert found(fallen, passed=FELL + 1) == found(fallen, guard_from=FELL + 1) == []
    # What is left is too little to compare with.
    assert found(fallen, guard_from=2) == []


def test_the_way_back_goes_on_from_the_last_healthy_policy(fallen: Line) -> None:
    back = way_back(fallen.store, fallen.config, found(fallen))
    assert back and (back.iteration, back.fork) == (2, "parent-rewind1")
    run, number, *options = shlex.split(back.command)[2:]
    changes = from_flags(options)
    root = changes.pop("artifact_root")
    store, config = open_run(run, root)
    name = changes.pop("run_id")
    begin_fork(plan_fork(store, config, number, name, overrides=changes))
    made = Line.open(fallen.root, name)
    assert made.config.rollout.rollout_seed == back.seed != fallen.config.rollout.rollout_seed
    assert [finished(made.step(i)) for i in range(4)] == [True, True, False, False]
    # It is a run like any other: what fell is not on its line.
    assert findings_of(history(made), made.config, range(4)) == {0: [], 1: []}


def test_a_rewind_makes_that_fork_once_and_leaves_the_run_alone(fallen: Line) -> None:
    before = fallen.bytes()
    back = way_back(fallen.store, fallen.config, found(fallen))
    assert back and rewind(fallen.store, fallen.config, back) == "parent-rewind1"
    again = fallen.root.get("parent-rewind1/run.json")
    assert rewind(fallen.store, fallen.config, back) == "parent-rewind1"
    assert fallen.root.get("parent-rewind1/run.json") == again and fallen.bytes() == before
    child = Line.open(fallen.root, "parent-rewind1")
    assert rewinds(child.store) == ("parent", 1) and rewinds(fallen.store) == ("parent", 0)
    for number in range(4):
        child.iterate(number)
    further = way_back(child.store, child.config, [finding(3, 2)])
    assert further and (further.fork, further.iteration) == ("parent-rewind2", 3)
    assert len({fallen.config.rollout.rollout_seed, back.seed, further.seed}) == 3
    # Groups that were drawn again have other noise than those that they stand in the place of.
    assert finished(Line.open(fallen.root, rewind(child.store, child.config, further)).step(2))


def test_the_command_trains_the_fork_with_its_own_operational_options(fallen: Line) -> None:
    back = way_back(fallen.store, fallen.config, found(fallen))
    assert back
    fork = rewind(fallen.store, fallen.config, back)
    now = fallen.config.replace(num_rollout=9, ocr_num_workers=2, guard="rewind", guard_from=1)
    changes = carried(fallen.store, now, fork)
    planned = plan(SAME, changes)
    assert planned.begun and planned.store.run == fork
    assert planned.config.run.num_rollout == 9 and planned.config.reward.ocr_num_workers == 2
    assert planned.config.rollout.rollout_seed == back.seed and planned.config.guard.guard_from == 0


def test_a_fork_with_another_reward_is_judged_by_itself(fallen: Line) -> None:
    for name, changes, settings in (
        ("other", {"rm_type": "jpeg_incompressibility"}, [0, 0, 1, 1]),
        ("larger", {"diffusion_height": 128}, [0, 0, 1, 1]),
        ("seed", {"rollout_seed": 7}, [0, 0, 0, 0]),
        ("slower", {"lr": 1e-9}, [0, 0, 0, 0]),
    ):
        begin_fork(plan_fork(fallen.store, fallen.config, "2", name, overrides=changes))
        child = Line.open(fallen.root, name)
        for number in range(4):
            child.iterate(number)
        assert [h.setting for h in history(child).healths(0, 3)] == settings
        assert bool(found(child)) == (settings[3] == 0)


def test_a_name_that_another_run_has_is_refused(fallen: Line, places: dict[str, str]) -> None:
    Line.begin(fallen.root, places, "parent-rewind1")
    back = way_back(fallen.store, fallen.config, found(fallen))
    assert back and rewinds(Line.open(fallen.root, "parent-rewind1").store) == ("parent-rewind1", 0)
    with pytest.raises(InputError, match="is there and no fork of parent"):
        rewind(fallen.store, fallen.config, back)


def test_the_way_back_needs_a_policy_that_can_be_trained_on(fallen: Line) -> None:
    fell = found(fallen)
    # Two checkpoints kept: those of updates 2 and 3, and update 1 is replayed over latents while they are there.
    retention.retain(fallen.step(FELL, keep_full_checkpoints=2, keep_latents_iterations=0))
    back = way_back(fallen.store, fallen.config, fell)
    assert back and back.iteration == 2
    retention._PASSED.clear()
    retention.retain(fallen.step(FELL, keep_full_checkpoints=2, keep_latents_iterations=2))
    assert way_back(fallen.store, fallen.config, fell) is None
    start = way_back(fallen.store, fallen.config, [finding(1, -1)])
    assert start and start.iteration == 0


@pytest.mark.parametrize(
    ("options", "kept"), [({}, 2), ({"guard": "suspend"}, 3), ({"guard_actions": ("kl=rewind",)}, 2)]
)
def test_one_more_checkpoint_is_kept_where_the_guard_may_go_back(
    fallen: Line, options: dict[str, Any], kept: int
) -> None:
    config = fallen.config.replace(**options)
    assert checkpoints_kept(config) == kept
    assert [rule.keep for rule in retention.rules_of(config) if rule.stage == "update"] == [kept]
    assert checkpoints_kept(config.replace(keep_full_checkpoints=0)) == 0
    assert checkpoints_kept(config.replace(keep_full_checkpoints=7)) == 7


def test_with_one_more_checkpoint_the_way_back_is_there_without_latents(fallen: Line) -> None:
    retention.retain(fallen.step(FELL, guard="rewind", keep_latents_iterations=1))
    back = way_back(fallen.store, fallen.config, found(fallen))
    assert back and back.iteration == 2


def test_a_fork_keeps_where_its_parent_was_passed(fallen: Line) -> None:
    fallen.store.update_record(lambda record: record | {"guard_from": 2})
    for number, kept in ((4, 2), (2, 2), (1, None)):
        begin_fork(plan_fork(fallen.store, fallen.config, str(number), f"child-{number}"))
        record = fallen.store.of(f"child-{number}").record() or {}
        assert record.get("guard_from") == kept


def test_show_has_the_guards_row(fallen: Line, capsys: pytest.CaptureFixture[str]) -> None:
    root = fallen.root.files.root
    show.show("parent", None, None, root)
    said = capsys.readouterr().out.splitlines()
    assert [("guard: reward-drop" in line) for line in said if line.startswith("iteration")] == [False] * 3 + [True]
    rows = {}
    for number in (str(FELL), "1"):
        show.show("parent", number, None, root)
        rows[number] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("guard")]
    assert rows["1"] == ["guard      finds nothing"]
    assert len(rows["3"]) == 1 and "reward-drop" in rows["3"][0] and "4.0 standard deviations" in rows["3"][0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"guard_actions": ("beauty=warn",)}, "--guard-actions 'beauty=warn': write CHECK=ACTION"),
        ({"guard_actions": ("grid",)}, "--guard-actions 'grid'"),
        ({"guard_actions": ("grid=stop",)}, "an action of off, warn, suspend, rewind"),
        ({"guard_kl": 0.1, "diffusion_kl_beta": 0.0}, "--guard-kl needs a reference"),
        ({"guard_heldout_window": 2}, "at least 3 evaluations"),
        ({"guard": "stop"}, "--guard 'stop'"),
        ({"guard_grid": -1}, "--guard-grid -1"),
        ({"guard_zero_std_share": 1.5}, "--guard-zero-std-share 1.5"),
    ],
)
def test_what_makes_no_sense_is_refused(fallen: Line, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as fault:
        fallen.config.replace(**options)
    assert said in str(fault.value)


def test_options_are_written_as_they_are_read(fallen: Line) -> None:
    changes = {"guard": "rewind", "guard_actions": ["grid=warn", "kl=off"], "guard_from": 3}
    read = fallen.config.replace(**from_flags(as_flags(changes)))
    assert read.guard.guard_actions == ("grid=warn", "kl=off") and read.guard.guard_from == 3

"""Which stages a rerun makes, which changes make sense for them, what they read, and what is said of it."""

from typing import Any

import pytest
from lines import Line
from lines import made as commit_told
from roots import Root

from miles_core.errors import InputError, StageError
from miles_core.pipeline.rerun import (
    RerunPlan,
    check_overrides,
    chosen_inputs,
    made_before,
    plan_rerun,
    read_line,
    stages_of_rerun,
    stale,
    upstream_of,
)
from miles_core.pipeline.stage import Outcome, run_stage
from miles_core.store.compare import IDENTICAL, compare
from miles_core.store.stages import downstream_of


@pytest.mark.parametrize(
    ("stage", "later"),
    [
        ("prompts", ("rollout", "rewards", "advantages", "update", "sync")),
        ("rollout", ("rewards", "advantages", "update", "sync")),
        ("rewards", ("advantages", "update", "sync")),
        ("advantages", ("update", "sync")),
        ("update", ("sync",)),
        ("sync", ()),
    ],
)
def test_downstream(stage: Any, later: tuple[str, ...]) -> None:
    assert downstream_of(stage) == later


def test_a_rerun_makes_one_stage_and_with_downstream_the_later_ones_up_to_update() -> None:
    assert stages_of_rerun("rewards", downstream=False) == ("rewards",)
    assert stages_of_rerun("rewards", downstream=True) == ("rewards", "advantages", "update")


@pytest.mark.parametrize("stage", ["sync", "reward", "policy", ""])
def test_what_cannot_be_rerun_is_refused(stage: str) -> None:
    with pytest.raises(InputError):
        stages_of_rerun(stage, downstream=False)


@pytest.mark.parametrize(
    ("changes", "stages"),
    [
        ({"lr": 1}, ("rewards",)),
        ({"rm_type": "ocr"}, ("rollout",)),
        ({"lora_rank": 4}, ("update",)),
        ({"run_id": "x"}, ("rewards",)),
        ({"num_rollout": 3}, ("rewards",)),
    ],
)
def test_a_change_of_no_stage_made_is_refused(changes: dict[str, Any], stages: Any) -> None:
    with pytest.raises(InputError):
        check_overrides(changes, stages)


def test_changes_that_matter_and_operational_ones_are_taken() -> None:
    check_overrides({"rm_type": "ocr", "ocr_num_workers": 2}, ("rewards",))
    check_overrides({"lr": 1}, ("rewards", "advantages", "update"))


@pytest.fixture
def run(three: Line) -> Line:
    return three


OTHER = {"rm_type": "jpeg_incompressibility"}


def rerun(run: Line, stage: Any, made: Any = None, attempt: str | None = None, **options: Any) -> Outcome:
    step = run.step(1, moves_line=False, **options)
    upstream = upstream_of(step, stage, made or {}, chosen_inputs(step, attempt))
    return run_stage(step, stage, upstream, commit_told)


def read(outcome: Outcome) -> dict[str, str]:
    return {name: upstream.attempt for name, upstream in outcome.manifest.upstream.items()}


def test_inputs_are_those_of_the_line_and_with_an_attempt_those_that_it_had(run: Line) -> None:
    scored = rerun(run, "rewards", **OTHER)
    assert read(scored) == {"rollout": run.attempt("rollout", 1)} and not scored.reused
    advantages = rerun(run, "advantages", attempt=scored.manifest.attempt[:6])
    assert read(advantages) == {"rewards": scored.manifest.attempt}
    update = rerun(run, "update", attempt=advantages.manifest.attempt)
    assert read(update) == {
        "rollout": run.attempt("rollout", 1),
        "advantages": advantages.manifest.attempt,
        "policy": run.attempt("update", 0),
    }
    # The inputs that the attempt had, also of its own stage.
    again = rerun(run, "update", attempt=update.manifest.attempt)
    assert again.reused and again.manifest == update.manifest
    assert read(rerun(run, "advantages")) == {"rewards": run.attempt("rewards", 1)}
    prompts = rerun(run, "prompts", attempt=run.attempt("prompts", 1))
    assert prompts.reused and read(prompts) == {"prompts": run.attempt("prompts", 0)}


def test_what_is_committed_is_reused_and_forced_it_is_made_beside_and_compared(run: Line) -> None:
    first = rerun(run, "rewards", **OTHER)
    assert rerun(run, "rewards", **OTHER).reused
    step = run.step(1, moves_line=False, force=True, **OTHER)
    upstream = upstream_of(step, "rewards", {}, {})
    assert made_before(step, "rewards", upstream) == first.manifest
    forced = run_stage(step, "rewards", upstream, commit_told)
    assert not forced.reused and forced.manifest.attempt == f"{first.manifest.attempt}.2"
    assert compare(run.store.files, first.manifest, forced.manifest) == IDENTICAL
    line = run_stage(run.step(1, moves_line=False, force=True), "rewards", upstream, commit_told)
    assert line.reason == "asked for again"
    assert made_before(run.step(1, moves_line=False, lr=0.5), "update", upstream_of(step, "update", {}, {})) is None


def test_what_the_line_has_from_another_attempt_is_told_with_the_way_on(run: Line) -> None:
    scored = rerun(run, "rewards", **OTHER).manifest
    assert stale(run.store, [scored]) == (
        f"advantages on the line was made from rewards {run.attempt('rewards', 1)}: `miles fork parent 1 --from-attempt "
        f"{scored.attempt} --run-id NAME` trains on from {scored.attempt}"
    )
    same = rerun(run, "rewards", force=True).manifest
    assert same.attempt != run.attempt("rewards", 1) and stale(run.store, [same]) is None
    step = run.step(0, moves_line=False, lr=0.5)
    update = run_stage(step, "update", upstream_of(step, "update", {}, {}), commit_told).manifest
    told = stale(run.store, [update])
    assert told and told.startswith(
        f"rollout of iteration 1 on the line was made from update {run.attempt('update', 0)}, sync on the line was made"
    )


def test_what_was_read_says_where_it_stands(run: Line) -> None:
    scored = rerun(run, "rewards", **OTHER).manifest
    on_line = run.store.on_line("rollout", 1)
    assert on_line
    assert read_line(run.store, {"rollout": on_line}) == f"read rollout {on_line.attempt} (on the line)"
    assert read_line(run.store, {"rewards": scored}) == f"read rewards {scored.attempt} (beside the line)"


def plan(run: Line, iterations: str, stage: str = "rewards", **options: Any) -> RerunPlan:
    return plan_rerun("parent", run.root.files.root, iterations, stage, **({"overrides": {}} | options))


def test_a_plan_names_iterations_and_resolves_an_attempt(run: Line) -> None:
    assert plan(run, "0:9").selection.iterations == (0, 1, 2)
    whole = run.attempt("rewards", 1)
    assert plan(run, "1", attempt=whole[:5]).attempt == whole
    with pytest.raises(InputError, match="belongs to one iteration: give its number, not 0:9"):
        plan(run, "0:9", attempt=whole)
    with pytest.raises(InputError, match="no committed attempt 'zz'"):
        plan(run, "1", attempt="zz")
    rerun(run, "rewards", force=True)
    with pytest.raises(InputError, match="begins several attempts"):
        plan(run, "1", attempt=whole[:5])


def test_training_from_a_chosen_attempt_whose_inputs_have_gone_says_so(run: Line, root: Root) -> None:
    scored = rerun(run, "rewards", **OTHER).manifest
    rollout = run.store.on_line("rollout", 1)
    assert rollout
    root.remove(rollout.parts[0].path)
    with pytest.raises(StageError, match=r"rollout of iteration 1 \(attempt .*, which rewards .* is gone or damaged"):
        rerun(run, "advantages", attempt=scored.attempt)

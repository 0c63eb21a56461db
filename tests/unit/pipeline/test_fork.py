"""A fork's line begins with another run's attempts: what it keeps, makes, holds, and what it leaves alone."""

import shlex
import time
from typing import Any

import pytest
from lines import Line, made
from roots import Root

from deployments.recipes import recipe
from flows.cli import fork as command
from flows.cli import show
from miles_core.config.overrides import from_flags
from miles_core.errors import InputError, StageError, StoreError
from miles_core.pipeline import retention
from miles_core.pipeline.fork import Fork, begin_fork, plan_fork
from miles_core.pipeline.iteration import finished
from miles_core.pipeline.lineage import made_from
from miles_core.pipeline.run import LATEST, begin_run, open_run, plan_run
from miles_core.pipeline.stage import Product, Step, Upstreams, run_stage
from miles_core.pipeline.upstream import line
from miles_core.store.files import Files
from miles_core.store.parts import write_file
from miles_core.store.run_store import Attempt, RunStore
from miles_core.store.stages import ITERATION_STAGES

OTHER = {"rm_type": "jpeg_incompressibility"}


@pytest.fixture
def parent(three: Line) -> Line:
    retention._PASSED.clear()
    return three


def planned(parent: Line, iteration: int | str, name: str = "child", **options: Any) -> Fork:
    return plan_fork(parent.store, parent.config, str(iteration), name, **options)


def fork(parent: Line, iteration: int, name: str = "child", **options: Any) -> Line:
    begin_fork(planned(parent, iteration, name, **options))
    return Line.open(parent.root, name)


def reused(child: Line, iteration: int) -> list[str]:
    """The stages that training on finds made, over all of the iteration."""
    return [stage for stage, outcome in child.iterate(iteration).items() if outcome.reused]


def test_in_waves_a_changed_reward_draws_the_prompts_again(root: Root, places: dict[str, str]) -> None:
    """They were chosen by it; and by the policy, which is upstream of them."""
    retention._PASSED.clear()
    parent = Line.begin(root, places, over_sampling_batch_size=6)
    for iteration in range(2):
        parent.iterate(iteration)
    assert planned(parent, 1, overrides=OTHER).stage == "prompts"
    with pytest.raises(InputError, match="affect prompts, which comes before rollout: give --stage prompts"):
        planned(parent, 1, overrides=OTHER, stage="rollout")
    child = fork(parent, 1, overrides=OTHER)
    assert reused(child, 0) == list(ITERATION_STAGES) and reused(child, 1) == []
    drawn = child.store.on_line("prompts", 1)
    assert drawn is not None and drawn.affecting_config["rm_type"] == OTHER["rm_type"]
    assert (drawn.upstream["policy"].stage, drawn.upstream["policy"].iteration) == ("update", 0)


def test_a_changed_reward_keeps_prompts_and_rollout_and_makes_the_rest(parent: Line) -> None:
    before = parent.bytes()
    child = fork(parent, 1, overrides=OTHER)
    assert finished(child.step(0)) and not finished(child.step(1))
    assert reused(child, 0) == list(ITERATION_STAGES)
    outcomes = child.iterate(1)
    assert [stage for stage, outcome in outcomes.items() if outcome.reused] == ["prompts", "rollout"]
    kept = parent.store.on_line("rollout", 1)
    assert kept and outcomes["rollout"].manifest == kept
    assert outcomes["rewards"].manifest.upstream["rollout"].run == "parent"
    assert reused(child, 2) == []
    assert all(finished(child.step(i)) for i in range(3))
    assert parent.bytes() == before
    assert not any(name.startswith("child/iteration=000000") for name in parent.root.names())


def test_a_fork_resumes_and_reads_what_it_committed_before(parent: Line) -> None:
    child = fork(parent, 1, overrides=OTHER)
    child.iterate(1)
    again = RunStore(Files(parent.root.files.root), "child")
    assert reused(Line(parent.root, child.config, child.inputs, again), 1) == list(ITERATION_STAGES)
    advantages = again.on_line("advantages", 1)
    assert advantages and {m.held_by for m in made_from(again, advantages).values()} == {"child", "parent"}


def test_a_fork_has_a_wandb_run_of_its_own(parent: Line) -> None:
    parent.config = parent.config.replace(wandb_run_id="theirs", wandb_group="both")
    assert planned(parent, 1).config.logging.wandb_run_id is None
    assert planned(parent, 1).config.logging.wandb_group == "both"
    assert planned(parent, 1, overrides={"wandb_run_id": "ours"}).config.logging.wandb_run_id == "ours"


def test_nothing_changed_begins_the_iteration_anew_and_comes_out_the_same(parent: Line) -> None:
    child = fork(parent, 1)
    assert reused(child, 1) == []
    for stage in ITERATION_STAGES:
        own, theirs = child.store.on_line(stage, 1), parent.store.on_line(stage, 1)
        assert own and theirs and own.content_digest == theirs.content_digest and own.folder != theirs.folder


def test_at_the_end_all_is_kept(parent: Line) -> None:
    child = fork(parent, 3, overrides={"lr": 0.5})
    assert child.config.run.num_rollout == 4
    assert all(reused(child, i) == list(ITERATION_STAGES) for i in range(3))
    assert reused(child, 3) == []


def test_an_attempt_is_taken_with_what_it_was_made_from_and_its_options(parent: Line) -> None:
    scored = parent.stage(parent.step(1, moves_line=False, **OTHER), "rewards").manifest
    child = fork(parent, 1, attempt=scored.attempt[:8])
    assert child.config.reward.rm_type == "jpeg_incompressibility"
    assert child.store.on_line("rewards", 1) == scored
    assert reused(child, 1) == ["prompts", "rollout", "rewards"]
    record = child.store.record()
    assert record is not None
    told = record["parent"]
    assert (told["run"], told["iteration"], told["attempt"]) == ("parent", 1, scored.attempt)
    assert told["differences"] == {"rm_type": ["jpeg_compressibility", "jpeg_incompressibility"]}
    assert fork(
        parent, 1, "own", attempt=scored.attempt, overrides={"rm_type": "jpeg_compressibility"}
    ).config.reward == (parent.config.reward)


def test_a_fork_goes_on_from_rewards_that_a_forced_remake_changed(parent: Line) -> None:
    def rescored(step: Step, attempt: Attempt, upstream: Upstreams) -> Product:
        return Product([write_file(step.store.files, attempt.path("data/x.json"), b"{}")], {"reward_mean": 1.0})

    standing, step = parent.store.on_line("rewards", 1), parent.step(1, moves_line=False, force=True)
    changed = run_stage(step, "rewards", {"rollout": line(step, "rollout", 1)}, rescored).manifest
    assert standing and changed.attempt == f"{standing.attempt}.2" and changed.content_digest != standing.content_digest
    child = fork(parent, 1, attempt=changed.attempt)
    assert reused(child, 1) == ["prompts", "rollout", "rewards"]
    assert child.store.on_line("rewards", 1) == changed
    advantages = child.store.on_line("advantages", 1)
    assert advantages and [u.content_digest for u in advantages.upstream.values()] == [changed.content_digest]
    assert parent.store.on_line("rewards", 1) == standing


def test_an_attempt_of_a_policy_that_is_not_on_the_line_is_refused(parent: Line) -> None:
    updated = parent.stage(parent.step(0, moves_line=False, lr=0.5), "update").manifest
    products = {"prompts": parent.store.on_line("prompts", 1), "policy": updated}
    rollout = run_stage(parent.step(1, moves_line=False), "rollout", products, made).manifest  # type: ignore[arg-type]
    with pytest.raises(InputError, match="update of iteration 0 that is not on the line"):
        planned(parent, 1, attempt=rollout.attempt)


def test_the_command_it_prints_carries_it_on(parent: Line, capsys: pytest.CaptureFixture[str]) -> None:
    class Given:
        args = ("--rm-type", "jpeg_incompressibility", "--lr", "0.5", "--globalize-reward-mean")

    command.fork(Given(), "parent", "1", "child", None, None, parent.root.files.root)  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert "run child is a fork of parent: it keeps iteration 0, and of iteration 1 prompts, rollout" in said
    assert "--lr 0.01 → 0.5" in said
    words = shlex.split(said.splitlines()[-1])
    assert words[:3] == ["miles", "train", "tiny"]
    carried = plan_run(recipe("tiny").replace(**from_flags(words[3:])), "tiny")
    assert carried.begun and carried.store.run == "child"
    begin_run(carried, "tiny", "/code")
    with pytest.raises(InputError, match="another meaning"):
        plan_run(recipe("tiny").replace(**(from_flags(words[3:]) | {"lr": 0.25})), "tiny")


def test_a_fork_of_a_fork_stands_on_both(parent: Line) -> None:
    child = fork(parent, 1, overrides=OTHER)
    child.iterate(1)
    grandchild = fork(child, 2, "grandchild", overrides={"lr": 0.5})
    rollout, rewards = (grandchild.store.on_line(stage, 1) for stage in ("rollout", "rewards"))  # type: ignore[arg-type]
    assert rollout and rewards and (rollout.held_by, rewards.held_by) == ("parent", "child")
    assert all(reused(grandchild, i) == list(ITERATION_STAGES) for i in range(2))
    assert reused(grandchild, 2) == []


@pytest.mark.parametrize("iteration", ["4", "-1", "one", ""])
def test_an_iteration_that_cannot_be_forked_at(parent: Line, iteration: str) -> None:
    with pytest.raises(InputError, match="from 0 to 3"):
        planned(parent, iteration)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"overrides": {"lora_rank": 2}}, "--lora-rank belongs to the policy"),
        ({"overrides": {"run_id": "x"}}, "--run-id has no meaning"),
        ({"overrides": OTHER, "stage": "update"}, "give --stage rewards"),
        ({"stage": "reward"}, "no stage 'reward'"),
        ({"attempt": "nothing"}, "no committed attempt 'nothing'"),
        ({"name": "parent"}, "run parent exists already"),
        ({"name": "../x"}, "is no name"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_is_left(parent: Line, options: dict[str, Any], words: str) -> None:
    before = parent.root.names()
    with pytest.raises(InputError, match=words):
        begin_fork(planned(parent, 1, **options))
    assert parent.root.names() == before


def test_a_fork_that_fails_leaves_nothing(parent: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store refuses the last write: the record itself."""
    before, create, ready = parent.root.names(), Files.create, planned(parent, 1)

    def refuse(files: Files, path: str, data: Any) -> bool:
        if path.endswith("run.json"):
            raise StoreError("no space left")
        return create(files, path, data)

    monkeypatch.setattr(Files, "create", refuse)
    with pytest.raises(StoreError):
        begin_fork(ready)
    assert parent.root.names() == before


def test_of_two_forks_of_one_name_the_second_is_refused(parent: Line) -> None:
    first, second = planned(parent, 1), planned(parent, 2, overrides={"lr": 0.5})
    begin_fork(first)
    record = parent.root.get("child/run.json")
    with pytest.raises(InputError, match="run child exists already"):
        begin_fork(second)
    assert parent.root.get("child/run.json") == record
    assert retention.held_by_forks(parent.store, retention.rules_of(parent.config)[1]) == {
        (0, parent.attempt("update", 0))
    }


def test_what_is_kept_and_was_damaged_is_told_and_a_remake_of_the_same_content_serves(parent: Line, root: Root) -> None:
    child = fork(parent, 1, overrides=OTHER)
    rollout = parent.store.on_line("rollout", 1)
    assert rollout is not None
    root.remove(rollout.parts[0].path)
    with pytest.raises(StageError, match="keeps rollout of iteration 1 of run parent.*`miles train` of run parent"):
        child.iterate(1)
    parent.iterate(1)
    assert parent.attempt("rollout", 1) == f"{rollout.attempt}.2"
    assert reused(child, 1) == ["prompts", "rollout"]
    assert child.attempt("rollout", 1) == f"{rollout.attempt}.2"
    root.remove(f"{rollout.folder}.2/manifest.json")
    with pytest.raises(StageError, match="it is gone"):
        child.iterate(1)


def test_a_damaged_or_unfinished_parent_is_not_forked(parent: Line, root: Root) -> None:
    parent.store.files.create("parent/iteration=000003/stage=prompts/x/attempt.json", b"{}")
    with pytest.raises(InputError, match="prompts of iteration 3 is not on its line"):
        planned(parent, 3, stage="rewards")
    update = parent.store.on_line("update", 0)
    assert update is not None
    root.remove(update.parts[0].path)
    with pytest.raises(InputError, match="update of iteration 0 is damaged"):
        planned(parent, 1)


def prune(line: Line, at: int) -> list[str]:
    """Files that went in a pass after this iteration, which keeps 2 checkpoints and 1 iteration's latents."""
    retention._PASSED.clear()
    before = set(line.root.names())
    retention.retain(line.step(at, keep_full_checkpoints=2, keep_latents_iterations=1))
    return sorted(before - set(line.root.names()))


def test_the_parent_keeps_what_a_fork_would_keep_and_the_fork_prunes_nothing_of_it(parent: Line) -> None:
    child = fork(parent, 1, overrides=OTHER | {"keep_latents_iterations": 1})
    parent.iterate(3)
    gone = prune(parent, 3)
    assert [name for name in gone if "/checkpoint/" in name] == [
        f"parent/iteration=000001/stage=update/{parent.attempt('update', 1)}/checkpoint/x.json"
    ]
    assert not any("iteration=000001/stage=rollout" in name for name in gone)
    assert any("iteration=000000/stage=rollout" in name for name in gone)
    for iteration in (1, 2, 3):
        child.iterate(iteration)
    gone = prune(child, 3)
    assert gone and not any(name.startswith("parent/") for name in gone)
    gone = prune(parent, 3)
    assert any("iteration=000000/stage=update" in name for name in gone)
    assert any("iteration=000001/stage=rollout" in name for name in gone)
    assert all(finished(child.step(i)) for i in range(4))


def test_a_fork_that_was_removed_holds_nothing(parent: Line, root: Root) -> None:
    fork(parent, 1)
    rule = retention.rules_of(parent.config)[1]
    assert retention.held_by_forks(parent.store, rule)
    root.remove("child/run.json")
    assert retention.held_by_forks(parent.store, rule), "it may be about to be made"
    yesterday = time.time() - 25 * 3600
    note = parent.store.files.read("parent/forks/child.json").replace(b'"when":', f'"when":{yesterday},"was":'.encode())
    parent.store.files.replace("parent/forks/child.json", note)
    assert retention.held_by_forks(parent.store, rule) == set()


def test_latents_that_were_pruned_are_asked_for_before_a_fork_is_made(parent: Line) -> None:
    prune(parent, 2)
    with pytest.raises(InputError, match=r"`miles rerun parent 1 rollout` generates them again, then fork"):
        planned(parent, 1, overrides=OTHER)
    parent.stage(parent.step(1, moves_line=False), "rollout")
    assert reused(fork(parent, 1, overrides=OTHER), 1) == ["prompts", "rollout"]


def test_show_tells_where_a_fork_stands(parent: Line, capsys: pytest.CaptureFixture[str]) -> None:
    child = fork(parent, 1, overrides=OTHER)
    show.show("child", None, None, parent.root.files.root)
    said = capsys.readouterr().out
    assert "a fork of parent at iteration 1" in said
    assert "iteration 0: 6 of 6 stages" in said and "kept of parent" in said and "beside the line" not in said
    assert "iteration 1: 2 of 6 stages" in said
    show.show("child", "1", "rollout", parent.root.files.root)
    said = capsys.readouterr().out
    assert f"{child.attempt('rollout', 1)}" in said and "of run parent" in said and "parent/iteration=000001" in said


def test_latest_is_the_run_that_trained_last(parent: Line, places: dict[str, str]) -> None:
    root = parent.root.files.root
    child = fork(parent, 1)
    assert open_run(LATEST, root)[0].run == "parent"
    child.iterate(1)
    assert open_run(LATEST, root)[0].run == "child"
    parent.iterate(3)
    assert open_run(LATEST, root)[0].run == "parent"
    Line.begin(parent.root, places, LATEST)
    assert open_run(LATEST, root)[0].run == LATEST

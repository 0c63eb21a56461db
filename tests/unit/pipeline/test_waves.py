"""Waves of prompts: which groups are trained on, what becomes of the others, and that a try ends like the one before."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
import torch
from tiny_run import SMALL, TinyRun, generate, score

from miles_core.algorithms.filters import Verdict
from miles_core.data.sample import Sample
from miles_core.errors import InputError, StageError
from miles_core.pipeline import advantages, prompts, waves
from miles_core.pipeline.run import differences, meaning_of
from miles_core.pipeline.stage import Step, Upstreams, run_stage
from miles_core.pipeline.upstream import previous_prompts
from miles_core.pipeline.verdicts import choose, decide
from miles_core.store.manifest import Manifest
from miles_core.store.parts import read_table
from miles_core.store.run_store import Attempt
from miles_core.store.stages import STAGES

FILTER = "check_reward_nonzero_std"
FILTERS = """
from miles.rollout.filter_hub.base_types import DynamicFilterOutput
from miles.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
from miles.utils.types import Sample

SEEN = []


def even(args, samples: list[Sample], **kwargs):
    SEEN.append([(s.group_index, s.prompt, s.reward, s.metadata, s.generated_output) for s in samples])
    return DynamicFilterOutput(keep=samples[0].group_index % 2 == 0, reason="odd")


def as_a_bool(args, samples):
    return samples[0].group_index % 2 == 0


def nothing(args, samples):
    return None


def every_other_time(args, samples):
    SEEN.append(0)
    return len(SEEN) % 2 == 1


def last(args, rollout_id, buffer, num_samples):
    return buffer[-num_samples:]
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> tuple[str, str]:
    """(module, folder) of the filters; a module of its own for each test, as a process imports one content once."""
    name = f"filters_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(FILTERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name, str(tmp_path)


class Drawn:
    """An iteration's prompts in waves, each sample with the reward that `rewards` gives its index."""

    def __init__(self, run: TinyRun, monkeypatch: pytest.MonkeyPatch, rewards: Any, **changes: Any) -> None:
        self.run, self.changes, self.waves = run, changes, list[list[int]]()

        def make(step: Step, attempt: Attempt, upstream: Upstreams, groups: list[list[Sample]]) -> dict[int, float]:
            self.waves.append([group[0].group_index for group in groups])
            return {s.index: float(rewards(s)) for group in groups for s in group}

        monkeypatch.setattr(waves.draw_waves, "__defaults__", (make,))

    def step(self, iteration: int = 0, **changes: Any) -> Step:
        step = self.run.step(iteration, **self.changes | changes)
        step.inputs = waves_inputs(step)
        return step

    def prompts(self, iteration: int = 0, **changes: Any) -> Manifest:
        step = self.step(iteration, **changes)
        return run_stage(step, "prompts", previous_prompts(step), prompts.draw).manifest

    def groups(self, manifest: Manifest) -> list[dict[str, Any]]:
        (part,) = manifest.under("groups/")
        return cast(list[dict[str, Any]], read_table(self.run.store.files, part).to_pylist())


def waves_inputs(step: Step) -> Any:
    from miles_core.pipeline.inputs import resolve_inputs

    return resolve_inputs(step.config)


@pytest.fixture
def begun(trained_run: TinyRun, tmp_path: Path) -> TinyRun:
    """The model and prompts of a run, and a run that has a policy and no iteration."""
    run = TinyRun(tmp_path / "begun", trained_run.home)
    for part in (init := cast(Manifest, trained_run.store.on_line("policy", -1))).parts:
        run.store.files.create(part.path, trained_run.store.files.read(part.path))
    run.store.files.create(f"{init.folder}/manifest.json", init.to_bytes())
    run.store.move_line(init)
    return run


def test_waves_are_drawn_until_enough_groups_are_kept(begun: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropped groups stay as rows; surplus ones are served first in the next iteration, under their own numbers."""
    flat = {0, 1, 3}
    drawn = Drawn(
        begun,
        monkeypatch,
        lambda s: 0.5 if s.group_index in flat else s.index,
        dynamic_sampling_filter_path=FILTER,
        over_sampling_batch_size=3,
    )
    first = drawn.prompts()
    assert drawn.waves == [[0, 1, 2], [3, 4, 5]]
    assert [(r["group_index"], r["wave"], r["passed"], r["kept"], r["reason"]) for r in drawn.groups(first)] == [
        (0, 1, False, False, "zero_std_0.5"),
        (1, 1, False, False, "zero_std_0.5"),
        (2, 1, True, True, None),
        (3, 2, False, False, "zero_std_0.5"),
        (4, 2, True, True, None),
        (5, 2, True, False, "surplus: in the buffer"),
    ]
    told = {
        k: first.summary[k] for k in ("waves", "prompts", "groups_kept", "groups_surplus", "groups_dropped", "buffer")
    }
    assert told == {
        "waves": 2,
        "prompts": 6,
        "groups_kept": 3,
        "groups_surplus": 1,
        "groups_dropped": {"zero_std_0.5": 3},
        "buffer": 1,
    }
    rows = [row for part in first.data for row in read_table(begun.store.files, part).to_pylist()]
    assert [row["sample_index"] for row in rows] == list(range(12))


def test_the_trained_groups_alone_are_normalized_and_the_others_are_rows(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the batch's mean and std, which a dropped group does not move."""
    table = pa.concat_tables([read_table(run.store.files, p) for p in line_of(run, "rewards").data])
    rewards = dict(zip(table["sample_index"].to_pylist(), table["reward"].to_pylist(), strict=True))
    changes = {"over_sampling_batch_size": 2, "rollout_batch_size": 1, "globalize_reward_mean": True}
    step = run.step(0, moves_line=False, **changes)
    made = run_stage(step, "advantages", {"rewards": line_of(run, "rewards")}, advantages.normalize).manifest
    rows = sorted(read_table(run.store.files, made.data[0]).to_pylist(), key=lambda row: row["sample_index"])
    assert [row["kept"] for row in rows] == [True, True, False, False]
    assert [row["reason"] for row in rows[2:]] == ["surplus: in the buffer"] * 2
    assert [row["raw_reward"] for row in rows] == [rewards[row["sample_index"]] for row in rows]
    assert [row["advantage"] for row in rows[2:]] == [0.0, 0.0] and all(row["remove_sample"] for row in rows[2:])
    assert sum(row["advantage"] for row in rows[:2]) == pytest.approx(0.0, abs=1e-6) and rows[0]["advantage"] != 0
    assert rows[2]["group_mean"] == pytest.approx((rewards[2] + rewards[3]) / 2)


def line_of(run: TinyRun, stage: Any) -> Manifest:
    return cast(Manifest, run.store.on_line(stage, 0))


def test_a_filter_of_ones_own_sees_scored_groups_in_order_of_their_index(
    begun: TinyRun, monkeypatch: pytest.MonkeyPatch, code: tuple[str, str]
) -> None:
    module, folder = code
    own = {"dynamic_sampling_filter_path": f"{module}.even", "code_path": folder}
    drawn = Drawn(begun, monkeypatch, lambda s: s.index / 10, **own)
    first = drawn.prompts()
    assert [r["reason"] for r in drawn.groups(first)] == [None, "odd", None, "odd"]
    import importlib

    seen = importlib.import_module(module).SEEN
    assert [group[0][0] for group in seen] == [0, 1, 2, 3]
    assert seen[0][1][1:] == (seen[0][0][1], 0.1, {}, None) and seen[0][0][1]
    step = drawn.step(dynamic_sampling_filter_path=f"{module}.as_a_bool")
    groups = [[Sample(group_index=i, index=i, prompt="p", seed=i, reward=0.0)] for i in (1, 0)]
    assert decide(step, groups) == [Verdict(0, True), Verdict(1, False, "dropped")]
    with pytest.raises(StageError, match="returned NoneType for group 0: return DynamicFilterOutput"):
        decide(drawn.step(dynamic_sampling_filter_path=f"{module}.nothing"), groups)


@pytest.mark.parametrize("value", [torch.tensor(1.0) > 0, np.float64(1.0) > 0, True])
def test_a_verdict_may_be_what_a_tensor_compares_to(
    begun: TinyRun, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    monkeypatch.setattr("miles_core.pipeline.verdicts.check_reward_nonzero_std", lambda args, samples: value)
    step = SimpleNamespace(config=begun.config.replace(dynamic_sampling_filter_path=FILTER), iteration=0)
    (verdict,) = decide(cast(Any, step), [[Sample(group_index=3, index=6, prompt="p", seed=1, reward=0.0)]])
    assert verdict == Verdict(3, True)


def test_an_own_buffer_filter_says_what_is_served_first(
    begun: TinyRun, monkeypatch: pytest.MonkeyPatch, code: tuple[str, str]
) -> None:
    module, folder = code
    own = {"buffer_filter_path": f"{module}.last", "code_path": folder, "over_sampling_batch_size": 4}
    drawn = Drawn(begun, monkeypatch, lambda s: s.index, rollout_batch_size=1, **own)
    first = drawn.prompts()
    assert first.summary["buffer"] == 3 and drawn.waves == [[0, 1, 2, 3]]
    # Served, and gone from the buffer although the filter left it there.
    from miles_core.pipeline.source import opened

    step = drawn.step(1)
    with opened(step.config, 1, step.store.files, first) as source:
        assert [group[0].group_index for group in source.draw(1)] == [3]
        assert [group[0].group_index for group in source.source.buffer] == [1, 2]


def test_too_many_waves_end_with_what_was_kept_and_why_the_others_were_not(
    begun: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"dynamic_sampling_filter_path": FILTER, "dynamic_sampling_max_waves": 2}
    drawn = Drawn(begun, monkeypatch, lambda s: s.index if s.group_index == 1 else 0.25, **changes)
    with pytest.raises(StageError) as told:
        drawn.prompts()
    assert "2 waves of 2 prompts kept 1 group, and --rollout-batch-size asks for 2" in str(told.value)
    assert "dropped: 3 zero_std_0.2" in str(told.value) and "--dynamic-sampling-max-waves above 2" in str(told.value)
    assert drawn.run.store.on_line("prompts", 0) is None
    # The same prompts again, and further ones: the limit is no part of what is made.
    drawn.waves.clear()
    with pytest.raises(StageError, match="3 waves"):
        drawn.prompts(dynamic_sampling_max_waves=3)
    assert drawn.waves == [[0, 1], [2, 3], [4, 5]]


def test_a_rerun_whose_rewards_keep_too_few_groups_says_so(run: TinyRun) -> None:
    groups = {
        i: [Sample(group_index=i, index=2 * i + k, prompt="p", seed=k, reward=k * i) for k in (0, 1)] for i in (0, 1)
    }
    step = run.step(0, moves_line=False, dynamic_sampling_filter_path=FILTER)
    with pytest.raises(StageError, match=r"of the 2 groups of iteration 0 1 are kept .*dropped: 1 zero_std_0"):
        choose(step, groups, None)


def test_a_filter_that_says_something_else_of_the_same_rewards_is_found_out(
    begun: TinyRun, monkeypatch: pytest.MonkeyPatch, code: tuple[str, str]
) -> None:
    """It would put a group into the buffer and train on it too."""
    module, folder = code
    own = {"dynamic_sampling_filter_path": f"{module}.every_other_time", "code_path": folder}
    drawn = Drawn(begun, monkeypatch, lambda s: s.index, **own, rollout_batch_size=1)
    first = drawn.prompts()
    assert drawn.waves == [[0]]
    groups = {0: [Sample(group_index=0, index=i, prompt="p", seed=i, reward=float(i)) for i in (0, 1)]}
    with pytest.raises(StageError, match="said keep of group 0 when the prompts .* and drop now"):
        choose(drawn.step(), groups, first)


def test_a_wave_is_made_as_a_whole_iteration_is(begun: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, latents and rewards of prompts in waves have the digests of the same prompts drawn at once."""

    def make(step: Step, attempt: Attempt, upstream: Upstreams, groups: list[list[Sample]]) -> dict[int, float]:
        return {s.index: float(s.index) for group in groups for s in group}

    monkeypatch.setattr(waves.draw_waves, "__defaults__", (make,))
    at_once = begun.step(0, moves_line=False, rollout_batch_size=4)
    in_waves = begun.step(0, moves_line=False, over_sampling_batch_size=4)
    digests = []
    for step in (at_once, in_waves):
        step.inputs = waves_inputs(step)
        drawn = run_stage(step, "prompts", previous_prompts(step), prompts.draw).manifest
        policy = cast(Manifest, begun.store.on_line("policy", -1))
        rollout = run_stage(step, "rollout", {"prompts": drawn, "policy": policy}, generate).manifest
        rewards = run_stage(step, "rewards", {"rollout": rollout}, score).manifest
        digests.append((rollout.content_digest, rewards.content_digest))
    assert digests[0] == digests[1]


def test_without_waves_nothing_is_made_under_another_name(begun: TinyRun) -> None:
    """A run that was begun before there were waves is carried on."""
    plain, said = begun.config, begun.config.replace(over_sampling_batch_size=2, dynamic_sampling_max_waves=3)
    assert said.args().over_sampling_batch_size == plain.args().over_sampling_batch_size == 2
    for stage in STAGES:
        assert said.affecting(stage) == plain.affecting(stage)
        assert not {"over_sampling_batch_size", "dynamic_sampling_filter_path"} & plain.affecting(stage).keys()
    assert meaning_of(said, begun.inputs) == meaning_of(plain, begun.inputs)
    more = begun.config.replace(over_sampling_batch_size=3)
    told = differences(meaning_of(more, begun.inputs), meaning_of(plain, begun.inputs))
    assert told == {"over_sampling_batch_size": [3, None]}
    assert more.affecting("prompts")["rm_type"] == plain.reward.rm_type and "rm_type" not in plain.affecting("prompts")


def test_options_that_cannot_be_are_refused() -> None:
    from deployments.recipes import recipe

    tiny = recipe("tiny").replace(**SMALL)
    with pytest.raises(InputError, match="--over-sampling-batch-size 1 is less than --rollout-batch-size 2"):
        tiny.replace(over_sampling_batch_size=1)
    with pytest.raises(InputError, match="drops every group of one sample"):
        tiny.replace(dynamic_sampling_filter_path=FILTER, n_samples_per_prompt=1, rollout_microgroup_size=1)
    for spelled in (
        FILTER,
        f"miles.rollout.filter_hub.dynamic_sampling_filters.{FILTER}",
        f"miles/rollout/filter_hub/dynamic_sampling_filters.py/{FILTER}",
        f"miles_core.algorithms.filters.{FILTER}",
    ):
        found = tiny.replace(dynamic_sampling_filter_path=spelled)
        assert found.sampling.dynamic_sampling_filter_path == FILTER and not found.own_code
    own = tiny.replace(dynamic_sampling_filter_path=f"mine.{FILTER}")
    assert own.own_code == {"dynamic_sampling_filter_path": f"mine.{FILTER}"}
    stock = {"data_source_path": "RolloutDataSourceWithBuffer", "buffer_filter_path": "pop_first"}
    assert tiny.replace(**{n: f"miles.rollout.data_source.{v}" for n, v in stock.items()}) == tiny

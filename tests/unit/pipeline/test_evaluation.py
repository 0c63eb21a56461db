"""evaluation beside the chain: what it asks for, what it commits, when it is due, what its failure does."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from roots import FolderRoot, Root
from tiny_run import TinyRun

from miles_core.data.eval_samples import FIRST_SEED, eval_samples
from miles_core.errors import InputError, StageError
from miles_core.pipeline import evaluation
from miles_core.pipeline.budget import estimate, measured
from miles_core.pipeline.fork import begin_fork, plan_fork
from miles_core.pipeline.inputs import resolve_inputs
from miles_core.pipeline.iteration import finished
from miles_core.pipeline.log import RunLog
from miles_core.pipeline.policy import adapter_of, policy_version
from miles_core.pipeline.rerun import check_overrides, stages_of_rerun
from miles_core.pipeline.stage import Outcome, Product, Step, Upstreams, find_stage, run_stage, stage_fingerprint
from miles_core.rewards.jpeg import jpeg_compressibility
from miles_core.rewards.worker import RewardWorker
from miles_core.rollout.diffusers_engine import DiffusersEngine
from miles_core.rollout.parsing import evaluated_table
from miles_core.rollout.protocol import GenerateRequest
from miles_core.rollout.rollout_function import sampling_params
from miles_core.store.lock import LockLost
from miles_core.store.parts import read_bytes, read_table
from miles_core.store.run_store import Attempt, RunStore
from miles_core.store.schemas import evaluation_schema
from miles_core.store.sql import Database
from miles_core.weights.adapter_file import to_push

SAMPLES = 3


@pytest.fixture
def evaluated(run: TinyRun) -> TinyRun:
    """A trained run of four iterations with a set of two prompts to evaluate on, every second iteration."""
    (run.root / "held-out.txt").write_text("a tall tree\na low wall\n")
    changes = {"eval_prompt_data": f"held-out {run.root}/held-out.txt", "eval_interval": 2}
    run.config = run.config.replace(**changes, n_samples_per_eval_prompt=SAMPLES, diffusion_eval_num_steps=2)
    run.inputs = resolve_inputs(run.config)
    return run


def make(step: Step, attempt: Attempt, upstream: Upstreams) -> Product:
    """The evaluation from an engine, a parser and a scorer in this process."""
    files, policy, config = step.store.files, upstream["policy"], step.config
    engine = DiffusersEngine(
        name="e0", checkpoint=str(step.inputs.checkpoint), family="sd3", dtype="fp32", device="cpu"
    )
    engine.start()
    lora = {"lora_alpha": config.lora.lora_alpha, "lora_rank": config.lora.lora_rank}
    engine.update_weights(to_push(read_bytes(files, adapter_of(policy))), **lora)
    parts, each = [], cast(Any, step.inputs.evaluation)
    groups = eval_samples(each.prompts, SAMPLES)
    args = evaluation.eval_args(config, len(groups))
    size = args.rollout_microgroup_size
    for group in [samples[start : start + size] for samples in groups for start in range(0, len(samples), size)]:
        request = GenerateRequest(**sampling_params(args, group, 0))
        made = evaluated_table(
            engine.generate(request),
            request,
            eval_set=each.set_of(group[0].group_index),
            prompt_index=group[0].group_index,
            sample_indices=[s.index for s in group],
            policy_digest=policy.summary["policy_digest"],
            policy_version=policy_version(policy),
        )
        path = attempt.path(f"data/{group[0].index:08d}-1.parquet")
        metadata = {s.index: s.metadata for s in group}
        parts.append(RewardWorker(config.flat()).score_evaluation(files, made, path, list(each.components), metadata))
    engine.stop()
    told = {"policy_digest": policy.summary["policy_digest"], "policy_version": policy_version(policy)}
    return Product(parts, told | {"sets": {}})


def evaluate(step: Step) -> Outcome:
    return run_stage(step, "evaluation", {"policy": evaluation.evaluated_policy(step)}, make)


def rows(run: TinyRun, outcome: Outcome) -> list[dict[str, Any]]:
    tables = [read_table(run.store.files, part) for part in outcome.manifest.data]
    assert all(t.schema.equals(evaluation_schema(["jpeg_compressibility"]), check_metadata=True) for t in tables)
    return cast(list[dict[str, Any]], pa.concat_tables(tables).to_pylist())


def test_a_row_is_a_picture_with_its_reward_and_what_it_is_of(evaluated: TinyRun) -> None:
    found = rows(evaluated, evaluate(evaluated.step(1)))
    assert [row["sample_index"] for row in found] == list(range(2 * SAMPLES))
    assert [row["seed"] for row in found] == list(range(FIRST_SEED, FIRST_SEED + 2 * SAMPLES))
    assert [row["prompt"] for row in found] == ["a tall tree"] * SAMPLES + ["a low wall"] * SAMPLES
    assert {(row["eval_set"], row["num_steps"], row["policy_version"]) for row in found} == {("held-out", 2, 1)}
    assert {row["policy_digest"] for row in found} == {
        cast(Any, evaluated.store.on_line("update", 1)).summary["policy_digest"]
    }
    for row in found:
        image = np.asarray(Image.open(io.BytesIO(row["image"]["bytes"])))
        assert image.shape == (64, 64, 3)
        assert row["reward"] == row["score_jpeg_compressibility"] == jpeg_compressibility(image)
    assert len({row["image"]["bytes"] for row in found}) == 2 * SAMPLES


def test_the_same_policy_gives_the_same_digest_and_another_another(evaluated: TinyRun) -> None:
    """Times, engine and worker do not count."""
    first = evaluate(evaluated.step(1)).manifest
    again = evaluated.step(1)
    again.force = True
    second = evaluate(again)
    assert second.reason == "asked for again" and not second.reused
    assert second.manifest.attempt == f"{first.attempt}.2"
    assert second.manifest.content_digest == first.content_digest
    assert evaluate(evaluated.step(3)).manifest.content_digest != first.content_digest
    assert evaluate(evaluated.step(1)).reused


def test_it_lies_beside_policy_init_and_in_its_iteration_in_a_folder_and_in_a_bucket(
    evaluated: TinyRun, root: Root
) -> None:
    files = evaluated.store.files
    for name in FolderRoot(Path(files.root)).names():
        root.put(name, files.read(name))
    step = evaluated.step(1)
    step.store = RunStore(root.files, evaluated.store.run)
    folders = [evaluate(one).manifest.folder for one in (step.at(-1), step)]
    assert folders[0].startswith("r/policy/evaluation/")
    assert folders[1].startswith("r/iteration=000001/stage=evaluation/")
    assert not evaluation.missing(step) and evaluate(step).reused
    assert step.store.line_iterations("evaluation") == [-1, 1]
    assert not any("latents" in name or "conditioning" in name for name in root.names() if folders[1] in name)


def test_requests_are_ode_steps_of_one_prompt_whatever_training_does(evaluated: TinyRun) -> None:
    config = evaluated.config.replace(diffusion_sde_type="cps", rollout_microgroup_size=2)
    args = evaluation.eval_args(config, 2)
    assert (args.rollout_microgroup_size, args.rollout_batch_size, args.n_samples_per_prompt) == (2, 2, SAMPLES)
    request = GenerateRequest(**sampling_params(args, eval_samples(evaluated.inputs.prompts, 1)[0], 7))
    assert (request.sde_type, request.noise_level, request.sde_step_indices) == ("ode", 0.0, None)
    assert request.guidance_scale == config.rollout.diffusion_guidance_scale
    one = evaluation.eval_args(config.replace(n_samples_per_eval_prompt=1), 2)
    assert one.rollout_microgroup_size == 1


def test_what_is_evaluated_changes_no_other_fingerprint_and_no_meaning(evaluated: TinyRun) -> None:
    """A scorer of the set's own neither: it would be a column of the run's rewards."""
    (evaluated.root / "own.jsonl").write_text(
        '{"input": "a tall tree", "metadata": {"rm_type": "jpeg_incompressibility"}}\n'
    )
    plain = TinyRun(evaluated.root / "plain", evaluated.home)
    config = evaluated.config.replace(eval_prompt_data=f"own {evaluated.root}/own.jsonl")
    step = evaluated.step(1)
    step.config, step.inputs = config, resolve_inputs(config)
    assert step.inputs.evaluation is not None
    assert step.inputs.evaluation.components == ("jpeg_incompressibility",)
    assert step.inputs.components == plain.inputs.components == ("jpeg_compressibility",)
    for stage in ("policy", "prompts", "rollout", "rewards", "advantages", "update", "sync"):
        assert stage_fingerprint(step, stage, {}) == stage_fingerprint(plain.step(1), stage, {})  # type: ignore[arg-type]
    assert finished(step) and evaluation.missing(step)
    prints = {stage_fingerprint(one, "evaluation", {}) for one in (step, evaluated.step(1), evaluated.step(3))}
    assert len(prints) == 3


def test_an_evaluation_is_due_after_every_so_many_iterations_and_before_the_first(evaluated: TinyRun) -> None:
    due = [i for i in range(-1, 4) if evaluation.due(evaluated.step(i))]
    assert due == [-1, 1, 3]
    assert not evaluation.due(evaluated.step(-1, skip_eval_before_train=True))
    assert not any(evaluation.due(evaluated.step(i, eval_interval=None)) for i in range(-1, 4))


def test_a_finished_iteration_lacks_what_is_due_until_it_is_on_the_line(evaluated: TinyRun) -> None:
    assert [evaluation.missing(evaluated.step(i)) for i in range(4)] == [True, True, False, True]
    for iteration in (-1, 1):
        evaluate(evaluated.step(iteration))
    assert [evaluation.missing(evaluated.step(i)) for i in range(4)] == [False, False, False, True]
    evaluate(evaluated.step(3, moves_line=False))
    assert evaluation.missing(evaluated.step(3))
    assert evaluation.missing(evaluated.step(1, diffusion_eval_num_steps=3))
    assert not evaluation.missing(evaluated.step(1, eval_interval=None))
    assert evaluated.store.on_line("evaluation", -1) is not None
    assert evaluated.store.attempts("evaluation", -1) and evaluated.store.iterations() == [0, 1, 2, 3]
    assert evaluated.store.line_iterations("evaluation") == [-1, 1]


def test_a_damaged_part_is_evaluated_again(evaluated: TinyRun) -> None:
    made = evaluate(evaluated.step(1)).manifest
    evaluated.store.files.delete(made.data[0].path)
    assert evaluation.missing(evaluated.step(1))
    assert evaluate(evaluated.step(1)).manifest.content_digest == made.content_digest


def test_what_an_earlier_try_left_whole_is_kept(evaluated: TinyRun) -> None:
    step = evaluated.step(1)
    policy = {"policy": evaluation.evaluated_policy(step)}
    wanted = stage_fingerprint(step, "evaluation", {"policy": policy["policy"].fingerprint})
    attempt = step.store.open_attempt("evaluation", 1, wanted, policy, resumable=True)
    parts = make(step, attempt, policy).parts
    kept = dict(zip((0, 2, SAMPLES, SAMPLES + 2), parts, strict=True))
    groups = eval_samples(cast(Any, step.inputs.evaluation).prompts, SAMPLES)
    assert evaluation._kept(step, attempt, groups, 2) == kept
    assert evaluation._kept(step, attempt, groups, SAMPLES) == {}
    damaged = kept.pop(2)
    data = bytearray(step.store.files.read(damaged.path))
    data[data.index(b"IDAT") + 8] ^= 1
    step.store.files.replace(damaged.path, bytes(data))
    assert evaluation._kept(step, attempt, groups, 2) == kept


def test_a_failure_is_told_in_training_and_ends_any_other_command(evaluated: TinyRun) -> None:
    step, fault = evaluated.step(1), StageError("no engine answered; run the same command again to resume")
    step.workers = cast(Any, SimpleNamespace(aborted=False))
    assert evaluation.told(step, fault) == (
        "evaluation of iteration 1 failed: no engine answered; training goes on, and the same command given again tries "
        "it again"
    )
    assert "before training failed: ZeroDivisionError: x;" in evaluation.told(step.at(-1), ZeroDivisionError("x"))
    with pytest.raises(LockLost):
        evaluation.told(step, LockLost("taken over"))
    beside, stops = evaluated.step(1, moves_line=False), evaluated.step(1, stop_on_eval_failure=True)
    for other in (beside, stops):
        other.workers = step.workers
        with pytest.raises(StageError, match="no engine"):
            evaluation.told(other, fault)
    step.workers = cast(Any, SimpleNamespace(aborted=True))
    with pytest.raises(StageError, match="no engine"):
        evaluation.told(step, fault)


def test_the_policy_that_a_person_asks_for(evaluated: TinyRun) -> None:
    store = evaluated.store
    assert [evaluation.iteration_of(store, given) for given in ("0", "3", "latest", "init")] == [0, 3, 3, -1]
    for given in ("4", "-1", "newest", "9" * 12, ""):
        with pytest.raises(InputError, match="0 to 3, latest or init"):
            evaluation.iteration_of(store, given)


def test_without_a_set_nothing_can_be_evaluated(run: TinyRun) -> None:
    with pytest.raises(InputError, match="--eval-prompt-data"):
        evaluation.evaluate(run.step(1, moves_line=False), evaluation.evaluated_policy(run.step(1)))


@pytest.mark.parametrize("options", [{"lr": 1.0}, {"lora_rank": 2}, {"num_rollout": 3}, {"eval_interval": 2}])
def test_an_evaluation_takes_no_option_that_it_does_not_depend_on(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(options)).replace("_", "-")):
        check_overrides(options, ("evaluation",))
    check_overrides({"rm_type": "ocr", "diffusion_eval_num_steps": 4, "rollout_num_engines": 2}, ("evaluation",))


def test_a_rerun_names_the_command_for_evaluation() -> None:
    with pytest.raises(InputError, match="miles evaluate"):
        stages_of_rerun("evaluation", False)
    with pytest.raises(InputError, match="miles evaluate"):
        check_overrides({"diffusion_eval_num_steps": 4}, ("rollout",))


def test_metrics_are_by_set(evaluated: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = evaluate(evaluated.step(1))
    rewards = torch.tensor([row["reward"] for row in rows(evaluated, outcome)], dtype=torch.float64)
    with RunLog(evaluated.config, evaluated.store, print) as log:
        log.evaluation(evaluated.step(1), outcome.manifest)
        log.evaluation(evaluated.step(1), outcome.manifest)
    shown = dict(word.split("=") for word in capsys.readouterr().out.split())
    assert float(shown["eval/held-out/reward/raw_mean"]) == pytest.approx(float(rewards.mean()), rel=1e-3)
    assert float(shown["eval/held-out/reward/raw_std"]) == pytest.approx(float(rewards.std(correction=0)), rel=1e-3)
    assert "perf/eval_time" in shown


def test_several_sets_are_one_evaluation_numbered_through_with_names_and_seeds_of_their_own(evaluated: TinyRun) -> None:
    alone, first = evaluated.inputs, cast(Any, evaluated.inputs.evaluation)
    (evaluated.root / "words.txt").write_text("a red sign\n")
    both = f"held-out {evaluated.root}/held-out.txt\nwords {evaluated.root}/words.txt"
    evaluated.config = evaluated.config.replace(eval_prompt_data=both)
    evaluated.inputs = resolve_inputs(evaluated.config)
    assert cast(Any, evaluated.inputs.evaluation).sets == (("held-out", 2), ("words", 1))
    renamed = evaluated.config.replace(eval_prompt_data=both.replace("words ", "signs "))
    digests = {first.digest, *(cast(Any, resolve_inputs(c).evaluation).digest for c in (evaluated.config, renamed))}
    assert len(digests) == 3 and alone.all() == evaluated.inputs.all()
    made = rows(evaluated, evaluate(evaluated.step(1)))
    assert [row["eval_set"] for row in made] == ["held-out"] * 2 * SAMPLES + ["words"] * SAMPLES
    assert [row["sample_index"] for row in made] == list(range(3 * SAMPLES))
    assert [row["seed"] for row in made] == [FIRST_SEED + i for i in range(3 * SAMPLES)]
    assert {row["prompt"] for row in made[2 * SAMPLES :]} == {"a red sign"}


def test_the_disk_line_counts_evaluations(evaluated: TinyRun) -> None:
    made = evaluate(evaluated.step(1)).manifest
    written = (sum(part.bytes for part in made.parts) + len(made.to_bytes())) / 2
    without = evaluated.config.replace(eval_interval=None)
    sizes = [estimate(config, evaluated.inputs).rest for config in (evaluated.config, without)]
    assert sizes[0] - sizes[1] == pytest.approx(written, rel=0.25)
    known = [measured(evaluated.store, config) for config in (evaluated.config, without)]
    assert known[0] and known[1] and known[0][1].rest - known[1][1].rest == pytest.approx(written)


def test_nothing_is_found_under_other_options(evaluated: TinyRun) -> None:
    evaluate(evaluated.step(1))
    policy = {"policy": evaluation.evaluated_policy(evaluated.step(1))}
    assert find_stage(evaluated.step(1), "evaluation", policy)
    for change in ({"n_samples_per_eval_prompt": 2}, {"diffusion_guidance_scale": 2.0}, {"rm_type": "ocr"}):
        assert find_stage(evaluated.step(1, **change), "evaluation", policy) is None


def test_a_query_reads_evaluations_with_the_one_before_training(evaluated: TinyRun) -> None:
    for iteration in (-1, 1):
        evaluate(evaluated.step(iteration))
    again = evaluated.step(1)
    again.force, again.moves_line = True, False
    evaluate(again)
    counts = {}
    for view in ("evaluation", "evaluation_all"):
        sql = f"SELECT iteration, count(*) AS rows, max(eval_set) AS name FROM {view} GROUP BY iteration ORDER BY iteration"
        database = Database(evaluated.store.files, (evaluated.store.run,), sql)
        counts[view] = [tuple(r.values()) for b in database.read(database.run()) for r in b.to_pylist()]
    assert counts["evaluation"] == [(-1, 6, "held-out"), (1, 6, "held-out")]
    assert counts["evaluation_all"] == [(-1, 6, "held-out"), (1, 12, "held-out")]


def test_a_fork_does_not_evaluate_what_it_keeps_of_another_run(evaluated: TinyRun) -> None:
    begin_fork(plan_fork(evaluated.store, evaluated.config, "2", "child"))
    step = evaluated.step(0)
    step.store = RunStore(evaluated.store.files, "child")
    assert [i for i in range(-1, 4) if evaluation.due(step.at(i))] == [3]
    assert not evaluation.missing(step)

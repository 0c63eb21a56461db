"""Dynamic sampling: prompts are drawn in waves, each generated and scored, until enough groups are kept.

Prompts are committed after the last wave. What was generated and scored lies in the open attempts of rollout and rewards by
then, which those stages commit against the prompts. A wave that was interrupted is drawn again, and finds its parts there.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import pyarrow as pa

from miles_core.algorithms.filters import Verdict, first_kept
from miles_core.data.data_source import samples_to_table
from miles_core.data.sample import Sample
from miles_core.errors import StageError
from miles_core.observe.terminal import several
from miles_core.pipeline.feed import RolloutFeed
from miles_core.pipeline.rewards import score_wave
from miles_core.pipeline.rollout import make_groups
from miles_core.pipeline.source import Source
from miles_core.pipeline.stage import Product, Step, Upstreams, begun_with, stage_fingerprint
from miles_core.pipeline.verdicts import GROUPS, SURPLUS, decide, dropped, dropped_text
from miles_core.runtime.faults import fault_point
from miles_core.store import schemas
from miles_core.store.parts import Part, write_table
from miles_core.store.run_store import Attempt

Groups = list[list[Sample]]
MakeWave = Callable[[Step, Attempt, Upstreams, Groups], dict[int, float]]


@dataclass(frozen=True)
class Wave:
    """Groups in group-index order, scored, with the filter's verdict on each."""

    groups: Groups
    verdicts: list[Verdict]


def generate_and_score(step: Step, prompts: Attempt, upstream: Upstreams, groups: Groups) -> dict[int, float]:
    """Rewards by sample of groups that are generated and, behind the engines, scored; parts that are there are kept."""
    step.workers.connect()
    policy = {"policy": upstream["policy"]}
    fingerprints = {"prompts": prompts.fingerprint, "policy": upstream["policy"].fingerprint}
    made = stage_fingerprint(step, "rollout", fingerprints)
    scored = stage_fingerprint(step, "rewards", {"rollout": made})
    store, known = step.store, begun_with(step, "rollout", policy)
    rollout = store.open_attempt("rollout", step.iteration, made, known, resumable=True)
    rewards = store.open_attempt("rewards", step.iteration, scored, {}, resumable=True)
    feed = RolloutFeed()
    found: list[dict[int, float] | BaseException] = []

    def score() -> None:
        try:
            found.append(score_wave(step, rewards, groups, feed))
        except BaseException as error:
            found.append(error)

    scorer = threading.Thread(target=score, name="rewards of a wave", daemon=True)
    scorer.start()
    try:
        make_groups(step, rollout, upstream["policy"], groups, feed)
        feed.end()
    except BaseException as error:
        feed.fail(error)
        if not isinstance(error, Exception):
            # Interrupted: the scorers are not waited for.
            step.workers.abort()
        raise
    finally:
        scorer.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def draw_waves(
    step: Step, attempt: Attempt, upstream: Upstreams, source: Source, make: MakeWave = generate_and_score
) -> Product:
    """Waves of over_sampling_batch_size prompts until rollout_batch_size groups are kept; the surplus goes to the source's
    buffer. Raises StageError after dynamic_sampling_max_waves."""
    waves: list[Wave] = []
    wanted = step.config.data.rollout_batch_size
    while _kept(waves) < wanted:
        if len(waves) == step.config.sampling.dynamic_sampling_max_waves:
            raise _too_few(step, waves)
        drawn = sorted(source.draw(step.config.over_sampling_batch_size), key=lambda group: group[0].group_index)
        fault_point("prompts:wave_drawn")
        rewards = make(step, attempt, upstream, drawn)
        fault_point("prompts:wave_scored")
        groups = [[replace(sample, reward=rewards[sample.index]) for sample in group] for group in drawn]
        waves.append(Wave(groups, decide(step, groups)))
        _tell(waves, wanted)
        fault_point("prompts:wave_end")
    return _product(step, attempt, source, waves)


def _kept(waves: list[Wave]) -> int:
    return sum(verdict.keep for wave in waves for verdict in wave.verdicts)


def _tell(waves: list[Wave], wanted: int) -> None:
    last = waves[-1].verdicts
    text = f"  wave {len(waves)}: {sum(v.keep for v in last)} of {len(last)} groups kept"
    if len(waves) > 1 or _kept(waves) < wanted:
        text += f", {_kept(waves)} of the {wanted} that are trained on"
    print(text, flush=True)


def _too_few(step: Step, waves: list[Wave]) -> StageError:
    verdicts = [verdict for wave in waves for verdict in wave.verdicts]
    kept, size = several(_kept(waves), "group"), step.config.over_sampling_batch_size
    return StageError(
        f"{several(len(waves), 'wave')} of {size} prompts kept {kept}, and "
        f"--rollout-batch-size asks for {step.config.data.rollout_batch_size} (dropped: {dropped_text(verdicts)}): run the same "
        f"command with --dynamic-sampling-max-waves above {len(waves)} to go on from here"
    )


def _product(step: Step, attempt: Attempt, source: Source, waves: list[Wave]) -> Product:
    files = step.store.files
    verdicts = [verdict for wave in waves for verdict in wave.verdicts]
    used, surplus = first_kept(verdicts, step.config.data.rollout_batch_size)
    groups = {group[0].group_index: group for wave in waves for group in wave.groups}
    source.put_back([groups[index] for index in surplus])
    data = [
        write_table(files, attempt.path(f"data/{number:08d}-1.parquet"), samples_to_table(wave.groups))
        for number, wave in enumerate(waves, 1)
    ]
    summary = {
        "prompts": len(groups),
        "samples": sum(part.rows for part in data),
        "waves": len(waves),
        "groups_kept": len(used) + len(surplus),
        "groups_surplus": len(surplus),
        "groups_dropped": dropped(verdicts),
    }
    beside = [_record(step, attempt, waves, set(used)), *source.save(step.iteration, files, attempt)]
    return Product([*data, *beside], summary | source.figures)


def _record(step: Step, attempt: Attempt, waves: list[Wave], used: set[int]) -> Part:
    rows = [
        {
            "group_index": verdict.group_index,
            "wave": number,
            "passed": verdict.keep,
            "kept": verdict.group_index in used,
            "reason": SURPLUS if verdict.keep and verdict.group_index not in used else verdict.reason,
            "rewards": [sample.reward for sample in group],
            "row_digest": "",
        }
        for number, wave in enumerate(waves, 1)
        for group, verdict in zip(wave.groups, wave.verdicts, strict=True)
    ]
    table = pa.Table.from_pylist(rows, schema=schemas.GROUPS)
    return write_table(step.store.files, attempt.path(f"{GROUPS}groups.parquet"), table)

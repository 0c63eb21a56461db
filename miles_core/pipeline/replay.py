"""What training needs and retention may have pruned: a rollout's latents, a policy's full checkpoint.

A checkpoint is made again from the nearest one that was kept, or from policy/init: the updates between are replayed over
their stored rollouts, each proved by its recorded content digest, into attempts beside the line.
"""

import time
from itertools import groupby

from miles_core.config import FIELDS, RunConfig, affects, build
from miles_core.errors import StageError
from miles_core.pipeline.stage import Compute, Step, Upstreams, library_versions
from miles_core.store.manifest import Manifest, Upstream, stage_digest
from miles_core.store.tombstone import PrunedError, pruned_error

LATENTS, CHECKPOINT = "latents", "checkpoint"


def with_latents(step: Step, rollout: Manifest) -> Manifest:
    """The rollout in an attempt that holds its latents. Raises PrunedError."""
    held = step.store.holding(rollout, LATENTS)
    if held:
        return held
    stone = step.store.pruned(rollout)
    if stone:
        raise pruned_error(rollout.folder, stone)
    raise StageError(f"run {step.store.run}: {rollout.folder} is damaged: {step.store.damage(rollout)}")


def with_checkpoint(step: Step, policy: Manifest, compute: Compute) -> Manifest:
    """The policy in an attempt that holds its checkpoint; where all were pruned, one that is replayed by `compute`.

    Raises PrunedError where a rollout on the way has lost its latents, StageError where a replayed update does not come
    out with the content that was recorded.
    """
    held, lost = _nearest(step, policy)
    links = [_consumed(step, update) for update in lost]
    _refuse_pruned(step, policy, lost, links)
    if not lost:
        return held
    for config, replays in groupby(zip(lost, links, strict=True), lambda replay: _config_of(step, replay[0])):
        with step.workers.trainer_of(config):
            for update, products in replays:
                held = _replay(_as(step, config, update.iteration), update, products | {"policy": held}, compute)
    return held


def _nearest(step: Step, policy: Manifest) -> tuple[Manifest, list[Manifest]]:
    """The nearest policy that training can start from, and the updates after it up to `policy`, in order."""
    lost: list[Manifest] = []
    while policy.stage == "update":
        held = step.store.holding(policy, CHECKPOINT)
        if held:
            return held, lost[::-1]
        lost.append(policy)
        policy = _product(step, policy.upstream["policy"])
    return policy, lost[::-1]


def _consumed(step: Step, update: Manifest) -> Upstreams:
    rollout, advantages = (_product(step, update.upstream[name]) for name in ("rollout", "advantages"))
    return {"rollout": step.store.holding(rollout, LATENTS) or rollout, "advantages": advantages}


def _product(step: Step, consumed: Upstream) -> Manifest:
    product = step.store.product(consumed)
    if product is None:
        where = f"{consumed.stage} of iteration {consumed.iteration}" if consumed.iteration >= 0 else "policy/init"
        raise StageError(
            f"run {step.store.run}: the checkpoint that was pruned cannot be replayed, because {where} (attempt "
            f"{consumed.attempt}) is gone or damaged; `miles train` makes it again where it is on the line"
        )
    return product


def _refuse_pruned(step: Step, policy: Manifest, lost: list[Manifest], links: list[Upstreams]) -> None:
    stones = {m.iteration: step.store.pruned(m) for m in (link["rollout"] for link in links)}
    pruned = {i: stone for i, stone in stones.items() if stone and LATENTS in stone.what}
    if not pruned:
        return
    numbers = [str(i) for i in pruned]
    command = f"miles rerun {step.store.run} {numbers[0] if len(numbers) == 1 else 'I'} rollout"
    each = "" if len(numbers) == 1 else f" for I of {', '.join(numbers)}"
    stone = step.store.pruned(policy)
    raise PrunedError(
        f"run {step.store.run}: checkpoint of update of iteration {policy.iteration} was pruned "
        f"({stone.option if stone else ''}) and cannot be replayed from iteration {lost[0].iteration} on, because the "
        f"latents of rollout of iteration {', '.join(numbers)} were pruned too ({next(iter(pruned.values())).option}): "
        f"`{command}`{each} generates them again, then give this command again"
    )


def _config_of(step: Step, update: Manifest) -> RunConfig:
    """What an update was made with, which in a fork may be another run's: that run's record, what the update says of
    itself, and the operational options of this command."""
    record, now = step.store.of(update.held_by).record() or step.store.record() or {}, step.config.flat()
    config = build(record["config"]).replace(**{n: now[n] for n in FIELDS if not affects(n)})
    recorded = config.affecting("update")
    other = {n: v for n, v in update.affecting_config.items() if n in recorded and recorded[n] != v}
    return config.replace(**other) if other else config


def _as(step: Step, config: RunConfig, iteration: int) -> Step:
    return Step(
        config,
        step.inputs,
        step.store,
        step.workers,
        iteration,
        moves_line=False,
        flow_run_id=step.flow_run_id,
        progress=step.progress,
    )


def _replay(step: Step, update: Manifest, upstream: Upstreams, compute: Compute) -> Manifest:
    started = time.time()
    attempt = step.store.open_attempt("update", step.iteration, update.fingerprint, upstream, resumable=False)
    product = compute(step, attempt, upstream)
    made = stage_digest(attempt.folder, tuple(product.parts))
    if made != update.content_digest:
        raise StageError(
            f"run {step.store.run}: update of iteration {step.iteration} was replayed, because its checkpoint was pruned, "
            f"and came out as {made[:12]} where {update.content_digest[:12]} was recorded: libraries, device or number of "
            "ranks differ from then; the same ones again may give it"
        )
    return step.store.commit(
        attempt,
        parts=product.parts,
        upstream=upstream,
        affecting_config=step.config.affecting("update"),
        inputs=step.inputs.affecting("update"),
        versions=library_versions(),
        started_at=started,
        summary=product.summary,
        flow_run_id=step.flow_run_id,
    )

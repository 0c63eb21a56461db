"""rollout: microgroups to the engines under the policy in force, a part per microgroup as it lands."""

import re
from typing import Any

import pyarrow as pa

from miles_core.data.data_source import table_to_samples
from miles_core.data.sample import Sample
from miles_core.errors import StageError
from miles_core.pipeline.feed import RolloutFeed
from miles_core.pipeline.policy import adapter_of, policy_version
from miles_core.pipeline.stage import Outcome, Product, Step, Upstreams, run_stage, stage_fingerprint
from miles_core.rollout.rollout_function import GENERATOR, generate_rollout
from miles_core.runtime.faults import fault_point
from miles_core.store.parts import Part, inspect_table, read_table
from miles_core.store.run_store import Attempt
from miles_core.weights.probe_spec import ProbeSpec

PROBE = "probe.safetensors"
_PART = re.compile(r"\d{8}-\d+\.parquet")


class CommittedPrompts:
    """The committed prompts as the data source of a rollout function."""

    def __init__(self, groups: list[list[Sample]]) -> None:
        self.groups = groups

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        taken, self.groups = self.groups[:num_samples], self.groups[num_samples:]
        return taken


def probe_spec(step: Step) -> ProbeSpec:
    """The run's fixed probe request."""
    r = step.config.rollout
    return ProbeSpec(
        height=r.diffusion_height,
        width=r.diffusion_width,
        guidance_scale=r.diffusion_guidance_scale,
        negative_prompt=step.config.negative_prompt,
        generator_device=r.diffusion_generator_device,
    )


def generate(step: Step, upstream: Upstreams, feed: RolloutFeed) -> Outcome:
    """Run the rollout stage and tell `feed` of every part, of its end, or of its failure."""
    try:
        feed.begin(stage_fingerprint(step, "rollout", _fingerprints(upstream)), upstream["prompts"])
        outcome = run_stage(step, "rollout", upstream, lambda s, a, u: _compute(s, a, u, feed))
        if outcome.reused:
            for part in outcome.manifest.data:
                feed.put(part)
        feed.close(outcome.manifest)
        return outcome
    except BaseException as error:
        feed.fail(error)
        raise


def _fingerprints(upstream: Upstreams) -> dict[str, str]:
    return {name: m.fingerprint for name, m in upstream.items()}


def _compute(step: Step, attempt: Attempt, upstream: Upstreams, feed: RolloutFeed) -> Product:
    from miles_core.rollout.dispatch import Dispatcher

    # What an earlier command left may still write: it is ended before anything is looked at.
    step.workers.connect()
    files, policy, size = step.store.files, upstream["policy"], step.config.rollout.rollout_microgroup_size
    table = pa.concat_tables([read_table(files, part) for part in upstream["prompts"].data])
    groups = table_to_samples(table)
    existing = [name for name in files.list(attempt.path("data")) if _PART.fullmatch(name)]
    conditioning = _kept_conditioning(step, attempt)
    landed: list[Part] = []

    def land(number: int, part: Part) -> None:
        landed.append(part)
        feed.put(part)
        step.progress("rollout", sum(p.rows for p in landed), table.num_rows)
        fault_point("rollout:landed")

    dispatcher = Dispatcher(
        step.workers,
        files,
        adapter=adapter_of(policy),
        digest=policy.summary["policy_digest"],
        version=policy_version(policy),
        encoder_digest=step.inputs.checkpoint_digest,
        name_part=lambda number: attempt.path(f"data/{_new_name(number, existing)}"),
        name_conditioning=lambda identity: attempt.path(f"conditioning/{identity}.parquet"),
        landed=land,
        kept=_kept(step, attempt, existing, groups, size, conditioning),
    )
    dispatcher.conditioning |= conditioning
    dispatcher.load_policy()
    probe = _probe(step, attempt, upstream)
    token = GENERATOR.set(dispatcher)
    try:
        generate_rollout(step.config.args(), step.iteration, CommittedPrompts(groups))
    except* Exception as failures:
        raise _first(failures) from None
    finally:
        GENERATOR.reset(token)
    parts = list(dispatcher.parts.values())
    rows = sum(p.rows for p in parts)
    if rows != table.num_rows:
        raise StageError(f"the rollout made {rows} of {table.num_rows} samples; run the same command again to resume")
    summary = {
        "samples": rows,
        "kept_microgroups": len(dispatcher.kept),
        "policy_digest": dispatcher.digest,
        "policy_version": dispatcher.version,
    }
    return Product([*parts, *dispatcher.conditioning.values(), probe], summary)


def _first(failures: BaseExceptionGroup) -> BaseException:
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _new_name(number: int, existing: list[str]) -> str:
    attempt = 1
    while f"{number:08d}-{attempt}.parquet" in existing:
        attempt += 1
    existing.append(f"{number:08d}-{attempt}.parquet")
    return existing[-1]


def _kept(
    step: Step,
    attempt: Attempt,
    existing: list[str],
    groups: list[list[Sample]],
    size: int,
    conditioning: dict[str, Part],
) -> dict[int, Part]:
    """Whole parts that an earlier try of this attempt left, by microgroup, whose conditioning is whole too."""
    wanted = {s.index // size for group in groups for s in group}
    kept: dict[int, Part] = {}
    for name in existing:
        number = int(name.split("-")[0])
        if number in wanted and number not in kept:
            part = inspect_table(step.store.files, attempt.path(f"data/{name}"))
            if part and part.rows == size and _described_by(step, part) <= set(conditioning):
                kept[number] = part
    return kept


def _described_by(step: Step, part: Part) -> set[str]:
    return set(read_table(step.store.files, part, ["conditioning_id"]).column("conditioning_id").to_pylist())


def _kept_conditioning(step: Step, attempt: Attempt) -> dict[str, Part]:
    found = {}
    for name in step.store.files.list(attempt.path("conditioning")):
        part = inspect_table(step.store.files, attempt.path(f"conditioning/{name}"))
        if part:
            found[name.removesuffix(".parquet")] = part
    return found


def _probe(step: Step, attempt: Attempt, upstream: Upstreams) -> Part:
    from miles_core.rollout.dispatch import hold

    workers, files, policy = step.workers, step.store.files, upstream["policy"]

    def ask(engine: Any) -> Part:
        hold(workers, engine, files, adapter_of(policy), policy.summary["policy_digest"])
        probe = engine.call("probe", probe_spec(step).request())
        part: Part = workers.get(
            [workers.parsers()[0].call("write_probe", files, attempt.path(PROBE), probe)], "the probe"
        )[0]
        return part

    return workers.with_engine(0, ask)

"""rollout: microgroups to the engines under the policy in force, a part per microgroup as it lands."""

import re
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from miles_core.config.folders import own_args
from miles_core.data.data_source import table_to_samples
from miles_core.data.sample import Sample
from miles_core.errors import StageError
from miles_core.pipeline.feed import RolloutFeed
from miles_core.pipeline.policy import adapter_of, policy_version
from miles_core.pipeline.stage import Outcome, Product, Step, Upstreams, run_stage, stage_fingerprint
from miles_core.rollout.microgroup import Microgroup, difference
from miles_core.rollout.rollout_function import GENERATOR, run_rollout
from miles_core.runtime.faults import fault_point
from miles_core.store.digest import ROW_DIGEST
from miles_core.store.manifest import Manifest
from miles_core.store.parts import Part, inspect_table, read_table
from miles_core.store.run_store import Attempt
from miles_core.weights.probe_spec import ProbeSpec

if TYPE_CHECKING:
    from miles_core.rollout.dispatch import Dispatcher

PROBE = "probe.safetensors"
_PART = re.compile(r"\d{8}-\d+\.parquet")


class CommittedPrompts:
    """Drawn prompts as the data source of a rollout function."""

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
    table = pa.concat_tables([read_table(step.store.files, part) for part in upstream["prompts"].data])
    dispatcher = make_groups(step, attempt, upstream["policy"], table_to_samples(table), feed)
    probe = _probe(step, attempt, upstream)
    made = list(dispatcher.made.values())
    summary = {
        "samples": table.num_rows,
        "kept_microgroups": len(dispatcher.kept),
        "policy_digest": dispatcher.digest,
        "policy_version": dispatcher.version,
    } | ({"in_waves": True} if step.config.in_waves else {})
    parts = [part for m in made for part in (m.data, m.latents)]
    return Product([*parts, *dispatcher.conditioning.values(), probe], summary)


def make_groups(
    step: Step, attempt: Attempt, policy: Manifest, groups: list[list[Sample]], feed: RolloutFeed
) -> "Dispatcher":
    """Generate groups into an attempt; what an earlier try left of them whole is kept. Each part goes to `feed`.

    Raises StageError unless every sample was made.
    """
    from miles_core.rollout.dispatch import Dispatcher

    # What an earlier command left may still write: it is ended before anything is looked at.
    step.workers.connect()
    files, size = step.store.files, step.config.rollout.rollout_microgroup_size
    total = sum(map(len, groups))
    existing = _existing(step, attempt)
    conditioning = _kept_conditioning(step, attempt)
    landed: list[Microgroup] = []

    def land(number: int, made: Microgroup) -> None:
        landed.append(made)
        feed.put(made.data)
        step.progress("rollout", sum(m.rows for m in landed), total)
        fault_point("rollout:landed")

    def name_parts(number: int) -> tuple[str, str]:
        name = _new_name(number, existing)
        return attempt.path(f"data/{name}"), attempt.path(f"latents/{name}")

    dispatcher = Dispatcher(
        step.workers,
        files,
        adapter=adapter_of(policy),
        digest=policy.summary["policy_digest"],
        version=policy_version(policy),
        encoder_digest=step.inputs.checkpoint_digest,
        name_parts=name_parts,
        name_conditioning=lambda identity: attempt.path(f"conditioning/{identity}.parquet"),
        landed=land,
        kept=_kept(step, attempt, existing, groups, size, conditioning),
    )
    dispatcher.conditioning |= conditioning
    dispatcher.load_policy()
    args = own_args(step.config)
    # Prompts that were drawn in several waves are more than those of one.
    args.over_sampling_batch_size = len(groups)
    token = GENERATOR.set(dispatcher)
    try:
        run_rollout(args, step.iteration, CommittedPrompts(groups), groups)
    except* Exception as failures:
        raise _first(failures) from None
    finally:
        GENERATOR.reset(token)
    rows = sum(m.rows for m in dispatcher.made.values())
    if rows != total:
        raise StageError(f"the rollout made {rows} of {total} samples; run the same command again to resume")
    return dispatcher


def _first(failures: BaseExceptionGroup) -> BaseException:
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _existing(step: Step, attempt: Attempt) -> list[str]:
    """Names of parts that earlier tries left: of rows, of latents, or of both."""
    names = {name for folder in ("data", "latents") for name in step.store.files.list(attempt.path(folder))}
    return sorted(name for name in names if _PART.fullmatch(name))


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
) -> dict[int, Microgroup]:
    """Microgroups that an earlier try of this attempt left whole: rows of these samples, their own latents, and their
    conditioning."""
    wanted: dict[int, list[tuple[int, str, int]]] = {}
    for sample in (s for group in groups for s in group):
        wanted.setdefault(sample.index // size, []).append((sample.index, sample.prompt, sample.seed))
    kept: dict[int, Microgroup] = {}
    for name in existing:
        number = int(name.split("-")[0])
        if number in wanted and number not in kept:
            whole = _whole(step, attempt, name, set(conditioning), wanted[number])
            if whole:
                kept[number] = whole
    return kept


def _whole(
    step: Step, attempt: Attempt, name: str, conditioning: set[str], wanted: list[tuple[int, str, int]]
) -> Microgroup | None:
    files, paths = step.store.files, [attempt.path(f"{folder}/{name}") for folder in ("data", "latents")]
    data, latents = (inspect_table(files, path) if files.exists(path) else None for path in paths)
    if data is None or latents is None:
        return None
    rows = read_table(files, data, ["sample_index", "prompt", "seed", "conditioning_id", "latents_digest"])
    samples = [(row["sample_index"], row["prompt"], row["seed"]) for row in rows.to_pylist()]
    if samples != wanted:
        return None
    described = set(rows.column("conditioning_id").to_pylist()) <= conditioning
    if not described or difference(rows, read_table(files, latents, ["sample_index", ROW_DIGEST])):
        return None
    return Microgroup(data, latents)


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
        probe = workers.probe(engine, probe_spec(step).request())
        part: Part = workers.parse("write_probe", files, attempt.path(PROBE), probe)
        return part

    return workers.with_engine(0, ask)

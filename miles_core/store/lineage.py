"""Where a sample came from and what became of it: from its prompt to the optimizer step that trained on it."""

from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq

from miles_core.errors import InputError
from miles_core.store.manifest import Manifest, Upstream
from miles_core.store.part_file import PartFile
from miles_core.store.parts import Part, read_table
from miles_core.store.run_store import RunStore
from miles_core.store.stages import StageName

Facts = dict[str, Any]


@dataclass(frozen=True)
class Lineage:
    """A sample's way through the stages of its iteration. `stages`: what each holds of it, in order, with attempt,
    content digest, `stale` and `pruned`; `beside`: its rewards in attempts that are not on the line; `policies`: the
    updates behind the policy that made it, newest first, down to policy/init."""

    run: str
    iteration: int
    sample_index: int
    stages: dict[str, Facts]
    beside: list[Facts]
    policies: list[Facts]

    def to_json(self) -> Facts:
        return dict(vars(self))


def trace(store: RunStore, iteration: int, sample_index: int) -> Lineage:
    """A sample of an iteration on the run's line, by its sample_index.

    A later stage that is not committed yet has `missing` instead of facts. Raises InputError where prompts or rollout
    are not committed or hold no such sample, DamagedError or PrunedError for a part that cannot be read.
    """
    names: tuple[StageName, ...] = ("prompts", "rollout", "rewards", "advantages", "update")
    line: dict[str, Manifest | None] = {stage: store.on_line(stage, iteration) for stage in names}
    stages: dict[str, Facts] = {}
    for stage in ("prompts", "rollout"):
        manifest = line[stage]
        if manifest is None:
            raise InputError(
                f"run {store.run}: {stage} of iteration {iteration} is not committed: `miles train` makes it, then ask again"
            )
        row, part = _row(store, manifest, sample_index)
        stages[stage] = _attempt(store, manifest) | {"part": _name(part)} | row
    rollout = line["rollout"]
    assert rollout is not None
    stages["rollout"]["image"] = _image(stages["rollout"]["image"])
    for stage in ("rewards", "advantages"):
        manifest = line[stage]
        if manifest is None:
            stages[stage] = _missing(stage, iteration)
            continue
        row, part = _row(store, manifest, sample_index)
        stages[stage] = _attempt(store, manifest) | {"part": _name(part)} | row
    scored = stages["rewards"].get("rollout_digest")
    if scored and scored != stages["rollout"]["row_digest"]:
        stages["rewards"]["stale"].append("it scored another image than the one on the line")
    stages["update"] = _update(store, line["update"], line["advantages"], iteration, sample_index)
    return Lineage(
        store.run,
        iteration,
        sample_index,
        stages,
        [
            _beside(store, m, sample_index, stages)
            for m in store.committed("rewards", iteration)
            if m != line["rewards"]
        ],
        _policies(store, rollout, stages["rollout"]["policy_digest"]),
    )


def _row(store: RunStore, manifest: Manifest, sample_index: int) -> tuple[Facts, Part]:
    """The sample's row, from a part that was checked, and that part."""
    held: list[int] = []
    for part in manifest.data:
        # Which part it is needs a column; only the one that it is gets read as a whole.
        found = pq.read_table(PartFile(store.files, part), columns=["sample_index"]).column("sample_index").to_pylist()
        held += found
        if sample_index in found:
            row: Facts = read_table(store.files, part).slice(found.index(sample_index), 1).to_pylist()[0]
            return row, part
    raise InputError(
        f"run {store.run}: {manifest.stage} of iteration {manifest.iteration} holds no sample {sample_index}: give a "
        f"sample_index from {min(held)} to {max(held)}"
    )


def _attempt(store: RunStore, manifest: Manifest) -> Facts:
    stone = store.pruned(manifest)
    return {
        "attempt": manifest.attempt,
        "content_digest": manifest.content_digest,
        "upstream": {name: vars(u) for name, u in manifest.upstream.items()},
        "stale": [text for u in manifest.upstream.values() if (text := _stale(store, u))],
        "damage": store.damage(manifest),
        "pruned": f"{', '.join(stone.what)} ({stone.option})" if stone else None,
    }


def _stale(store: RunStore, consumed: Upstream) -> str | None:
    """In words, where what a stage consumed is not what the line now holds."""
    now = store.on_line(consumed.stage, consumed.iteration)
    where = "policy/init" if consumed.stage == "policy" else f"{consumed.stage} of iteration {consumed.iteration}"
    if now is None:
        return f"made from {where} {consumed.content_digest[:12]}, which is not on the line any more"
    if now.content_digest != consumed.content_digest:
        return f"made from {where} {consumed.content_digest[:12]}, the line has {now.content_digest[:12]}"
    return None


def _missing(stage: str, iteration: int) -> Facts:
    return {"missing": f"{stage} of iteration {iteration} is not committed yet"}


def _update(
    store: RunStore, update: Manifest | None, advantages: Manifest | None, iteration: int, sample_index: int
) -> Facts:
    """The optimizer step that consumed the sample: kept samples go to the steps in sample order, as many to each."""
    if update is None:
        return _missing("update", iteration)
    consumed = update.upstream["advantages"]
    used = (
        advantages if advantages and advantages.content_digest == consumed.content_digest else store.product(consumed)
    )
    steps = [row for part in update.data for row in read_table(store.files, part).to_pylist()]
    facts = _attempt(store, update) | {
        "policy_digest": update.summary["policy_digest"],
        "checkpoint": [_name(part) for part in update.under("checkpoint/")],
    }
    if used is None:
        return facts | {"steps": [], "why": "the advantages that it consumed are gone"}
    columns = ["sample_index", "kept", "remove_sample"]
    rows = [row for part in used.data for row in read_table(store.files, part, columns).to_pylist() if row["kept"]]
    rows.sort(key=lambda row: row["sample_index"])
    place = next((i for i, row in enumerate(rows) if row["sample_index"] == sample_index), None)
    if place is None:
        return facts | {"steps": [], "why": "its group was not trained on"}
    if rows[place]["remove_sample"]:
        return facts | {"steps": [], "why": "it was taken out of the loss"}
    number = place // (len(rows) // len(steps))
    return facts | {"steps": [row for row in steps if row["step"] == number]}


def _beside(store: RunStore, rewards: Manifest, sample_index: int, stages: dict[str, Facts]) -> Facts:
    """The sample's reward in an attempt beside the line."""
    row, _ = _row(store, rewards, sample_index)
    same = row["rollout_digest"] == stages["rollout"]["row_digest"]
    return _attempt(store, rewards) | row | {"same_image": same}


def _policies(store: RunStore, rollout: Manifest, policy_digest: str) -> list[Facts]:
    """The policy in force and those that it was trained from, newest first, as each names what it consumed."""
    found: list[Facts] = []
    consumed: Upstream | None = rollout.upstream["policy"]
    while consumed:
        manifest = store.of(consumed.run).manifest(consumed.stage, consumed.iteration, consumed.attempt)
        facts: Facts = {"stage": consumed.stage, "iteration": consumed.iteration, "attempt": consumed.attempt}
        facts |= {"content_digest": consumed.content_digest, "stale": _stale(store, consumed)}
        if manifest is None:
            found.append(facts | {"missing": "its manifest cannot be read: what lies before it is not known"})
            break
        if manifest.content_digest != consumed.content_digest:
            facts["stale"] = f"its manifest now says {manifest.content_digest[:12]}"
        facts["policy_digest"] = manifest.summary["policy_digest"]
        if not found and facts["policy_digest"] != policy_digest:
            facts["stale"] = f"the sample names policy {policy_digest[:12]}"
        found.append(facts)
        consumed = manifest.upstream.get("policy")
    return found


def _image(image: Any) -> Facts | None:
    data = (image or {}).get("bytes")
    return None if data is None else {"kind": "PNG", "bytes": len(data)}


def _name(part: Part) -> str:
    return "/".join(part.path.split("/")[-2:])

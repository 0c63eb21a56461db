"""A sample's lineage as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from miles_core.observe.query_output import cell
from miles_core.observe.terminal import bytes_text

if TYPE_CHECKING:
    from miles_core.store.lineage import Lineage

_LEAD = 11


def lineage_lines(lineage: Lineage) -> Iterator[str]:
    """The stages from prompt to optimizer step, and the policies behind, a few lines each."""
    yield f"sample {lineage.sample_index} of iteration {lineage.iteration} of run {lineage.run}"
    for stage, facts in lineage.stages.items():
        if "missing" in facts:
            yield f"{stage:<{_LEAD}}{facts['missing']}"
            continue
        yield _head(stage, facts)
        yield from (f"{'':<{_LEAD}}{line}" for line in _TOLD[stage](facts))
        yield from _faults(facts)
        if stage == "rewards":
            for other in lineage.beside:
                where = "the same image" if other["same_image"] else "another image"
                yield _head("", other) + f" beside the line, of {where}"
                yield from (f"{'':<{_LEAD}}{line}" for line in _rewards(other))
                yield from _faults(other)
        if stage == "rollout":
            yield from _policies(lineage.policies)


def _head(stage: str, facts: dict[str, Any]) -> str:
    part = f"  {facts['part']}" if "part" in facts else ""
    return f"{stage:<{_LEAD}}{facts['attempt']}  content {facts['content_digest'][:12]}{part}"


def _faults(facts: dict[str, Any]) -> Iterator[str]:
    for text in facts["stale"]:
        yield f"{'':<{_LEAD}}stale: {text}"
    if facts["damage"]:
        yield f"{'':<{_LEAD}}damaged: {facts['damage']}"
    if facts["pruned"]:
        yield f"{'':<{_LEAD}}pruned: {facts['pruned']}"


def _policies(policies: list[dict[str, Any]]) -> Iterator[str]:
    first, last = policies[0], policies[-1]
    digest = first.get("policy_digest", "")[:12]
    yield f"{'policy':<{_LEAD}}{_place(first)}  {first['attempt']}  policy {digest}"
    if len(policies) > 1:
        between = f", {len(policies) - 2} updates between" if len(policies) > 2 else ""
        yield f"{'':<{_LEAD}}trained from {_place(last)}  {last['attempt']}{between}"
    for facts in policies:
        for kind in ("stale", "missing"):
            if facts.get(kind):
                yield f"{'':<{_LEAD}}{'stale: ' if kind == 'stale' else ''}{_place(facts)}: {facts[kind]}"


def _place(facts: dict[str, Any]) -> str:
    return "policy/init" if facts["stage"] == "policy" else f"update of iteration {facts['iteration']}"


def _prompts(facts: dict[str, Any]) -> Iterator[str]:
    yield f"{cell(facts['prompt'])!r}, row {facts['prompt_index']} of the prompt file, epoch {facts['epoch']}"
    yield f"group {facts['group_index']}, seed {facts['seed']}"


def _rollout(facts: dict[str, Any]) -> Iterator[str]:
    image = facts["image"]
    size = f"PNG of {bytes_text(image['bytes'])}" if image else "no image"
    yield f"{size}, {facts['width']} x {facts['height']}, by engine {facts['engine']} in {facts['seconds']:.3g} s"
    yield (
        f"{facts['sde_type']}, noise level {facts['noise_level']:g}, trained at steps {facts['sde_step_indices']} of "
        f"{len(facts['timesteps'])}, seed {facts['seed']} of request {facts['request_seed']}"
    )


def _rewards(facts: dict[str, Any]) -> Iterator[str]:
    scores = [
        f"{name.removeprefix('score_')} {cell(value)}" for name, value in facts.items() if name.startswith("score_")
    ]
    read = f", read {cell(facts['recognized'])!r}" if facts["recognized"] is not None else ""
    yield f"reward {facts['reward']:.6g} ({', '.join(scores)}){read}, version {cell(facts['rm_version'])}"


def _advantages(facts: dict[str, Any]) -> Iterator[str]:
    yield (
        f"advantage {facts['advantage']:.6g} from reward {facts['raw_reward']:.6g}, group mean {facts['group_mean']:.6g}, "
        f"std {facts['group_std']:.6g}"
    )
    if facts["zero_std"]:
        yield "the whole group has one reward and teaches nothing"
    if not facts["kept"]:
        yield f"not trained on: {cell(facts['reason'])}"
    elif facts["remove_sample"]:
        yield "taken out of the loss"
    else:
        yield "kept"


def _update(facts: dict[str, Any]) -> Iterator[str]:
    for step in facts["steps"]:
        named = {
            "loss": "loss",
            "policy_loss": "policy loss",
            "kl_loss": "kl",
            "grad_norm": "grad norm",
            "clip_frac": "clipped",
        }
        # A loss of one's own reports what it likes.
        told = ", ".join(f"{word} {step[name]:.3g}" for name, word in named.items() if step[name] is not None)
        yield f"optimizer step {step['step']} (global {step['global_step']}): {told}"
    if not facts["steps"]:
        yield f"no optimizer step: {facts['why']}"
    yield f"made policy {facts['policy_digest'][:12]}, checkpoint of {len(facts['checkpoint'])} files"


_TOLD = {
    "prompts": _prompts,
    "rollout": _rollout,
    "rewards": _rewards,
    "advantages": _advantages,
    "update": _update,
}

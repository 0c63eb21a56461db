"""The stages of one iteration: names, versions, upstream stages and order.

One name a stage, everywhere: task file, task run, folder in the store, command line, SQL view.
"""

from dataclasses import dataclass
from typing import Literal

StageName = Literal["policy", "prompts", "rollout", "rewards", "advantages", "update", "sync", "evaluation"]


@dataclass(frozen=True)
class Stage:
    """`upstream` names the stages whose products are consumed; `version` enters the fingerprint and is
    raised when the stage's meaning changes. `sort_key` orders the rows for the content digest."""

    name: StageName
    upstream: tuple[StageName, ...]
    version: int
    sort_key: str
    doc: str


STAGES: dict[StageName, Stage] = {
    s.name: s
    for s in (
        Stage("policy", (), 1, "adapter", "policy/init: digest of the base weights and the seeded adapter"),
        Stage("prompts", ("prompts",), 1, "sample_index", "a sample to be made; beside it the data source's state"),
        Stage("rollout", ("prompts", "policy"), 2, "sample_index", "a generated sample with its trajectory"),
        Stage("rewards", ("rollout",), 1, "sample_index", "a sample's reward and its components"),
        Stage("advantages", ("rewards",), 1, "sample_index", "a sample's raw reward, advantage and mask"),
        Stage("update", ("rollout", "advantages", "policy"), 1, "step", "an optimizer step's metrics"),
        Stage("sync", ("update",), 1, "engine", "an engine that holds the new policy, with the proof"),
        Stage("evaluation", ("policy",), 1, "sample_index", "a sample of an evaluation set, with its reward"),
    )
}

# The chain that carries a run on. evaluation stands beside it: nothing is made from it.
ITERATION_STAGES: tuple[StageName, ...] = ("prompts", "rollout", "rewards", "advantages", "update", "sync")


def downstream_of(stage: StageName) -> tuple[StageName, ...]:
    """The later stages of the same iteration that depend on `stage`, in order.

    The previous iteration's products (prompts of prompts, update as policy) do not count.
    """
    affected = {stage}
    for name in ITERATION_STAGES[ITERATION_STAGES.index(stage) + 1 :]:
        if affected & set(STAGES[name].upstream):
            affected.add(name)
    affected.discard(stage)
    return tuple(n for n in ITERATION_STAGES if n in affected)

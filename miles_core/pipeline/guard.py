"""The guard over a run: what it finds on the line, what is to be done about it, and the way back to the last healthy policy.

A verdict is a function of what is committed and of the options: the same command comes to the same one.
"""

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from miles_core.config import FIELDS, RunConfig, affects, build
from miles_core.config.folders import artifact_root
from miles_core.config.guard import Action, actions_of, limits_of
from miles_core.errors import InputError
from miles_core.observe.guard import Finding, judge
from miles_core.observe.history import History
from miles_core.pipeline.fork import begin_fork, plan_fork
from miles_core.pipeline.replay import CHECKPOINT, LATENTS
from miles_core.store.manifest import Manifest
from miles_core.store.run_store import RunStore

_ORDER: tuple[Action, ...] = ("off", "warn", "suspend", "rewind")
_REWOUND = re.compile(r"(?P<base>.+)-rewind(?P<number>\d+)")
# By the golden section of 2^31, seeds of forks one after the other lie far from all before.
_SEED_STEP, _SEEDS = 1_327_217_885, 2**31


@dataclass(frozen=True)
class WayBack:
    """A fork that goes on from the last healthy policy: the first iteration that is its own, its name and rollout_seed."""

    run: str
    iteration: int
    fork: str
    seed: int
    root: str

    @property
    def command(self) -> str:
        """The command that makes it."""
        words = [
            "miles",
            "fork",
            self.run,
            str(self.iteration),
            "--run-id",
            self.fork,
            "--rollout-seed",
            str(self.seed),
        ]
        return shlex.join([*words, *([] if self.root == artifact_root() else ["--artifact-root", self.root])])


def findings_of(
    history: History, config: RunConfig, iterations: Iterable[int], passed: int = 0
) -> dict[int, list[Finding]]:
    """What the checks that are not off find at each of these iterations. passed: the record's `guard_from`."""
    limits = {name: limits_of(config)[name] for name, action in actions_of(config).items() if action != "off"}
    first, wanted = max(config.guard.guard_from, passed), set(iterations)
    if not limits or not wanted:
        return {}
    healths = history.healths(first, max(wanted))
    ends = {health.iteration: end for end, health in enumerate(healths, 1)}
    return {i: judge(healths[: ends[i]], limits) for i in sorted(wanted & ends.keys())}


def action_of(config: RunConfig, findings: Iterable[Finding]) -> Action:
    """The strongest of what the checks that found something do; off where none did."""
    actions = actions_of(config)
    return max((actions[finding.check] for finding in findings), key=_ORDER.index, default="off")


def guard_column(history: History, newest: int) -> dict[int, dict[str, str]]:
    """The column `guard` of the newest iterations: the checks that found something, by iteration; none where all are off."""
    record = history.store.record() or {}
    numbers = history.store.line_iterations("update")[-newest:]
    found = findings_of(history, build(record["config"]), numbers, record.get("guard_from", 0))
    return {i: {"guard": ", ".join(finding.check for finding in findings)} for i, findings in found.items()}


def way_back(store: RunStore, config: RunConfig, findings: Iterable[Finding]) -> WayBack | None:
    """The fork from the newest policy that nothing speaks against and that can be trained on; None where all such were pruned."""
    wanted = 1 + min(finding.healthy for finding in findings)
    there = (i for i in range(wanted, 0, -1) if _trainable(store, store.on_line("update", i - 1)))
    iteration = 0 if wanted == 0 else next(there, None)
    if iteration is None:
        return None
    base, number = rewinds(store)
    seed = (config.rollout.rollout_seed + _SEED_STEP) % _SEEDS
    return WayBack(store.run, iteration, f"{base}-rewind{number + 1}", seed, store.files.root)


def rewinds(store: RunStore) -> tuple[str, int]:
    """The run that a rewound one goes back to in the end, and how often it was rewound."""
    named = _REWOUND.fullmatch(store.run)
    if named is None or not (store.record() or {}).get("parent"):
        return store.run, 0
    return named["base"], int(named["number"])


def rewind(store: RunStore, config: RunConfig, back: WayBack) -> str:
    """Make the fork, or find it made; its name. Raises InputError where another run has that name."""
    record = store.of(back.fork).record()
    if record is None:
        changes = {"rollout_seed": back.seed}
        begin_fork(plan_fork(store, config, str(back.iteration), back.fork, overrides=changes))
    elif (record.get("parent") or {}).get("run") != store.run:
        raise InputError(
            f"run {back.fork} is there and no fork of {store.run}, which is to be rewound: give another --run-id to "
            f"`{back.command}`, or --guard suspend"
        )
    return back.fork


def carried(store: RunStore, config: RunConfig, fork: str) -> dict[str, Any]:
    """The options under which a command trains a fork in the place of the run: its own where they change no training."""
    apart = {"run_id", "new", "artifact_root", "code_path", "guard_from"}
    names = [name for name in FIELDS if set(affects(name)) <= {"evaluation"} and name not in apart]
    own = {name: getattr(getattr(config, FIELDS[name][0]), name) for name in names}
    return own | {"run_id": fork, "artifact_root": store.files.root}


def _trainable(store: RunStore, policy: Manifest | None) -> bool:
    """Whether training can start from a policy: its checkpoint is there, or can be replayed over stored latents."""
    while policy and policy.stage == "update":
        if store.holding(policy, CHECKPOINT):
            return True
        rollout = store.product(policy.upstream["rollout"])
        if rollout is None or not store.holding(rollout, LATENTS):
            return False
        policy = store.product(policy.upstream["policy"])
    return policy is not None

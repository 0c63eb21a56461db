"""The push of a policy: every engine's reply is checked and proved. The actors' own classes, in this process."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import pytest
from tiny_run import TinyRun

from miles_core.errors import StageError
from miles_core.pipeline.policy import adapter_of, policy_version
from miles_core.pipeline.stage import Product
from miles_core.pipeline.sync import push
from miles_core.pipeline.upstream import policy_in_force
from miles_core.rollout.dispatch import hold
from miles_core.rollout.protocol import GenerateRequest, SyncReply
from miles_core.runtime.actors import EngineActor, ParserActor
from miles_core.runtime.fenced import FencedActor, Terms
from miles_core.runtime.workers import Workers
from miles_core.store.files import Files
from miles_core.store.manifest import Manifest
from miles_core.store.parts import Part, read_table


@pytest.fixture(autouse=True)
def _named_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor names its process."""
    monkeypatch.setenv("MILES_FAULT_NAME", "")


class Silent(EngineActor):
    """Answers a push with success and drops it."""

    def load_policy(self, files: Files, adapter: Part) -> SyncReply:
        return SyncReply(self._terms.name, self.engine.checksum(), 15, adapter.bytes, 0.0)


class Unbound(EngineActor):
    """Takes the tensors and binds none."""

    def load_policy(self, files: Files, adapter: Part) -> SyncReply:
        return dataclasses.replace(super().load_policy(files, adapter), modules_bound=0)


class Frozen(EngineActor):
    """Reports the new policy and goes on with the old one."""

    old: tuple[Files, Part]

    def load_policy(self, files: Files, adapter: Part) -> SyncReply:
        reply = super().load_policy(files, adapter)
        super().load_policy(*self.old)
        return reply


class Local:
    """An actor of this process under the handle that stages use."""

    def __init__(self, actor: FencedActor) -> None:
        self.actor = actor

    def call(self, verb: str, *arguments: Any) -> Any:
        return self.actor.work(1, verb, *arguments)


class LocalWorkers:
    """Engines and one parser without Ray."""

    def __init__(self, engines: list[EngineActor]) -> None:
        self.engines = [Local(engine) for engine in engines]

    def with_engines(self, work: Callable[[Local], Any]) -> list[Any]:
        return [work(engine) for engine in self.engines]

    def probe(self, engine: Local, request: GenerateRequest) -> Any:
        return engine.call("probe", request)[0]

    def parse(self, verb: str, *arguments: Any) -> Any:
        return Local(ParserActor(Terms("parser-0", 1, "", 0.0, {}))).call(verb, *arguments)

    def get(self, results: list[Any], what: str) -> list[Any]:
        return results


def line(run: TinyRun, stage: Any, iteration: int) -> Manifest:
    made = run.store.on_line(stage, iteration)
    assert made is not None
    return made


def engine(run: TinyRun, kind: type[EngineActor], number: int) -> EngineActor:
    """An engine with policy/init, as it stands before the sync of iteration 0."""
    made = kind(Terms(f"engine-{number}", 1, "", 0.0, {}), run.config, str(run.inputs.checkpoint), "sd3", "cpu")
    held = (run.store.files, adapter_of(line(run, "policy", -1)))
    EngineActor.load_policy(made, *held)
    if isinstance(made, Frozen):
        made.old = held
    return made


def synced(run: TinyRun, *kinds: type[EngineActor]) -> Product:
    step = run.step(0, moves_line=False)
    step.workers = cast(Workers, LocalWorkers([engine(run, kind, i) for i, kind in enumerate(kinds)]))
    attempt = run.store.open_attempt("sync", 0, "e" * 64, {}, resumable=False)
    return push(step, attempt, {"update": line(run, "update", 0)})


def test_engines_that_took_the_policy_are_proved(run: TinyRun) -> None:
    made = synced(run, EngineActor, EngineActor)
    rows = read_table(run.store.files, made.parts[0]).to_pylist()
    assert {row["policy_digest"] for row in rows} == {line(run, "update", 0).summary["policy_digest"]}
    assert [row["engine"] for row in rows] == ["engine-0", "engine-1"]
    assert all(row["modules_bound"] == 15 and row["probe_diff"] < 1e-5 < row["probe_moved"] for row in rows)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Silent, r"engine-1 reports policy \w+ on 15 modules after the push of \w+: the adapter did not arrive"),
        (Unbound, "engine-1 reports policy .* on 0 modules"),
        (Frozen, "does not compute with the new policy"),
    ],
)
def test_a_push_that_one_engine_lost_stops_the_sync(run: TinyRun, kind: type[EngineActor], says: str) -> None:
    """Whatever it answers: it dropped the tensors, bound none (pitfall 10), or computes with the old ones (pitfalls 11,
    37)."""
    with pytest.raises(StageError, match=says):
        synced(run, EngineActor, kind)


def test_a_rollout_does_not_begin_with_an_engine_that_keeps_another_policy(run: TinyRun) -> None:
    """An engine that a crash left behind is given the policy, and one that does not take it stops the stage
    (pitfall 11)."""
    update = line(run, "update", 0)
    wanted = (run.store.files, adapter_of(update), update.summary["policy_digest"])
    good, silent = engine(run, EngineActor, 0), engine(run, Silent, 1)
    workers = cast(Workers, LocalWorkers([good, silent]))
    assert good.checksum() != wanted[2]
    hold(workers, Local(good), *wanted)
    assert good.checksum() == wanted[2]
    with pytest.raises(StageError, match="the adapter did not arrive"):
        hold(workers, Local(silent), *wanted)


def test_the_policys_version_is_that_of_its_iteration_after_any_resume(run: TinyRun) -> None:
    """Never zero again: rows say which update they were generated with (pitfall 44)."""
    found = {}
    for i in range(4):
        rows = [row for part in line(run, "rollout", i).data for row in read_table(run.store.files, part).to_pylist()]
        found[i] = {(row["policy_version"], row["policy_digest"]) for row in rows}
        in_force = policy_in_force(run.step(i))
        assert found[i] == {(i - 1, in_force.summary["policy_digest"])}
        assert policy_version(in_force) == i - 1
    assert len(set.union(*found.values())) == 4

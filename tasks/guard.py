"""What is done about what the guard finds: told, and the run suspended or rewound."""

import contextlib
from collections.abc import Sequence

from prefect.artifacts import create_markdown_artifact
from prefect.context import FlowRunContext
from prefect.flow_runs import suspend_flow_run
from prefect.logging import get_run_logger

from miles_core.config import RunConfig
from miles_core.errors import StageError
from miles_core.observe.guard import Finding
from miles_core.observe.history import History
from miles_core.pipeline.guard import WayBack, action_of, findings_of, rewind, rewinds, way_back
from miles_core.store.run_store import RunStore
from tasks.publish import key_of


def heed(store: RunStore, config: RunConfig, history: History, iteration: int) -> str | None:
    """Judge a run up to an iteration that is on its line, and act: the name of the fork to train instead, or None to go on.

    Ends the flow run where it is suspended; raises StageError where there is no deployment that could resume it.
    """
    history.refresh()
    passed = (store.record() or {}).get("guard_from", 0)
    findings = findings_of(history, config, [iteration], passed).get(iteration, [])
    action = action_of(config, findings)
    if action == "off":
        return None
    back = way_back(store, config, findings)
    rewinding = action == "rewind" and back is not None and rewinds(store)[1] < config.guard.guard_max_rewinds
    way = _way(back) if back else "no policy before it can be trained on: its checkpoint was pruned"
    for finding in findings:
        print(f"  guard, iteration {iteration}: {finding.check}: {finding.told}", flush=True)
    if not rewinding:
        print(f"  guard: {way}", flush=True)
    _publish(store.run, iteration, findings, way)
    if rewinding and back:
        fork = rewind(store, config, back)
        print(f"  guard: run {store.run} is left as it is; {fork} goes on from iteration {back.iteration}", flush=True)
        return fork
    if action != "warn":
        _hold(store, iteration, findings)
    return None


def _hold(store: RunStore, iteration: int, findings: Sequence[Finding]) -> None:
    """Suspend the flow run until it is resumed, which passes what was found; a command ends."""
    checks = ", ".join(finding.check for finding in findings)
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None and context.flow_run.deployment_id is not None:
        # The key lets the flow run through once it was resumed.
        suspend_flow_run(key=f"guard-{store.run}-{iteration}")
        store.update_record(lambda record: record | {"guard_from": iteration + 1})
        print(f"  guard: resumed; {checks} of iteration {iteration} passed", flush=True)
        return
    fault = StageError(
        f"the guard suspended run {store.run} after iteration {iteration} ({checks}); the same command stops here again: look "
        f"at `miles gallery {store.run} --iterations {iteration}`, then go back by the fork above, or go on as it is with "
        f"--guard-from {iteration + 1} or --guard warn"
    )
    fault.told = True  # type: ignore[attr-defined]
    raise fault


def _way(back: WayBack) -> str:
    kept = f"the policy before iteration {back.iteration}" if back.iteration else "the policy that the run started from"
    return f"last healthy: {kept}; `{back.command}` goes on from there with other prompts and noise"


def _publish(run: str, iteration: int, findings: Sequence[Finding], way: str) -> None:
    """The artifact `RUN-guard`, and a line each in the flow run's log."""
    if FlowRunContext.get() is None:
        return
    for finding in findings:
        get_run_logger().warning("guard, iteration %d: %s: %s", iteration, finding.check, finding.told)
    rows = "\n".join(f"| {f.check} | {f.value:.4g} | {f.limit:.4g} | {f.told} |" for f in findings)
    text = (
        f"## {run}, iteration {iteration}: the guard\n\n| check | value | limit | |\n|---|---|---|---|\n{rows}\n\n"
        f"{way[0].upper()}{way[1:]}.\n\nWhere the flow run is suspended, **Resume** passes this and goes on as it is; iterations "
        f"from {iteration + 1} on are then judged by themselves.\n"
    )
    with contextlib.suppress(Exception):
        checks = ", ".join(finding.check for finding in findings)
        create_markdown_artifact(
            text, key=key_of(run, "guard"), description=f"iteration {iteration} of {run}: {checks}"[:500]
        )

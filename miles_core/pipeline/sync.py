"""sync: the new adapter to every engine, verified by what arrived, where it bound, and by the probe."""

import time
from typing import Any

import pyarrow as pa

from miles_core.errors import StageError
from miles_core.pipeline.policy import adapter_of, policy_version
from miles_core.pipeline.rollout import PROBE, probe_spec
from miles_core.pipeline.stage import Product, Step, Upstreams, checked_on_failure
from miles_core.store.manifest import Manifest
from miles_core.store.parts import write_table
from miles_core.store.run_store import Attempt
from miles_core.store.schemas import SYNC
from miles_core.weights.probe_spec import probe_tolerance


def push(step: Step, attempt: Attempt, upstream: Upstreams) -> Product:
    """Push to all engines at once and prove each. Raises StageError where an engine does not hold the policy."""
    from miles_core.rollout.dispatch import push as push_to

    update = upstream["update"]
    workers, files = step.workers, step.store.files
    rollout = _rollout(step, update)
    before, trained = rollout.under(PROBE)[0], update.under(PROBE)[0]
    tolerance = probe_tolerance(step.config.training.diffusion_forward_dtype)
    request = probe_spec(step).request()

    def prove(engine: Any) -> dict[str, Any]:
        reply = push_to(workers, engine, files, adapter_of(update), update.summary["policy_digest"])
        started = time.perf_counter()
        probe = workers.probe(engine, request)
        proof = workers.parse("compare_probe", files, probe, before, trained, tolerance)
        return {
            "engine": reply.engine,
            "policy_digest": reply.policy_digest,
            "policy_version": policy_version(update),
            "modules_bound": reply.modules_bound,
            "bytes": reply.bytes,
            "probe_diff": proof.diff,
            "probe_moved": proof.moved,
            "push_seconds": reply.seconds,
            "verify_seconds": time.perf_counter() - started,
            "row_digest": "",
        }

    with checked_on_failure(step, {"rollout": rollout}):
        rows = workers.with_engines(prove)
    part = write_table(files, attempt.path("data/engines.parquet"), pa.Table.from_pylist(rows, schema=SYNC))
    summary = {
        "engines": len(rows),
        "modules_bound": rows[0]["modules_bound"],
        "probe_diff": max(row["probe_diff"] for row in rows),
        "probe_moved": min(row["probe_moved"] for row in rows),
    }
    return Product([part], summary)


def _rollout(step: Step, update: Manifest) -> Manifest:
    rollout = step.store.product(update.upstream["rollout"])
    if rollout is None:
        raise StageError(
            f"the rollout {update.upstream['rollout'].attempt} that this update was made from is gone or damaged, and its "
            "probe with it; run the same command again to make it afresh"
        )
    return rollout

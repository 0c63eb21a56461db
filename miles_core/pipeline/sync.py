"""sync: the new adapter to every engine, verified by what arrived, where it bound, and by the probe."""

import time
from typing import Any

import pyarrow as pa

from miles_core.errors import StageError
from miles_core.pipeline.policy import adapter_of, policy_version
from miles_core.pipeline.rollout import PROBE, probe_spec
from miles_core.pipeline.stage import Product, Step, Upstreams
from miles_core.rollout.protocol import SyncReply
from miles_core.store.manifest import Manifest
from miles_core.store.parts import write_table
from miles_core.store.run_store import Attempt
from miles_core.store.schemas import SYNC


def push(step: Step, attempt: Attempt, upstream: Upstreams) -> Product:
    """Push to all engines at once and prove each. Raises StageError where an engine does not hold the policy."""
    update = upstream["update"]
    workers, files, digest = step.workers, step.store.files, update.summary["policy_digest"]
    engines = workers.engines()
    replies: list[SyncReply] = workers.get(
        [e.load_policy.remote(files, adapter_of(update)) for e in engines], "the policy push"
    )
    for reply in replies:
        if reply.policy_digest != digest or reply.modules_bound == 0:
            raise StageError(
                f"{reply.engine} reports policy {reply.policy_digest[:12]} on {reply.modules_bound} modules after the push "
                f"of {digest[:12]}: the adapter did not arrive"
            )
    started = time.perf_counter()
    proofs = _prove(step, update, engines)
    seconds = (time.perf_counter() - started) / len(engines)
    rows = [
        {
            "engine": reply.engine,
            "policy_digest": reply.policy_digest,
            "policy_version": policy_version(update),
            "modules_bound": reply.modules_bound,
            "bytes": reply.bytes,
            "probe_diff": proof.diff,
            "probe_moved": proof.moved,
            "push_seconds": reply.seconds,
            "verify_seconds": seconds,
            "row_digest": "",
        }
        for reply, proof in zip(replies, proofs, strict=True)
    ]
    part = write_table(files, attempt.path("data/engines.parquet"), pa.Table.from_pylist(rows, schema=SYNC))
    summary = {
        "engines": len(engines),
        "modules_bound": replies[0].modules_bound,
        "probe_diff": max(p.diff for p in proofs),
        "probe_moved": min(p.moved for p in proofs),
    }
    return Product([part], summary)


def _prove(step: Step, update: Manifest, engines: list[Any]) -> list[Any]:
    from miles_core.weights.verify import probe_tolerance

    rollout = step.store.manifest("rollout", step.iteration, update.upstream["rollout"].attempt)
    if rollout is None:
        raise StageError(
            f"the rollout {update.upstream['rollout'].attempt} that this update was made from is gone, and its probe "
            "with it; run the same command again to make it afresh"
        )
    before, trained = rollout.under(PROBE)[0], update.under(PROBE)[0]
    tolerance = probe_tolerance(step.config.training.diffusion_forward_dtype)
    request = probe_spec(step).request()
    parser = step.workers.parsers()[0]
    calls = [
        parser.compare_probe.remote(step.store.files, engine.probe.remote(request), before, trained, tolerance)
        for engine in engines
    ]
    return step.workers.get(calls, "the probe after the push")

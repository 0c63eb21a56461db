"""policy/init: the digest of the base weights and the seeded adapter; and which policy is in force."""

import pyarrow as pa

from miles_core.pipeline.stage import Product, Step, Upstreams
from miles_core.store.manifest import Manifest
from miles_core.store.parts import Part, read_bytes, write_table
from miles_core.store.run_store import Attempt
from miles_core.store.schemas import POLICY
from miles_core.weights.adapter_file import pushed
from miles_core.weights.digest import policy_digest
from miles_core.weights.raw import encode

ADAPTER = "adapter/"


def adapter_of(policy: Manifest) -> Part:
    """The adapter file of policy/init or of an update."""
    (part,) = (p for p in policy.under(ADAPTER) if p.path.endswith(".safetensors"))
    return part


def policy_version(policy: Manifest) -> int:
    """Iteration whose update made this policy; -1 for policy/init."""
    return policy.iteration if policy.stage == "update" else -1


def initialize(step: Step, attempt: Attempt, upstream: Upstreams) -> Product:
    """Write the seeded adapter as the trainer makes it."""
    parts: list[Part] = step.workers.train("init_policy", step.store.files, attempt.folder)[0]
    adapter = next(p for p in parts if p.path.endswith(".safetensors"))
    tensors = pushed(read_bytes(step.store.files, adapter))
    row = {
        "adapter": "default",
        "base_digest": step.inputs.checkpoint_digest,
        "policy_digest": policy_digest(encode(tensors)),
        "modules": sum(".lora_B." in name for name in tensors),
        "parameters": sum(t.numel for t in tensors.values()),
        "row_digest": "",
    }
    table = pa.Table.from_pylist([row], schema=POLICY)
    rows = write_table(step.store.files, attempt.path("data/policy.parquet"), table)
    return Product([*parts, rows], {k: row[k] for k in ("policy_digest", "modules", "parameters")})

"""The policy's digest: one function, so that trainer, store and engine mean the same by it."""

from miles_core.store.digest import content_digest, tensor_digests


def policy_digest(adapter: bytes) -> str:
    """Digest of an adapter's tensors (name, dtype, shape, bytes); `adapter` is a safetensors file's content."""
    return content_digest([], tensor_digests(adapter).items())

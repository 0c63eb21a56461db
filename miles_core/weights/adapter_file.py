"""An adapter's two spellings: diffusers' file (names under `transformer.`) and PEFT's names for a push."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from miles_core.errors import StageError
from miles_core.weights import raw
from miles_core.weights.raw import Raw

_PREFIX = "transformer."
_LORA_METADATA = "lora_adapter_metadata"
_TRAINER_METADATA = "miles"


@dataclass(frozen=True)
class AdapterInfo:
    """What an adapter file says of itself. `global_step` counts the optimizer steps that made it: 0 is the seeded
    adapter of policy/init, which alone may be trained on without a checkpoint."""

    rank: int
    alpha: int
    target_modules: tuple[str, ...]
    global_step: int


def to_push(adapter_file: bytes) -> bytes:
    """PEFT-named safetensors (`transformer_blocks.0.attn.to_q.lora_A.weight`) of a diffusers adapter file.

    Raises StageError for an empty file and for a tensor that does not belong to the transformer.
    """
    return raw.encode(pushed(adapter_file))


def pushed(adapter_file: bytes) -> dict[str, Raw]:
    """The tensors of a diffusers adapter file by PEFT name. Raises StageError as `to_push` does."""
    tensors = raw.decode(adapter_file)
    foreign = sorted(name for name in tensors if not name.startswith(_PREFIX))
    if foreign:
        raise StageError(f"the adapter holds {foreign[0]!r}, which is no weight of the transformer")
    if not tensors:
        raise StageError("the adapter holds no tensor, so that it would change nothing")
    return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}


def to_diffusers(push: bytes, *, rank: int, alpha: int, target_modules: Sequence[str], global_step: int = 0) -> bytes:
    """A file that diffusers' load_lora_weights takes, with rank and alpha in its metadata, of PEFT-named tensors."""
    lora = {
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(target_modules),
        "rank_pattern": {},
        "alpha_pattern": {},
        "lora_bias": False,
        "use_dora": False,
    }
    metadata = {
        "format": "pt",
        _LORA_METADATA: json.dumps({_PREFIX + key: value for key, value in lora.items()}, sort_keys=True),
        _TRAINER_METADATA: json.dumps({"global_step": global_step}),
    }
    return raw.encode({_PREFIX + name: tensor for name, tensor in raw.decode(push).items()}, metadata)


def adapter_info(adapter_file: bytes) -> AdapterInfo:
    """Rank, alpha, targets and training state that the file's metadata names. Raises StageError without them."""
    metadata = raw.file_metadata(adapter_file)
    try:
        lora = json.loads(metadata[_LORA_METADATA])
        return AdapterInfo(
            rank=lora[_PREFIX + "r"],
            alpha=lora[_PREFIX + "lora_alpha"],
            target_modules=tuple(lora[_PREFIX + "target_modules"]),
            global_step=json.loads(metadata[_TRAINER_METADATA])["global_step"],
        )
    except (KeyError, ValueError):
        raise StageError(
            "the adapter file does not name its rank, alpha and optimizer step: it was not written here"
        ) from None

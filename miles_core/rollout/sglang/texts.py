"""How much of a text the server must read: a request can say one length for all encoders, and for the prompt alone."""

from pathlib import Path

from miles_core.errors import InputError
from miles_core.families.sizes import SHAPES

_WAY_OUT = "take --rollout-engine diffusers"


def text_tokens(checkpoint: Path, family: str, *, guided: bool) -> int | None:
    """The length to which the server is to cut and pad every prompt, where the checkpoint's tokenizers read less than the
    family's published models; None where they do not.

    Raises InputError where a server cannot do it: the lengths differ, or guidance needs a negative prompt, which sglang
    0.5.23 encodes at its own lengths whatever the request says.
    """
    limits = SHAPES[family].text_tokens(checkpoint)
    if limits == dict(SHAPES[family].longest_texts):
        return None
    told = ", ".join(f"{limit} ({name})" for name, limit in limits.items())
    if len(set(limits.values())) > 1:
        raise InputError(
            f"{checkpoint} reads {told} tokens of a text, and a request to sglang has one length for all encoders: "
            f"{_WAY_OUT}, or give the tokenizers one model_max_length."
        )
    if guided:
        raise InputError(
            f"{checkpoint} reads {told} tokens of a text, and sglang encodes negative prompts at its own lengths: "
            f"{_WAY_OUT}, or --diffusion-guidance-scale 1."
        )
    return next(iter(limits.values()))

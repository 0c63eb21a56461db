"""A score and how it came about, the tries behind it, and what scorers see of a sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from miles_core.data.sample import Sample
from miles_core.errors import StageError

T = TypeVar("T")


@dataclass(frozen=True)
class Score:
    """A sample's score and how it came about; `seconds` of all tries together. components: the rewards of
    several scorers, of which `reward` is the weighted sum."""

    reward: float
    rm_type: str
    rm_version: str
    recognized: str | None = None
    target: str | None = None
    tries: int = 1
    seconds: float = 0.0
    components: Mapping[str, float] | None = None

    def component(self, name: str) -> float | None:
        """What this scorer gave, None where it did not score the sample."""
        if self.components is not None:
            return self.components.get(name)
        return self.reward if self.rm_type == name else None

    def scorers(self) -> set[str]:
        """Who scored."""
        return set(self.components) if self.components is not None else {self.rm_type}


def with_retries(
    call: Callable[[], T],
    max_retries: int,
    what: str,
    *,
    final: tuple[type[Exception], ...] = (),
    wait: Callable[[int, Exception], float] = lambda tries, fault: 0.0,
) -> tuple[T, int]:
    """(what it returned, tries). final: faults that another try cannot mend; wait: seconds before the next try.

    Raises StageError, with `what`, the tries and the last cause, once all tries failed.
    """
    tries = 0
    while True:
        tries += 1
        try:
            return call(), tries
        except final as fault:
            raise StageError(f"{what}: {fault}") from fault
        except Exception as fault:  # a scorer may raise anything; none of it may become a number
            if tries > max_retries:
                raise StageError(f"{what} in each of {tries} tries: {type(fault).__name__}: {fault}") from fault
            time.sleep(wait(tries, fault))


def rgb_hwc_uint8(sample: Sample) -> np.ndarray:
    """(H, W, 3) uint8 of a sample's generated_output, (3, H, W) float in [0, 1]."""
    pixels = np.asarray(sample.generated_output, dtype=np.float32).transpose(1, 2, 0)
    if not np.isfinite(pixels).all():
        raise StageError(f"the image of sample {sample.index} holds values that are not finite")
    return np.round(np.clip(pixels, 0, 1) * 255).astype(np.uint8)


def rgb_frames(sample: Sample) -> list[np.ndarray]:
    """The frames of a sample as (H, W, 3) uint8: one for an image."""
    return [rgb_hwc_uint8(sample)]

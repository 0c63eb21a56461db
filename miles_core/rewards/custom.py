"""A user's own reward (--custom-rm-path): called with a microgroup, its answer checked, its failures named."""

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any

from miles_core.data.sample import Sample
from miles_core.errors import StageError
from miles_core.rewards.rm_types import CUSTOM
from miles_core.rewards.scores import Score, with_retries
from miles_core.user_code import hook_digest, load_hook

_OPTION = "custom_rm_path"


class CustomReward:
    """The user's function, loaded once a process. args: the run's flat configuration, with its code_path."""

    def __init__(self, args: Any) -> None:
        self._args, self._path = args, str(args.custom_rm_path)
        self._function = load_hook(_OPTION, self._path, args.code_path)
        self._version = f"{CUSTOM}:{hook_digest(_OPTION, self._path, args.code_path)[:12]}"

    def scores(self, samples: Sequence[Sample]) -> list[Score]:
        """A Score a sample, in order. The call is tried args.reward_max_retries times more. Raises StageError that names
        the hook and the samples."""
        started = time.perf_counter()
        what = f"--custom-rm-path {self._path} failed on samples {samples[0].index} to {samples[-1].index}"
        rewards, tries = with_retries(lambda: self._asked(samples), self._args.reward_max_retries, what)
        seconds = (time.perf_counter() - started) / len(samples)
        return [Score(reward, CUSTOM, self._version, tries=tries, seconds=seconds) for reward in rewards]

    def _asked(self, samples: Sequence[Sample]) -> list[float]:
        answer = asyncio.run(self._function(self._args, list(samples)))
        if not isinstance(answer, list | tuple) or len(answer) != len(samples):
            told = f"{len(answer)} values" if isinstance(answer, list | tuple) else f"a {type(answer).__name__}"
            raise StageError(f"it returned {told} for {len(samples)} samples: return a list with a number each")
        return [_number(value, sample) for value, sample in zip(answer, samples, strict=True)]


def _number(value: Any, sample: Sample) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise StageError(f"it returned {value!r} for sample {sample.index}, which is no number") from None
    if not math.isfinite(number):
        raise StageError(f"it returned {number} for sample {sample.index}, which is not finite")
    return number

"""rm_type remote_rm: images go to a service over HTTP, a batch a request, and rewards come back (format in
docs/operations.md, a server of a few lines in docs/examples/reward_server.py)."""

import base64
import io
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
from PIL import Image

from miles_core.data.sample import Sample
from miles_core.errors import InputError, StageError
from miles_core.rewards.scores import Score, rgb_hwc_uint8, with_retries

REMOTE = "remote_rm"
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
_AGAIN = {408, 425, 429}


class Refused(StageError):
    """The service will not answer this request, however often it is asked."""


def check_rm_url(url: str | None) -> str:
    """The service's address. Raises InputError where there is none, or one that is no http(s) address."""
    if not url:
        raise InputError(
            "rm_type remote_rm needs the address of the reward service: give --rm-url http://HOST:PORT/PATH"
        )
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(f"--rm-url {url!r} is no http or https address: give http://HOST:PORT/PATH")
    return url


class RemoteReward:
    """The service as a scorer, one a process. args: the run's flat configuration (rm_url, remote_rm_batch_size,
    remote_rm_concurrency, remote_rm_timeout, reward_max_retries)."""

    def __init__(self, args: Any) -> None:
        self._args, self._url = args, check_rm_url(args.rm_url)
        self._client = httpx.Client(timeout=args.remote_rm_timeout, follow_redirects=False)

    def scores(self, samples: Sequence[Sample]) -> list[Score]:
        """A Score a sample, in order: batches of remote_rm_batch_size, remote_rm_concurrency of them at once.

        A batch is tried reward_max_retries times more, after 0.5, 1, 2, … s or what the service's Retry-After says, 30 s at most.
        Raises StageError that names the service, the samples and the last cause.
        """
        size = self._args.remote_rm_batch_size
        batches = [samples[n : n + size] for n in range(0, len(samples), size)]
        with ThreadPoolExecutor(self._args.remote_rm_concurrency) as pool:
            return [score for scores in pool.map(self._batch, batches) for score in scores]

    def _batch(self, samples: Sequence[Sample]) -> list[Score]:
        body = {"samples": [described(sample) for sample in samples]}
        started = time.perf_counter()
        what = f"the reward service {self._url} failed on samples {samples[0].index} to {samples[-1].index}"
        scores, tries = with_retries(
            lambda: scores_of(self._asked(body), samples),
            self._args.reward_max_retries,
            what,
            final=(Refused,),
            wait=_wait,
        )
        seconds = (time.perf_counter() - started) / len(samples)
        return [replace(score, tries=tries, seconds=seconds) for score in scores]

    def _asked(self, body: dict[str, Any]) -> Any:
        answer = self._client.post(self._url, json=body)
        if answer.is_success:
            return answer.json()
        told = f"it answered {answer.status_code}: {' '.join(answer.text.split())[:300]}"
        if answer.is_server_error or answer.status_code in _AGAIN:
            raise Unavailable(told, answer.headers.get("retry-after"))
        raise Refused(told)


class Unavailable(Exception):
    """The service may answer another time; after: its Retry-After."""

    def __init__(self, told: str, after: str | None) -> None:
        super().__init__(told)
        self.after = float(after) if after and after.isdigit() else None


def described(sample: Sample) -> dict[str, Any]:
    """What the service gets of a sample: its image as PNG, base64, and what it was made from."""
    page = io.BytesIO()
    Image.fromarray(rgb_hwc_uint8(sample)).save(page, format="PNG", compress_level=1)
    return {
        "sample_index": sample.index,
        "group_index": sample.group_index,
        "prompt": sample.prompt,
        "seed": sample.seed,
        "metadata": sample.metadata,
        "image": base64.b64encode(page.getvalue()).decode(),
    }


def scores_of(answer: Any, samples: Sequence[Sample]) -> list[Score]:
    """The Scores of an answer {"rewards": [a number each], "version": "…" if there is one}. Raises StageError for what is
    none."""
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list) or len(rewards) != len(samples):
        told = f"{len(rewards)} rewards" if isinstance(rewards, list) else "no list of rewards"
        raise StageError(f"it returned {told} for {len(samples)} samples")
    version = f"{REMOTE}:{answer.get('version', '')}"
    for reward, sample in zip(rewards, samples, strict=True):
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise StageError(f"it returned {reward!r} for sample {sample.index}, which is no finite number")
    return [Score(float(np.float64(reward)), REMOTE, version) for reward in rewards]


def _wait(tries: int, fault: Exception) -> float:
    """Seconds before the next try, after so many."""
    after = fault.after if isinstance(fault, Unavailable) else None
    return min(LONGEST_WAIT, FIRST_WAIT * 2 ** (tries - 1) if after is None else after)

"""Where each trainer rank is, told to the others, so that a rank that hangs or dies is named by those that wait."""

import contextlib
import time

import torch.distributed as dist

from miles_core.errors import StageError

_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 5.0


class RollCall:
    """One rank's part in it, over the process group's store. seconds: the limit of one collective.

    `tell` says where this rank is, `verdict` what a fault means: one of this rank's own, or of one that others lack.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, seconds: float) -> None:
        self._store, self._rank, self._world_size, self._seconds = store, rank, world_size, seconds
        self._since = time.monotonic()
        self._verbs = 0

    def tell(self, at: str) -> None:
        """This rank is now at `at`. Raises dist.DistError where rank 0, which holds the store, is gone."""
        self._since = time.monotonic()
        self._store.set(f"at/{self._rank}", at)

    def begin(self) -> None:
        """The next verb: every rank calls the same ones in the same order."""
        self._verbs += 1

    def assemble(self) -> None:
        """Wait for all ranks to come. Raises StageError that names those that did not."""
        absent = self._wait_for("at", self._seconds)
        if absent:
            raise StageError(
                f"trainer rank {self._rank} waited {self._minutes} minutes for {_names(absent)} to start "
                "(--distributed-timeout-minutes): run the same command again to resume"
            )

    def report(self, at: str, fault: Exception) -> None:
        """Tell the others that this rank left the verb, and whether by a fault of its own."""
        # Where rank 0 is gone nobody can be told, and the fault itself says more.
        with contextlib.suppress(dist.DistError):
            self._store.set(self._key("left"), "" if is_lost(fault) else f"{at}: {_one_line(fault)}")

    def verdict(self, at: str, fault: Exception) -> str:
        """One sentence that names rank, place and cause; call after `report`."""
        if not is_lost(fault):
            return f"trainer rank {self._rank} failed in {at}: {_one_line(fault)}"
        waited = time.monotonic() - self._since
        try:
            silent = self._wait_for(f"left/{self._verbs}", min(_ANSWER_SECONDS, self._seconds))
            causes = self._causes(silent)
            places = {rank: self._store.get(f"at/{rank}").decode() for rank in silent}
        except dist.DistError:
            silent, causes, places = [0], {}, {0: "an unknown place, as it held the list"}
        what = f"trainer rank {self._rank} waited {waited / 60:.3f} minutes in {at}"
        if causes:
            rank, cause = next(iter(causes.items()))
            return f"{what} for trainer rank {rank}, which failed in {cause}"
        if not silent:
            return f"{what} and lost the other ranks, which had stopped: {_one_line(fault)}"
        seen = "; ".join(f"rank {rank} was last seen in {place}" for rank, place in places.items())
        return (
            f"{what} for {_names(silent)}: hangs or died (--distributed-timeout-minutes {self._minutes}); {seen}; "
            "run the same command again to resume"
        )

    @property
    def _minutes(self) -> str:
        return f"{self._seconds / 60:.3g}"

    def _key(self, kind: str) -> str:
        return f"{kind}/{self._verbs}/{self._rank}"

    def _wait_for(self, kind: str, seconds: float) -> list[int]:
        """The ranks without a key `kind`/rank after `seconds`."""
        deadline = time.monotonic() + seconds
        while absent := [r for r in range(self._world_size) if not self._store.check([f"{kind}/{r}"])]:
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        return absent

    def _causes(self, silent: list[int]) -> dict[int, str]:
        """The faults of their own that other ranks left the verb by."""
        others = [rank for rank in range(self._world_size) if rank not in (self._rank, *silent)]
        left = {rank: self._store.get(f"left/{self._verbs}/{rank}").decode() for rank in others}
        return {rank: cause for rank, cause in left.items() if cause}


def is_lost(fault: Exception) -> bool:
    """Whether the fault says that another rank could not be reached: gloo raises nothing but RuntimeError."""
    return isinstance(fault, dist.DistError) or "/gloo/" in str(fault)


def _names(ranks: list[int]) -> str:
    return f"trainer rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _one_line(fault: Exception) -> str:
    text = str(fault).strip().splitlines()
    return f"{type(fault).__name__}: {text[0]}" if text else type(fault).__name__

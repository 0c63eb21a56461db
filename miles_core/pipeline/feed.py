"""The stream of rollout parts from the stage that makes them to the one that scores them."""

import queue
from collections.abc import Iterator

from miles_core.errors import StageError
from miles_core.store.manifest import Manifest
from miles_core.store.parts import Part


class UpstreamFailed(StageError):
    """The rollout failed while its parts were being scored; what was scored is kept."""


class RolloutFeed:
    """Parts as they land, then the committed manifest, or the news that there will be none.

    One producer, one consumer, each in a thread of its own. The fingerprint is known before the first part. The feed of a
    wave ends without a manifest.
    """

    def __init__(self) -> None:
        self._queue: queue.Queue[Part | Manifest | BaseException | None] = queue.Queue()
        self._start: queue.Queue[tuple[str, Manifest] | BaseException] = queue.Queue()
        self._prompts: Manifest | None = None
        self._fingerprint = ""
        self._manifest: Manifest | None = None
        self._begun = False
        self.ended = False

    # The producer's side

    def begin(self, fingerprint: str, prompts: Manifest) -> None:
        self._start.put((fingerprint, prompts))

    def put(self, part: Part) -> None:
        self._queue.put(part)

    def close(self, manifest: Manifest) -> None:
        self._queue.put(manifest)

    def end(self) -> None:
        """All parts of a wave have come."""
        self._queue.put(None)

    def fail(self, error: BaseException) -> None:
        self._start.put(error)
        self._queue.put(error)

    # The consumer's side

    def wait_for_begin(self) -> tuple[str, Manifest]:
        """Fingerprint of the rollout and the prompts it is made of."""
        if not self._begun:
            first = self._start.get()
            if isinstance(first, BaseException):
                raise UpstreamFailed(f"rollout failed: {first}") from first
            self._fingerprint, prompts = first
            self._prompts, self._begun = prompts, True
        assert self._prompts is not None
        return self._fingerprint, self._prompts

    def next(self, timeout: float) -> Part | None:
        """The next part, or None where none came in time or all have come."""
        if self._manifest is not None:
            return None
        try:
            item = self._queue.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            raise UpstreamFailed(f"rollout failed: {item}") from item
        if isinstance(item, Manifest):
            self._manifest = item
            return None
        self.ended = item is None
        return item

    @property
    def manifest(self) -> Manifest | None:
        """The committed rollout, once it is committed and every part was handed out."""
        return self._manifest

    def committed_now(self) -> Manifest | None:
        """The committed rollout, if it is committed by now; parts still waiting are passed over."""
        while self._manifest is None and not self._queue.empty():
            item = self._queue.get_nowait()
            if isinstance(item, Manifest):
                self._manifest = item
        return self._manifest

    def wait_for_manifest(self) -> tuple[list[Part], Manifest]:
        """Parts not handed out yet, and the committed rollout."""
        parts = list(self._drain())
        assert self._manifest is not None
        return parts, self._manifest

    def _drain(self) -> Iterator[Part]:
        while self._manifest is None:
            part = self.next(timeout=3600.0)
            if part is not None:
                yield part


def replay(manifest: Manifest, prompts: Manifest) -> RolloutFeed:
    """The feed of a rollout that is committed already."""
    feed = RolloutFeed()
    feed.begin(manifest.fingerprint, prompts)
    for part in manifest.data:
        feed.put(part)
    feed.close(manifest)
    return feed

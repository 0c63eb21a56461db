"""The stream from rollout to rewards."""

import threading

import pytest

from miles_core.errors import StageError
from miles_core.pipeline.feed import RolloutFeed, UpstreamFailed
from miles_core.store.manifest import Manifest
from miles_core.store.parts import Part

PARTS = [Part(f"data/{i}-1.parquet", 1, 1, "s", "c") for i in range(3)]


def manifest() -> Manifest:
    return Manifest(
        stage="rollout",
        run="r",
        iteration=0,
        attempt="a",
        folder="",
        fingerprint="f",
        content_digest="d",
        parts=(),
        upstream={},
        affecting_config={},
        inputs={},
        versions={},
        times={},
    )


def test_parts_come_in_order_and_then_the_manifest() -> None:
    feed, end = RolloutFeed(), manifest()
    feed.begin("f", end)
    for part in PARTS:
        feed.put(part)
    assert feed.wait_for_begin() == ("f", end)
    assert [feed.next(1) for _ in PARTS] == PARTS
    assert feed.next(0.01) is None
    assert feed.manifest is None
    feed.close(end)
    assert feed.next(1) is None
    assert feed.manifest == end


def test_the_rest_is_waited_for() -> None:
    feed, end = RolloutFeed(), manifest()
    feed.put(PARTS[0])

    def later() -> None:
        feed.put(PARTS[1])
        feed.close(end)

    timer = threading.Timer(0.05, later)
    timer.start()
    assert feed.wait_for_manifest() == (PARTS[:2], end)
    timer.join()


@pytest.mark.parametrize("begun", [True, False])
def test_a_failed_rollout_ends_the_waiting(begun: bool) -> None:
    feed = RolloutFeed()
    if begun:
        feed.begin("f", manifest())
    feed.fail(StageError("no engine left"))
    if begun:
        feed.wait_for_begin()
    wait = (lambda: feed.next(1)) if begun else feed.wait_for_begin
    with pytest.raises(UpstreamFailed, match="no engine left"):
        wait()

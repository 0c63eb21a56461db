"""A server that is away, slow, overloaded, refuses or loses its answers: the call works after all, or fails in one
sentence, and nothing is done twice."""

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from roots import BucketRoot
from s3_proxy import Answer, Fault, Proxy, Request

from miles_core.errors import InputError, StageError, StoreError
from miles_core.store import s3
from miles_core.store.files import Files, prove_conditional_put, reach
from miles_core.store.parts import write_file
from miles_core.store.run_store import RunStore

pytestmark = pytest.mark.integration
LOST = Answer(lose=True)
REFUSED = Answer(403, "AccessDenied")


def times(count: int, answer: Answer, when: Callable[[Request], bool] = lambda request: True) -> Fault:
    """The first `count` of the requests that are meant get this answer."""
    counter = itertools.count()
    return lambda request: answer if when(request) and next(counter) < count else None


def written(request: Request) -> bool:
    return request.method == "PUT"


@pytest.fixture
def files(bucket: BucketRoot, proxy: Proxy) -> Files:
    bucket.put("there.json", b"1")
    return bucket.files


def commit(files: Files) -> Any:
    store = RunStore(files, "r")
    attempt = store.open_attempt("rollout", 0, "f" * 64, {}, resumable=False)
    parts = [write_file(files, attempt.path("data/0.json"), b"{}")]
    facts: dict[str, Any] = {"affecting_config": {}, "inputs": {}, "versions": {}, "summary": {}, "flow_run_id": None}
    return store.commit(attempt, parts=parts, upstream={}, started_at=0.0, **facts)


OPERATIONS: dict[str, tuple[Callable[[Files], Any], Any]] = {
    "read": (lambda files: files.read("there.json"), b"1"),
    "size": (lambda files: files.size("there.json"), 1),
    "exists": (lambda files: files.exists("none.json"), False),
    "list": (lambda files: files.list(""), ["there.json"]),
    "create": (lambda files: files.create("new.json", b"2"), True),
    "create of what is there": (lambda files: files.create("there.json", b"2"), False),
    "replace": (lambda files: files.replace("there.json", b"2"), None),
    "edit": (lambda files: files.edit("there.json", lambda data: (data or b"") + b"2"), b"12"),
    "edit of what is not there": (lambda files: files.edit("new.json", lambda data: (data or b"") + b"2"), b"2"),
    "delete": (lambda files: files.delete("there.json"), None),
    "commit": (lambda files: len(commit(files).parts), 1),
}
FAULTS: dict[str, Answer] = {
    "answers that are lost": LOST,
    "an overloaded server": Answer(503, "SlowDown"),
    "a server in trouble": Answer(500, "InternalError"),
    "a request that timed out": Answer(400, "RequestTimeout"),
    "a conflict": Answer(409, "ConditionalRequestConflict"),
    "slow answers": Answer(pause=0.8),
}


# The two commonest faults meet every operation, the others one of each kind; an answer to HEAD names no code.
MEETINGS = [
    (kind, operation)
    for kind in FAULTS
    for operation in OPERATIONS
    if kind in ("answers that are lost", "an overloaded server") or operation in ("read", "create", "edit")
]


@pytest.mark.parametrize(("kind", "operation"), MEETINGS)
def test_a_passing_fault_is_passed_over(
    kind: str, operation: str, files: Files, proxy: Proxy, bucket: BucketRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "ANSWER_SECONDS", 0.4)
    monkeypatch.setattr(s3, "_FIRST_PAUSE", 0.01)
    work, wanted = OPERATIONS[operation]
    writes = operation.startswith(("create", "replace", "edit", "commit"))
    proxy.fault = times(2, FAULTS[kind], written if writes else lambda request: True)
    assert work(files) == wanted
    assert len(proxy.seen) > 2
    held = {name: bucket.get(name) for name in bucket.names()}
    if operation == "commit":
        made = ["0.json", "attempt.json", "manifest.json", "there.json"]
        assert sorted(name.split("/")[-1] for name in held) == made
        assert RunStore(files, "r").attempts("rollout", 0) == ["f" * 12]
    else:
        there = {"replace": {"there.json": b"2"}, "edit": {"there.json": b"12"}, "delete": {}}
        new = operation in ("create", "edit of what is not there")
        assert held == there.get(operation, {"there.json": b"1"}) | ({"new.json": b"2"} if new else {})


@pytest.mark.parametrize("operation", ["read", "list", "create", "edit", "commit"])
def test_an_outage_of_a_second_is_waited_out(operation: str, files: Files, proxy: Proxy) -> None:
    work, wanted = OPERATIONS[operation]
    assert files.exists("there.json")
    proxy.hang_up()
    back = threading.Timer(1.0, proxy.listen)
    back.start()
    started = time.monotonic()
    assert work(files) == wanted
    assert time.monotonic() - started > 0.9
    back.join()


@pytest.mark.parametrize("operation", ["read", "list", "create", "edit", "commit"])
def test_a_longer_outage_ends_in_one_sentence(
    operation: str, files: Files, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "RETRY_SECONDS", 0.5)
    proxy.hang_up()
    with pytest.raises(StoreError) as caught:
        OPERATIONS[operation][0](files)
    assert all(word in str(caught.value) for word in ("s3://bucket-", proxy.url, "is up", "AWS_ENDPOINT_URL"))
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, StageError)


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "exists"])
def test_a_refusal_is_never_tried_again(operation: str, files: Files, proxy: Proxy) -> None:
    proxy.fault = times(99, REFUSED)
    with pytest.raises(StoreError) as caught:
        OPERATIONS[operation][0](files)
    assert len(proxy.seen) == 1
    assert all(word in str(caught.value) for word in ("s3://bucket-", "403", "AWS_ACCESS_KEY_ID"))
    assert "\n" not in str(caught.value)


def test_refused_writes_leave_nothing_and_reading_goes_on(files: Files, proxy: Proxy, bucket: BucketRoot) -> None:
    proxy.fault = times(99, REFUSED, written)
    with pytest.raises(StoreError, match="cannot be written: .* 403 AccessDenied .said by the proxy"):
        commit(files)
    assert files.read("there.json") == b"1"
    assert bucket.names() == ["there.json"]
    proxy.fault = times(0, REFUSED)
    assert commit(files).attempt == "f" * 12


def test_a_create_whose_answer_was_lost_is_told_from_a_lost_race(
    files: Files, proxy: Proxy, bucket: BucketRoot
) -> None:
    """The content is the same: the bytes do not tell who wrote."""

    def overtaken(request: Request) -> Answer | None:
        bucket.put("theirs.json", b"{}")
        return Answer(503, "SlowDown")

    proxy.fault = times(1, LOST, written)
    assert files.create("ours.json", b"{}")
    assert len([request for request in proxy.seen if written(request)]) == 2
    counter = itertools.count()
    proxy.fault = lambda request: overtaken(request) if written(request) and next(counter) == 0 else None
    assert not files.create("theirs.json", b"{}")


def test_an_edit_whose_answer_was_lost_counts_once_though_others_edited_since(
    files: Files, proxy: Proxy, bucket: BucketRoot
) -> None:
    """Before our call hears anything, three others count further."""

    def count(data: bytes | None) -> bytes:
        return b"%d" % (int(data or 0) + 1)

    def others_go_on(request: Request) -> Answer | None:
        if not written(request) or next(calls):
            return None
        return Answer(lose=True, then=lambda: [files.edit("there.json", count) for _ in range(3)])

    calls = itertools.count()
    proxy.fault = others_go_on
    assert files.edit("there.json", count) == b"5"
    assert bucket.get("there.json") == b"5"


def test_a_large_create_whose_last_answer_was_lost_is_ours(files: Files, proxy: Proxy, bucket: BucketRoot) -> None:
    data = bytes(101 * 2**20)
    proxy.fault = times(1, LOST, lambda request: request.method == "POST" and "uploadId" in request.path)
    assert files.create("large", data)
    assert files.size("large") == len(data)
    assert not bucket.client.list_multipart_uploads(Bucket=bucket.bucket).get("Uploads")


def test_a_whole_answer_that_breaks_off_is_read_again(files: Files, proxy: Proxy, bucket: BucketRoot) -> None:
    bucket.put("part", bytes(2**20))
    proxy.fault = times(1, Answer(truncate=True), lambda request: request.method == "GET")
    assert files.read("part") == bytes(2**20)
    assert len(proxy.seen) == 2


@pytest.mark.parametrize(
    ("header", "word"), [("if-none-match", "does not honour If-None-Match"), ("if-match", "does not honour If-Match")]
)
def test_an_endpoint_that_does_not_honour_conditions_is_refused(
    header: str, word: str, files: Files, proxy: Proxy, bucket: BucketRoot
) -> None:
    proxy.fault = times(99, Answer(drop=(header,)))
    with pytest.raises(InputError, match=word):
        prove_conditional_put(files)
    assert bucket.names() == ["there.json"]
    proxy.fault = times(0, REFUSED)
    prove_conditional_put(files)
    assert bucket.names() == ["there.json"]
    asked = len(proxy.seen)
    prove_conditional_put(files)
    assert len(proxy.seen) == asked


def test_an_endpoint_that_knows_no_conditions_is_refused(files: Files, proxy: Proxy) -> None:
    proxy.fault = times(99, Answer(501, "NotImplemented"), lambda request: "if-none-match" in request.headers)
    with pytest.raises(InputError, match="501 NotImplemented"):
        prove_conditional_put(files)


@pytest.mark.parametrize("look", [prove_conditional_put, reach])
def test_a_missing_bucket_or_server_is_refused_at_start(
    look: Callable[[Files], None], files: Files, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="has no bucket nowhere: create it"):
        look(Files("s3://nowhere/x"))
    monkeypatch.setattr(s3, "START_SECONDS", 0.3)
    proxy.hang_up()
    with pytest.raises(InputError, match="gave no good answer for 0 s"):
        look(files)


@pytest.mark.parametrize("look", [prove_conditional_put, reach])
def test_without_credentials_a_bucket_is_refused(
    look: Callable[[Files], None], files: Files, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(InputError, match="set AWS_ACCESS_KEY_ID"):
        look(files)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(InputError, match="nobody"):
        look(files)


def test_a_bucket_that_goes_away_in_the_middle_is_no_missing_file(files: Files, bucket: BucketRoot) -> None:
    bucket.remove("there.json")
    with pytest.raises(FileNotFoundError):
        files.read("there.json")
    bucket.client.delete_bucket(Bucket=bucket.bucket)
    with pytest.raises(StoreError, match="has no bucket"):
        files.read("there.json")

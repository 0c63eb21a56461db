"""Objects of a bucket as the files of an artifact root: whole reads, whole writes, conditional where two may meet.

Endpoint, credentials and region come from the usual AWS variables and profiles (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_PROFILE …). Time-outs, lost connections, 5xx, SlowDown and the like are tried
again for RETRY_SECONDS; a refusal never is. Errors raised: FileNotFoundError for a missing object, StoreError for all
else, one sentence.

A lost answer is told from a lost race by who wrote: every object carries in its metadata the tokens of its last
writers, one a call, newest first. A create or edit whose condition fails looks whether its own token is there: then
the server had done the work, and only the answer was lost on the way. An edit adds its token to those it read, so
that up to 63 later edits do not hide it.
"""

import os
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import aiohttp
import botocore.exceptions as boto
import fsspec
from botocore.parsers import ResponseParserError
from fsspec.asyn import sync

from miles_core.errors import InputError, StoreError

RETRY_SECONDS = 60.0
START_SECONDS = 10.0
CONNECT_SECONDS = 5
ANSWER_SECONDS = 20
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_WRITERS = 64
_PASSING_STATUS = {408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529}
_PASSING_CODES = {
    "BadDigest",
    "IncompleteBody",
    "InternalError",
    # What s3fs reports when it clears away a multipart upload whose completion was answered to nobody.
    "NoSuchUpload",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "XAmzContentSHA256Mismatch",
}
_NO_ANSWER = (
    boto.HTTPClientError,
    boto.ConnectionError,
    boto.IncompleteReadError,
    ResponseParserError,
    aiohttp.ClientError,
    ConnectionError,
    TimeoutError,
)
_NO_CREDENTIALS = (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError)
T = TypeVar("T")


class _ConditionFailed(Exception):
    """The object is there already, or is not the one that was read."""


@dataclass(frozen=True)
class _Found:
    data: bytes
    etag: str
    writers: tuple[str, ...]


def read(url: str) -> bytes:
    """Whole content."""
    return _get(url).data


def read_range(url: str, start: int, stop: int) -> bytes:
    """The bytes from `start` up to `stop` of an object that is longer than `start`."""
    return _get(url, Range=f"bytes={start}-{stop - 1}").data


def size(url: str) -> int:
    """Bytes."""
    return int(_retried(url, "read", lambda: _call("head_object", url))["ContentLength"])


def names(url: str, seconds: float | None = None) -> list[str]:
    """Names directly under a prefix, objects and folders; empty where there is none. Tries for `seconds`."""
    bucket, key = _split(url)
    prefix = f"{key}/" if key else ""
    found: list[str] = []
    more: dict[str, str] = {}
    while True:
        page = _retried(
            url,
            "listed",
            lambda: _client().call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, Delimiter="/", **more),  # noqa: B023
            seconds,
        )
        found += [entry["Key"].removeprefix(prefix) for entry in page.get("Contents", [])]
        found += [entry["Prefix"].removeprefix(prefix).rstrip("/") for entry in page.get("CommonPrefixes", [])]
        if not page.get("IsTruncated"):
            return found
        more = {"ContinuationToken": page["NextContinuationToken"]}


def create(url: str, data: bytes | memoryview) -> bool:
    """Put an object that must not exist yet, also in parts; False, and nothing changed, where it exists."""
    writer = _token()
    try:
        _retried(url, "written", lambda: _put(url, data, mode="create", Metadata=_signed(writer)))
    except _ConditionFailed:
        return _is_by(url, writer)
    return True


def replace(url: str, data: bytes | memoryview) -> None:
    """Put an object whether it exists or not."""
    _retried(url, "written", lambda: _put(url, data, Metadata=_signed(_token())))


def edit(url: str, change: Callable[[bytes | None], bytes | None]) -> bytes | None:
    """Read, change and write as one step; see Files.edit. A lost race means that another's write went through, so
    that trying again comes to an end."""
    writer = _token()
    pause = _FIRST_PAUSE / 4
    while True:
        found = _get_if_any(url)
        if found and writer in found.writers:
            return found.data
        data = change(found.data if found else None)
        if data is None:
            return found.data if found else None
        condition = {"IfMatch": found.etag} if found else {"IfNoneMatch": "*"}
        metadata = _signed(writer, *(found.writers if found else ()))
        try:
            _put_if(url, data, metadata, condition)
            return data
        except (_ConditionFailed, FileNotFoundError):
            time.sleep(pause * random.random())
            pause = min(2 * pause, 1.0)


def modified(url: str) -> float:
    """When an object was written, in seconds since 1970."""
    return float(_retried(url, "read", lambda: _call("head_object", url))["LastModified"].timestamp())


def delete(url: str) -> None:
    """Remove an object; one that is missing is fine."""
    _retried(url, "deleted", lambda: _call("delete_object", url))


def remove_tree(url: str) -> None:
    """Remove all objects under a prefix; one under which there is none is fine."""
    while found := names(url):
        for name in found:
            below = f"{url.rstrip('/')}/{name}"
            delete(below)
            remove_tree(below)


def prove_conditional_put(root: str) -> None:
    """See to it that the endpoint keeps its word: one object is put, and neither an exclusive put nor one with
    another etag may overwrite it. Once a process. Raises InputError where they do, or where the root cannot be listed
    or written."""
    _proved(root, _variables())


@lru_cache(maxsize=16)
def _proved(root: str, variables: tuple[tuple[str, str], ...]) -> None:
    probe = f"{root}/.probe-{_token()}"
    try:
        names(root, START_SECONDS)
        try:
            broken = _broken_promise(probe)
        finally:
            delete(probe)
    except StoreError as fault:
        raise InputError(str(fault)) from fault
    if broken:
        raise InputError(
            f"--artifact-root {root}: {_endpoint()} does not honour {broken}, and two commands could overwrite each "
            "other's work: use an S3 server that does, or a local folder"
        )


def reach(root: str) -> None:
    """See to it that the root can be listed. Raises InputError."""
    try:
        names(root, START_SECONDS)
    except StoreError as fault:
        raise InputError(str(fault)) from fault


def _broken_promise(probe: str) -> str | None:
    if not create(probe, b"1") or create(probe, b"2"):
        return "If-None-Match"
    try:
        _put_if(probe, b"3", _signed(_token()), {"IfMatch": f'"{"0" * 32}"'})
    except _ConditionFailed:
        return None
    return "If-Match"


def _client() -> Any:
    return _connected(os.getpid(), _variables())


def _variables() -> tuple[tuple[str, str], ...]:
    return tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith("AWS_")))


@lru_cache(maxsize=4)
def _connected(process: int, variables: tuple[tuple[str, str], ...]) -> Any:
    """One client a process, for all its threads; a child makes its own. Tries once: trying again is done here."""
    region = dict(variables).get("AWS_REGION")
    client = fsspec.filesystem(
        "s3",
        skip_instance_cache=True,
        use_listings_cache=False,
        client_kwargs={"region_name": region} if region else {},
        config_kwargs={
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": ANSWER_SECONDS,
            "retries": {"total_max_attempts": 1},
        },
    )
    client.retries = 1
    return client


def _call(method: str, url: str, **arguments: Any) -> Any:
    bucket, key = _split(url)
    return _client().call_s3(method, Bucket=bucket, Key=key, **arguments)


def _put(url: str, data: bytes | memoryview, **arguments: Any) -> None:
    _client().pipe_file(url, bytes(data), **arguments)


def _put_if(url: str, data: bytes, metadata: dict[str, str], condition: dict[str, str]) -> None:
    _retried(url, "written", lambda: _call("put_object", url, Body=data, Metadata=metadata, **condition))


def _get(url: str, **arguments: str) -> _Found:
    client = _client()
    return _retried(url, "read", lambda: sync(client.loop, _fetch, client, *_split(url), **arguments))


async def _fetch(client: Any, bucket: str, key: str, **arguments: str) -> _Found:
    answer = await client._call_s3("get_object", Bucket=bucket, Key=key, **arguments)
    async with answer["Body"] as body:
        data = await body.read()
    return _Found(data, answer["ETag"], _writers(answer))


def _get_if_any(url: str) -> _Found | None:
    try:
        return _get(url)
    except FileNotFoundError:
        return None


def _is_by(url: str, writer: str) -> bool:
    try:
        return writer in _writers(_retried(url, "read", lambda: _call("head_object", url)))
    except FileNotFoundError:
        return False


def _token() -> str:
    return secrets.token_hex(8)


def _signed(*writers: str) -> dict[str, str]:
    return {"writers": ",".join(writers[:_WRITERS])}


def _writers(answer: dict[str, Any]) -> tuple[str, ...]:
    return tuple(answer["Metadata"].get("writers", "").split(","))


def _split(url: str) -> tuple[str, str]:
    bucket, _, key = url.removeprefix("s3://").partition("/")
    return bucket, key.rstrip("/")


def _endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "AWS"


def _retried(url: str, done: str, attempt: Callable[[], T], seconds: float | None = None) -> T:
    """Try until it works, is refused, or `seconds` (RETRY_SECONDS) are over. `done` says what, in an error."""
    limit = RETRY_SECONDS if seconds is None else seconds
    deadline, pause = time.monotonic() + limit, _FIRST_PAUSE
    while True:
        try:
            return attempt()
        except Exception as fault:
            if not _passing(fault):
                raise _told(fault, url, done) from fault
            if time.monotonic() + pause > deadline:
                raise StoreError(
                    f"{url} cannot be {done}: {_endpoint()} gave no good answer for {limit:.0f} s ({_text(fault)}): see "
                    "whether it is up and AWS_ENDPOINT_URL is right"
                ) from fault
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, _LONGEST_PAUSE)


def _passing(fault: Exception) -> bool:
    """Whether the same call may work a moment later."""
    status, code, _ = _answer(fault)
    if status:
        return status in _PASSING_STATUS or code in _PASSING_CODES
    return isinstance(fault, _NO_ANSWER) and not isinstance(fault, boto.SSLError)


def _told(fault: Exception, url: str, done: str) -> Exception:
    """The error that a caller sees."""
    status, code, message = _answer(fault)
    bucket, _ = _split(url)
    if status == 412:
        return _ConditionFailed(url)
    if code == "NoSuchBucket":
        return StoreError(f"{url}: {_endpoint()} has no bucket {bucket}: create it, or give another --artifact-root")
    if status == 404:
        return FileNotFoundError(url)
    if status:
        return StoreError(
            f"{url} cannot be {done}: {_endpoint()} answers {status} {code} ({message}): give credentials that may, by "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or by AWS_PROFILE"
        )
    if isinstance(fault, _NO_CREDENTIALS):
        return StoreError(
            f"{url} cannot be {done}: {_text(fault)}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        )
    if isinstance(fault, (boto.BotoCoreError, OSError, ValueError)):
        return StoreError(f"{url} cannot be {done}: {_text(fault)}: set the AWS variables right")
    return fault


def _answer(fault: Exception) -> tuple[int, str, str]:
    """HTTP status, S3 code and message of a server's answer; 0 and nothing where there was none."""
    error = fault if isinstance(fault, boto.ClientError) else fault.__cause__
    if not isinstance(error, boto.ClientError):
        return 0, "", ""
    said = error.response.get("Error", {})
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return int(status), str(said.get("Code", "")), " ".join(str(said.get("Message", "")).split())


def _text(fault: Exception) -> str:
    return " ".join(str(fault).split()).rstrip(".") or type(fault).__name__

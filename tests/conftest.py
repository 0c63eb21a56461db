"""Artifact roots for tests: a local folder, and a bucket of a real S3-protocol server."""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from roots import BucketRoot, FolderRoot, Root
from s3_proxy import Proxy
from s3_server import KEYS, client, s3_server

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def s3_address() -> Iterator[str]:
    """The S3 server of this session."""
    with s3_server() as address:
        yield address


@pytest.fixture
def bucket(s3_address: str, monkeypatch: pytest.MonkeyPatch) -> BucketRoot:
    """A new bucket, and this process's AWS variables set to it."""
    for name, value in (KEYS | {"AWS_ENDPOINT_URL": s3_address}).items():
        monkeypatch.setenv(name, value)
    other = client(s3_address)
    name = f"bucket-{next(_NUMBERS)}"
    other.create_bucket(Bucket=name)
    return BucketRoot(name, "runs", other)


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    """An empty artifact root of each kind."""
    if request.param == "local":
        return FolderRoot(tmp_path)
    made: BucketRoot = request.getfixturevalue("bucket")
    return made


@pytest.fixture
def proxy(bucket: BucketRoot, s3_address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy in front of the server, in this process's AWS variables; the bucket stands behind it."""
    with Proxy(s3_address).running() as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
        yield made

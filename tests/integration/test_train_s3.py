"""A run whose artifacts lie in a bucket of a real S3-protocol server, from the command line."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from roots import BucketRoot
from s3_proxy import Answer, Proxy, Request
from s3_server import KEYS

from miles_core.store.files import Files
from miles_core.store.run_store import RunStore
from miles_core.store.stages import ITERATION_STAGES

pytestmark = pytest.mark.integration
TRAIN = ("train", "tiny", "--num-rollout", "1")


@dataclass(frozen=True)
class Place:
    """A user's home for miles, with the AWS variables that the user set."""

    home: Path
    variables: dict[str, str]

    def miles(self, *arguments: str, code: int = 0) -> str:
        """Run a command to its end; its whole output. Fails the test on another exit code."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MILES_", "RAY_", "AWS_"))}
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli.main", *arguments],
            env=kept | {"MILES_HOME": str(self.home), "PYTHONUNBUFFERED": "1"} | self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == code, done.stdout
        return done.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("home")
    yield folder
    Place(folder, {}).miles("down")


@pytest.fixture
def place(home: Path, bucket: BucketRoot, s3_address: str) -> Place:
    return Place(home, KEYS | {"AWS_ENDPOINT_URL": s3_address, "AWS_EC2_METADATA_DISABLED": "true"})


def digests(files: Files) -> dict[str, str]:
    store = RunStore(files, "tiny")
    line = {stage: store.on_line(stage, 0) for stage in ITERATION_STAGES}
    return {stage: manifest.content_digest for stage, manifest in line.items() if manifest}


def held(bucket: BucketRoot) -> dict[str, str]:
    """Digest of each object but those that count the commands of a run: its record without the epoch, no lock."""
    data = {name: bucket.get(name) for name in bucket.names() if not name.endswith("lock.json")}
    record = json.loads(data["tiny/run.json"])
    data["tiny/run.json"] = json.dumps(record | {"epoch": None}).encode()
    return {name: hashlib.sha256(content).hexdigest() for name, content in data.items()}


@pytest.mark.timeout(1500)
def test_a_run_in_a_bucket_is_a_local_run_and_goes_on_after_a_refusal_in_the_middle(
    place: Place, home: Path, bucket: BucketRoot, proxy: Proxy
) -> None:
    """Writes are refused from the second rollout part on; then the same command resumes; then all is reused."""
    root = ("--artifact-root", bucket.files.root)
    behind = replace(place, variables=place.variables | {"AWS_ENDPOINT_URL": proxy.url})

    def refuse_later_parts(request: Request) -> Answer | None:
        part = request.method == "PUT" and "stage%3Drollout" in request.path.replace("=", "%3D")
        return (
            Answer(403, "AccessDenied")
            if part and "/data/" in request.path and "00000000" not in request.path
            else None
        )

    proxy.fault = refuse_later_parts
    output = behind.miles(*TRAIN, *root, code=1)
    assert "Traceback" not in output
    last = output.rstrip().splitlines()[-1]
    assert last.startswith("miles: s3://") and "403 AccessDenied" in last and last.endswith("again to resume"), output
    kept = [name for name in bucket.names() if "stage=rollout" in name]
    assert kept and not any(name.endswith("manifest.json") for name in kept)

    proxy.fault = lambda request: None
    output = behind.miles(*TRAIN, *root)
    assert f"artifacts {bucket.files.root}/tiny" in output
    assert set(kept) <= set(bucket.names())
    place.miles(*TRAIN)
    made = digests(bucket.files)
    assert set(made) == set(ITERATION_STAGES)
    assert made == digests(Files(str(home / "artifacts")))

    before = held(bucket)
    output = place.miles(*TRAIN, *root)
    assert output.count(": reused") == 1 and "computed " not in output
    assert held(bucket) == before
    assert "rollout" in place.miles("show", "tiny", "0", *root)
    assert "tiny" in place.miles("runs", *root)
    assert "computed" in place.miles("rerun", "tiny", "0", "advantages", "--globalize-reward-mean", *root)


def refused(place: Place, *arguments: str) -> str:
    output = place.miles(*arguments, code=2)
    assert output.startswith("miles: ") and output.count("\n") == 1, output
    return output


@pytest.mark.parametrize("command", [TRAIN, ("rerun", "tiny", "0", "rewards"), ("show", "tiny"), ("runs",)])
def test_a_missing_bucket_is_refused_and_nothing_is_started(place: Place, tmp_path: Path, command: tuple[str]) -> None:
    fresh = replace(place, home=tmp_path / "fresh")
    assert "no bucket nowhere: create it" in refused(fresh, *command, "--artifact-root", "s3://nowhere/x")
    assert not fresh.home.exists()


@pytest.mark.parametrize("command", [TRAIN, ("show", "tiny")])
def test_wrong_credentials_are_refused_and_nothing_is_started(
    place: Place, tmp_path: Path, bucket: BucketRoot, proxy: Proxy, command: tuple[str]
) -> None:
    fresh = replace(place, home=tmp_path / "fresh", variables=place.variables | {"AWS_ENDPOINT_URL": proxy.url})
    proxy.fault = lambda request: Answer(403, "InvalidAccessKeyId")
    output = refused(fresh, *command, "--artifact-root", bucket.files.root)
    assert "403 InvalidAccessKeyId" in output and "AWS_ACCESS_KEY_ID" in output
    assert len(proxy.seen) == 1
    assert not fresh.home.exists()
    assert bucket.names() == []

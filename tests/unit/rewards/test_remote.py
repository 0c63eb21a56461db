"""rm_type remote_rm against real HTTP servers: what is sent, what comes of answers, refusals, silence and nonsense."""

import base64
import io
import json
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))

from test_reward_worker import ARGS, noise, png, rollout_part

from deployments.recipes import recipe
from miles_core.errors import InputError, StageError
from miles_core.pipeline.inputs import resolve_inputs
from miles_core.rewards import remote
from miles_core.rewards.worker import RewardWorker
from miles_core.store.files import Files
from miles_core.store.parts import read_table

IMAGES = [png(noise(i)) for i in range(4)]
Answer = Callable[[dict[str, Any], int], tuple[int, Any, dict[str, str]]]


class Service:
    """A server whose answers are a function of the request and of how many came before."""

    def __init__(self, answer: Answer) -> None:
        self.asked: list[dict[str, Any]] = []
        self.at_once = self.most = 0
        lock = threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with lock:
                    service.asked.append(body)
                    number = len(service.asked)
                    service.at_once += 1
                    service.most = max(service.most, service.at_once)
                status, told, headers = answer(body, number)
                with lock:
                    service.at_once -= 1
                data = told if isinstance(told, bytes) else json.dumps(told).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/score"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], Service]]:
    started: list[Service] = []

    def start(answer: Answer) -> Service:
        started.append(Service(answer))
        return started[-1]

    yield start
    for service in started:
        service.stop()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)


def good(body: dict[str, Any], number: int) -> tuple[int, Any, dict[str, str]]:
    return 200, {"rewards": [s["sample_index"] / 10 for s in body["samples"]], "version": "v7"}, {}


def scored(folder: Path, url: str, **args: Any) -> list[dict[str, Any]]:
    given = ARGS | {"rm_type": "remote_rm", "rm_url": url, "remote_rm_batch_size": 2, "remote_rm_concurrency": 2}
    files = Files(str(folder / "store"))
    part = rollout_part(files, IMAGES)
    worker = RewardWorker(given | {"remote_rm_timeout": 5.0} | args, name="w")
    made = worker.score(files, part, "rewards/0.parquet", ["remote_rm"], dict.fromkeys(range(20, 24)))
    return read_table(files, made).to_pylist()


def test_the_service_gets_the_images_and_its_numbers_are_the_rewards(tmp_path: Path, serve: Any) -> None:
    service = serve(good)
    rows = scored(tmp_path, service.url)
    assert [row["reward"] for row in rows] == [row["score_remote_rm"] for row in rows] == [2.0, 2.1, 2.2, 2.3]
    assert {(row["rm_type"], row["rm_version"], row["tries"]) for row in rows} == {("remote_rm", "remote_rm:v7", 1)}
    sent = {s["sample_index"]: s for body in service.asked for s in body["samples"]}
    assert sorted(len(body["samples"]) for body in service.asked) == [2, 2] and sorted(sent) == [20, 21, 22, 23]
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(sent[21]["image"]))))
    assert np.array_equal(pixels, np.asarray(Image.open(io.BytesIO(IMAGES[1]))))
    assert {"group_index", "prompt", "seed", "metadata"} < set(sent[20])


def test_no_more_requests_at_once_than_the_option_says(tmp_path: Path, serve: Any) -> None:
    def slow(body: dict[str, Any], number: int) -> tuple[int, Any, dict[str, str]]:
        time.sleep(0.1)
        return good(body, number)

    for allowed in (1, 3):
        service = serve(slow)
        (tmp_path / str(allowed)).mkdir()
        scored(tmp_path / str(allowed), service.url, remote_rm_batch_size=1, remote_rm_concurrency=allowed)
        assert service.most == allowed


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_service_that_is_busy_is_asked_again(tmp_path: Path, serve: Any, status: int) -> None:
    service = serve(lambda body, number: good(body, number) if number > 1 else (status, "later", {"retry-after": "0"}))
    rows = scored(tmp_path, service.url, remote_rm_batch_size=4)
    assert {row["tries"] for row in rows} == {2} and len(service.asked) == 2


def test_it_waits_as_long_as_the_service_says_and_twice_as_long_each_time_otherwise() -> None:
    assert remote._wait(1, remote.Unavailable("", "7")) == 7.0
    assert [remote._wait(n, OSError()) / remote.FIRST_WAIT for n in (1, 2, 3)] == [1, 2, 4]
    assert remote._wait(40, OSError()) == remote.LONGEST_WAIT == remote._wait(1, remote.Unavailable("", "900"))


FAULTS: dict[str, tuple[Answer, str, int]] = {
    "refuses": (lambda b, n: (401, b"who are you?", {}), "it answered 401: who are you?", 1),
    "elsewhere": (lambda b, n: (302, "", {"location": "http://elsewhere/"}), "it answered 302", 1),
    "broken": (lambda b, n: (500, b"oops", {}), "in each of 2 tries: Unavailable: it answered 500: oops", 2),
    "no JSON": (lambda b, n: (200, b"<html>", {}), "in each of 2 tries: JSONDecodeError", 2),
    "a list": (lambda b, n: (200, [1.0] * 4, {}), "it returned no list of rewards for 4 samples", 2),
    "too few": (lambda b, n: (200, {"rewards": [1.0]}, {}), "it returned 1 rewards for 4 samples", 2),
    "words": (lambda b, n: (200, {"rewards": [1, 2, "good", 4]}, {}), "returned 'good' for sample 22", 2),
    "true": (lambda b, n: (200, {"rewards": [1, 2, True, 4]}, {}), "returned True for sample 22", 2),
    "NaN": (lambda b, n: (200, b'{"rewards": [1, NaN, 3, 4]}', {}), "returned nan for sample 21", 2),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_no_reward_is_an_error_that_names_service_and_samples(tmp_path: Path, serve: Any, name: str) -> None:
    answer, words, asked = FAULTS[name]
    service = serve(answer)
    with pytest.raises(StageError) as caught:
        scored(tmp_path, service.url, remote_rm_batch_size=4, reward_max_retries=1)
    assert f"the reward service {service.url} failed on samples 20 to 23" in str(caught.value)
    assert words in str(caught.value) and len(service.asked) == asked
    assert not (tmp_path / "store/rewards").exists()


def test_a_service_that_is_silent_or_not_there_is_an_error_too(tmp_path: Path, serve: Any) -> None:
    silent = serve(lambda body, number: (time.sleep(2), good(body, number))[1])
    with pytest.raises(StageError, match="ReadTimeout"):
        scored(tmp_path, silent.url, remote_rm_timeout=0.2, reward_max_retries=0)
    (tmp_path / "other").mkdir()
    with pytest.raises(StageError, match="ConnectError"):
        scored(tmp_path / "other", "http://127.0.0.1:1/score", reward_max_retries=0)


@pytest.mark.parametrize(
    ("url", "words"), [(None, "give --rm-url"), ("localhost:80/x", "no http"), ("ftp://x/y", "no http")]
)
def test_its_address_is_checked_before_a_run_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str | None, words: str
) -> None:
    monkeypatch.setenv("MILES_HOME", str(tmp_path))
    asked = recipe("tiny-ocr").replace(rm_type="remote_rm", prompt_data="tiny", rm_url=url)
    with pytest.raises(InputError, match=words):
        resolve_inputs(asked)
    assert resolve_inputs(asked.replace(rm_url="http://x/y")).components == ("remote_rm",)


def test_the_documented_server_answers(tmp_path: Path) -> None:
    path = Path(__file__).parents[3] / "docs/examples/reward_server.py"
    example = SimpleNamespace(**runpy.run_path(str(path)))
    server = ThreadingHTTPServer(("127.0.0.1", 0), example.Score)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        rows = scored(tmp_path, f"http://127.0.0.1:{server.server_port}/score")
    finally:
        server.shutdown()
        server.server_close()
    bright = [np.asarray(Image.open(io.BytesIO(image)).convert("RGB")).mean() / 255 for image in IMAGES]
    assert [row["reward"] for row in rows] == pytest.approx(bright, abs=1e-6)
    assert {row["rm_version"] for row in rows} == {"remote_rm:brightness-1"}

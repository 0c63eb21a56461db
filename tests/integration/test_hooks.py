"""A user's own functions in a run: the reference's worked example against a real HTTP server, from outside the repository."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from commands import Place

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

PROJECT = """
import base64, io

import aiohttp
from PIL import Image

from miles.rollout.rm_hub.pickscore import _sample_to_rgb_hwc_uint8_frames
from miles.utils.types import Sample


async def api_rm(args, samples: list[Sample], **kwargs) -> list[float]:
    async with aiohttp.ClientSession() as session:
        rewards = []
        for sample in samples:
            buffer = io.BytesIO()
            Image.fromarray(_sample_to_rgb_hwc_uint8_frames(sample)[0]).save(buffer, format="PNG")
            payload = {"prompt": sample.prompt, "image_b64": base64.b64encode(buffer.getvalue()).decode()}
            async with session.post(args.rm_url, json=payload) as resp:
                resp.raise_for_status()
                rewards.append((await resp.json())["score"])
        return rewards
"""
NORMALIZE = """
def normalize(args, samples):
    raw = [sample.reward for sample in samples]
    return raw, [reward - 100.0 for reward in raw]


def without_the_first(args, data):
    for group in data:
        assert all(sample.prompt == group[0].prompt != "" for sample in group)
        group[0].remove_sample = True
"""


class Scoring(BaseHTTPRequestHandler):
    """Scores by the length of what it gets; `away` answers 503."""

    away = False

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"score": len(body["image_b64"]) / 1000}).encode()
        self.send_response(503 if Scoring.away else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scoring)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/score"
    server.shutdown()


def rows(place: Place, run: str, stage: Any) -> list[dict[str, Any]]:
    manifest = place.on_line(run, 0, stage)
    found = [row for part in manifest.data for row in pq.read_table(f"{place.artifacts}/{part.path}").to_pylist()]
    return sorted(found, key=lambda row: row["sample_index"])


def test_the_worked_example(place: Place, service: str, tmp_path: Path) -> None:
    """A reward behind HTTP and a normalization of one's own; a service that is away costs nothing that was made; a changed
    helper is another reward, which is refused under the run's name."""
    project = tmp_path / "my_project"
    project.mkdir()
    (project / "__init__.py").write_text("")
    (project / "rewards.py").write_text(PROJECT)
    (project / "advantages.py").write_text(NORMALIZE)
    words = [
        *("--code-path", str(tmp_path), "--num-rollout", "1", "--run-id", "hooked"),
        *("--custom-rm-path", "my_project.rewards.api_rm", "--rm-url", service),
        *("--custom-reward-post-process-path", "my_project.advantages.normalize"),
        *("--rollout-sample-filter-path", "my_project.advantages.without_the_first"),
    ]
    Scoring.away = True
    said = place.miles("train", "tiny", *words, code=1)
    assert "--custom-rm-path my_project.rewards.api_rm failed on samples" in said and "503" in said
    rollout = place.on_line("hooked", 0, "rollout")
    Scoring.away = False
    place.miles("train", "tiny", *words)
    assert place.on_line("hooked", 0, "rollout") == rollout
    rewards, advantages = rows(place, "hooked", "rewards"), rows(place, "hooked", "advantages")
    assert {row["rm_type"] for row in rewards} == {"custom"} and len({row["reward"] for row in rewards}) > 8
    assert [row["advantage"] for row in advantages] == [row["reward"] - 100.0 for row in rewards]
    groups = {row["group_index"] for row in advantages}
    removed = [row["sample_index"] for row in advantages if row["remove_sample"]]
    assert removed == [min(r["sample_index"] for r in advantages if r["group_index"] == g) for g in sorted(groups)]
    (update,) = {row["samples"] for row in rows_of_update(place)}
    assert update == (len(advantages) - len(removed)) // 2
    (project / "advantages.py").write_text(NORMALIZE.replace("100.0", "50.0"))
    said = place.miles("train", "tiny", *words, code=2)
    assert "custom_reward_post_process_path has another content" in said
    place.miles("rerun", "hooked", "0", "rewards", "--rm-type", "jpeg_compressibility", code=2)


def rows_of_update(place: Place) -> list[dict[str, Any]]:
    manifest = place.on_line("hooked", 0, "update")
    return [row for part in manifest.data for row in pq.read_table(f"{place.artifacts}/{part.path}").to_pylist()]

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


def rows_of_update(place: Place, run: str = "hooked") -> list[dict[str, Any]]:
    manifest = place.on_line(run, 0, "update")
    return [row for part in manifest.data for row in pq.read_table(f"{place.artifacts}/{part.path}").to_pylist()]


TRAINING = """
import torch

from miles.backends.fsdp_utils.loss_hub.flow_grpo import prepare_flow_grpo_batch
from miles.rollout.sglang_diffusion_rollout import generate_microgroup


async def without_guidance(args, microgroup, sampling_params):
    return await generate_microgroup(args, microgroup, sampling_params | {"guidance_scale": 1.0, "negative_prompt": None})


def two_steps(args, sample, num_steps, seed):
    assert sample.prompt and num_steps == args.diffusion_num_steps
    return [0, 1 + seed % (num_steps - 2)], None


def convert(args, samples):
    pairs = {"sample_index": [], "step": [], "advantage": [], "weight": []}
    for sample in samples:
        assert len(sample.sde_step_indices) == 2 and len(sample.log_probs) == args.diffusion_num_steps
        if sample.index % 2:
            pairs["sample_index"].append(sample.index)
            pairs["step"].append(sample.sde_step_indices[-1])
            pairs["advantage"].append(sample.reward)
            pairs["weight"].append(0.5)
    return pairs


def prepare(ctx, batch, *, pad_to_len=None):
    return prepare_flow_grpo_batch(ctx, batch, pad_to_len=pad_to_len)


def toward_the_next(ctx, batch, prepared, *, new_pred, ref_pred, metrics, **kwargs):
    distance = ((new_pred - batch["next_latents"]) ** 2).flatten(1).mean(1)
    metrics["distance"] = distance.sum()
    return (batch["weight"] * batch["advantage"] * distance).sum()
"""


def test_a_training_on_functions_of_ones_own(place: Place, tmp_path: Path) -> None:
    """Own steps, own train pairs, own loss, on two ranks; a rerun of update finds the committed pairs; a changed constant of the
    loss is another run."""
    (tmp_path / "mine.py").write_text(TRAINING)
    words = [
        *("--code-path", str(tmp_path), "--num-rollout", "1", "--run-id", "own", "--loss-type", "custom_loss"),
        *("--diffusion-step-strategy-path", "mine.two_steps", "--actor-num-gpus-per-node", "2"),
        *("--custom-convert-samples-to-train-data-path", "mine.convert"),
        *("--custom-generate-function-path", "mine.without_guidance"),
        *("--custom-prepare-train-batch-path", "mine.prepare"),
        *("--custom-loss-function-path", "mine.toward_the_next"),
    ]
    said = place.miles("train", "tiny", *words)
    assert "train/distance=" in said and "train/policy_loss" not in said
    rollout, advantages = rows(place, "own", "rollout"), rows(place, "own", "advantages")
    assert {row["guidance_scale"] for row in rollout} == {1.0}
    assert {tuple(row["sde_step_indices"]) for row in rollout} == {tuple(rollout[0]["sde_step_indices"])}
    assert [row["remove_sample"] for row in advantages] == [row["sample_index"] % 2 == 0 for row in advantages]
    assert [row["advantage"] for row in advantages] == [
        row["raw_reward"] if row["sample_index"] % 2 else 0.0 for row in advantages
    ]
    update = rows_of_update(place, "own")
    assert sum(row["pairs"] for row in update) == len(advantages) / 2 and all(
        row["metric_distance"] > 0 for row in update
    )
    made = place.on_line("own", 0, "update")
    said = place.miles("rerun", "own", "0", "update", "--force")
    assert "identical" in said
    assert place.on_line("own", 0, "update") == made
    (tmp_path / "mine.py").write_text(TRAINING.replace("distance).sum()\n", "distance).sum() * 2\n"))
    said = place.miles("train", "tiny", *words, code=2)
    assert "custom_loss_function_path has another content" in said

"""A checkpoint that reads short texts, and the server that can do so in part only (FACTS 2)."""

import json
import shutil
from pathlib import Path

import pytest

from deployments.recipes import recipe
from miles_core.errors import InputError
from miles_core.pipeline.inputs import resolve_inputs
from miles_core.rollout.protocol import GenerateRequest
from miles_core.rollout.sglang.answers import body_of
from miles_core.rollout.sglang.texts import text_tokens
from miles_core.words import CHECKPOINT


def copy(folder: Path, **lengths: int) -> Path:
    """The packaged checkpoint's tokenizers with other lengths."""
    for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):
        shutil.copytree(CHECKPOINT / name, folder / name)
        path = folder / name / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": lengths.get(name, 24)}))
    return folder


def test_the_published_lengths_need_nothing(tmp_path: Path):
    longer = copy(tmp_path, tokenizer=77, tokenizer_2=77, tokenizer_3=512)
    assert text_tokens(longer, "sd3", guided=True) is None


def test_a_shorter_length_is_said_with_the_request(tmp_path: Path):
    assert text_tokens(CHECKPOINT, "sd3", guided=False) == 24
    request = GenerateRequest("a", None, 1, 1, 64, 64, 4, 1.0, "ode", 0.0, False, None, "cpu")
    assert body_of(request, text_tokens=24)["extra_sampling_params"] == {"max_sequence_length": 24}
    assert body_of(request)["extra_sampling_params"] is None


def test_lengths_that_differ_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"reads 24 \(tokenizer\), 24 \(tokenizer_2\), 64 \(tokenizer_3\) tokens"):
        text_tokens(copy(tmp_path, tokenizer_3=64), "sd3", guided=False)


def test_guidance_is_refused_before_a_run_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("MILES_HOME", str(tmp_path))
    served = recipe("tiny-ocr").replace(rollout_engine="sglang")
    assert resolve_inputs(served).checkpoint == CHECKPOINT
    with pytest.raises(InputError, match="--diffusion-guidance-scale 1"):
        resolve_inputs(served.replace(diffusion_guidance_scale=2.0))
    assert resolve_inputs(recipe("tiny-ocr").replace(diffusion_guidance_scale=2.0))

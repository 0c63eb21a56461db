"""PickScore by its formula, on a tiny random CLIP made by code: an image with its own prompt, in batches."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))

from test_reward_worker import ARGS, noise, png, rollout_part

from miles_core.errors import InputError, StageError
from miles_core.families.tiny_clip import make_tiny_clip
from miles_core.rewards.pickscore import PickScorer
from miles_core.rewards.pickscore_models import PickFolders, pick_folders
from miles_core.rewards.worker import RewardWorker
from miles_core.store.files import Files
from miles_core.store.parts import read_table

PROMPTS = ["a cat", "a much longer prompt about two dogs", 'a sign that says "HELLO"', "x"]
IMAGES = [noise(seed) for seed in range(4)]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_clip(tmp_path_factory.mktemp("clip") / "clip")


@pytest.fixture(scope="module")
def folders(clip: Path) -> PickFolders:
    return pick_folders(str(clip), str(clip))


@pytest.fixture(scope="module")
def scorer(folders: PickFolders) -> PickScorer:
    return PickScorer(folders)


@torch.no_grad()
def reference(clip: Path, image: np.ndarray, prompt: str) -> float:
    """exp(logit_scale) * cos / 26 in float64, from the model's parts."""
    from transformers import CLIPModel, CLIPProcessor

    model, processor = CLIPModel.from_pretrained(clip).double().eval(), CLIPProcessor.from_pretrained(clip)
    pixels = processor(images=Image.fromarray(image), return_tensors="pt")["pixel_values"].double()
    tokens = processor(text=[prompt], return_tensors="pt")
    seen = model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output)
    read = model.text_projection(model.text_model(**tokens).pooler_output)
    return float(model.logit_scale.exp() * torch.nn.functional.cosine_similarity(seen, read)[0] / 26)


def test_the_formula(clip: Path, scorer: PickScorer) -> None:
    found = scorer.scores(IMAGES, PROMPTS)
    wanted = [reference(clip, image, prompt) for image, prompt in zip(IMAGES, PROMPTS, strict=True)]
    assert found == pytest.approx(wanted, abs=2e-6)
    assert len({round(value, 4) for value in found}) == 4


def test_n_images_get_n_scores_each_of_its_own_prompt(scorer: PickScorer) -> None:
    """(pitfall 22)"""
    together = scorer.scores(IMAGES, PROMPTS)
    alone = [scorer.scores([image], [prompt])[0] for image, prompt in zip(IMAGES, PROMPTS, strict=True)]
    assert together == pytest.approx(alone, abs=2e-6)
    turned = scorer.scores(IMAGES, [*PROMPTS[1:], PROMPTS[0]])
    assert max(abs(a - b) for a, b in zip(together, turned, strict=True)) > 1e-3


@pytest.mark.parametrize("size", [1, 3, 8])
def test_through_the_worker_in_batches_beside_another_scorer(tmp_path: Path, folders: PickFolders, size: int) -> None:
    args: dict[str, Any] = ARGS | {"rm_type": "pickscore", "pickscore_batch_size": size}
    files = Files(str(tmp_path))
    part = rollout_part(files, [png(image) for image in IMAGES])
    own: dict[int, dict[str, str] | None] = {
        20: None,
        21: {"rm_type": "jpeg_incompressibility"},
        22: None,
        23: {"rm_type": "pickscore"},
    }
    worker = RewardWorker(args, name="w", pickscore=folders)
    worker.warm_up()
    components = ["jpeg_incompressibility", "pickscore"]
    rows = read_table(files, worker.score(files, part, "rewards/0.parquet", components, own)).to_pylist()
    assert [row["rm_type"] for row in rows] == ["pickscore", "jpeg_incompressibility", "pickscore", "pickscore"]
    expected = PickScorer(folders).scores([IMAGES[i] for i in (0, 2, 3)], [f'a sign "W{i}"' for i in (0, 2, 3)])
    found = [row["score_pickscore"] for row in rows if row["rm_type"] == "pickscore"]
    assert found == pytest.approx(expected, abs=2e-6)
    assert rows[0]["rm_version"] == f"pickscore-1:{folders.digest[:12]}"


def test_the_digest_is_of_weights_and_processor(clip: Path, tmp_path: Path, folders: PickFolders) -> None:
    other = make_tiny_clip(tmp_path / "other", seed=1)
    assert pick_folders(str(clip), str(other)).digest == folders.digest
    assert pick_folders(str(other), str(clip)).digest != folders.digest
    (settings,) = other.glob("*processor_config.json")
    settings.write_text(settings.read_text() + " ")
    assert pick_folders(str(clip), str(other)).digest != folders.digest


def test_folders_that_are_none(clip: Path, tmp_path: Path) -> None:
    for model, processor, words in (
        (None, str(clip), "needs --pickscore-model-path"),
        (str(clip), None, "needs --pickscore-processor-path"),
        ("yuvalkirstain/PickScore_v1", str(clip), "--pickscore-model-path yuvalkirstain/PickScore_v1 is not a folder"),
        (str(tmp_path), str(clip), "holds no config.json"),
        (str(clip), str(tmp_path), "holds no *processor_config.json"),
    ):
        with pytest.raises(InputError) as caught:
            pick_folders(model, processor)
        assert words in str(caught.value)
    broken = make_tiny_clip(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(StageError, match="PickScore cannot be loaded"):
        PickScorer(pick_folders(str(broken), str(clip)))

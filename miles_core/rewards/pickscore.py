"""PickScore (Kirstain et al. 2023, arXiv 2305.01569): how well a CLIP that learnt from people's choices finds that an image
fits its prompt. Model and processor are folders; nothing is downloaded."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from miles_core.errors import StageError
from miles_core.rewards.pickscore_models import PickFolders

# Brings a logit, about 0 to 26, to about 0 to 1 (the reference's scale).
SCALE = 26.0
TEXT_TOKENS = 77


class PickScorer:
    """One a process. device: cpu or cuda."""

    def __init__(self, folders: PickFolders, device: str = "cpu") -> None:
        """Raises StageError where the folders cannot be loaded."""
        from transformers import AutoProcessor, CLIPModel

        try:
            self._processor: Any = AutoProcessor.from_pretrained(folders.processor, local_files_only=True)
            model = CLIPModel.from_pretrained(folders.model, local_files_only=True, use_safetensors=True)
        except Exception as fault:
            raise StageError(
                f"PickScore cannot be loaded from {folders.model} and {folders.processor}: {fault}"
            ) from fault
        self._model: Any = model.eval().to(device)
        self._device = device
        self.version = f"pickscore-1:{folders.digest[:12]}"

    @torch.no_grad()
    def scores(self, images: Sequence[np.ndarray], prompts: Sequence[str]) -> list[float]:
        """exp(logit_scale) * cos(text, image) / 26 of each (H, W, 3) uint8 image with its own prompt, as one batch."""
        pictures = self._processor(images=[Image.fromarray(image) for image in images], return_tensors="pt")
        texts = self._processor(
            text=list(prompts), padding=True, truncation=True, max_length=TEXT_TOKENS, return_tensors="pt"
        )
        image = _unit(self._model.get_image_features(**pictures.to(self._device)))
        text = _unit(self._model.get_text_features(**texts.to(self._device)))
        logits = self._model.logit_scale.exp().float() * (text * image).sum(dim=-1)
        return [float(value) for value in (logits / SCALE).cpu()]


def _unit(output: Any) -> Tensor:
    features: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return features.float() / features.float().norm(dim=-1, keepdim=True)

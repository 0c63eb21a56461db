"""OCR reward: how much of the text that the prompt asks for can be read in the image.

Semantics of the reference (flow_grpo's ocr scorer); where that one turns a fault into reward 0, here it is raised.
"""

import os

import numpy as np
from rapidfuzz.distance import Levenshtein

from miles_core.rewards.ocr_models import OcrDirs, ocr_model_name, ocr_models_digest
from miles_core.rewards.quoted import normalized


def ocr_reward(recognized: str, target: str) -> float:
    """1 - distance / len(target), in [0, 1]; both lower-case and without spaces.

    Levenshtein distance, 0 where the target is part of what was read, at most len(target). Raises ValueError
    on an empty target.
    """
    read, wanted = normalized(recognized), normalized(target)
    if not wanted:
        raise ValueError("an empty target has no OCR reward")
    if wanted in read:
        return 1.0
    return 1 - min(Levenshtein.distance(read, wanted), len(wanted)) / len(wanted)


class OcrReader:
    """PaddleOCR on onnxruntime, one thread, no download. One a process."""

    def __init__(self, det_dir: str, rec_dir: str, min_confidence: float = 0.5) -> None:
        """Lines read with less than `min_confidence` are left out. Raises InputError where a folder is no model."""
        det_name, rec_name = ocr_model_name(det_dir, "det"), ocr_model_name(rec_dir, "rec")
        os.environ.setdefault("PADDLE_PDX_DISABLE_MODEL_SOURCE_CHECK", "True")
        from paddleocr import PaddleOCR

        self.dirs = OcrDirs(det_dir, rec_dir)
        self.version = f"ocr-1:{ocr_models_digest(det_dir, rec_dir)[:12]}"
        self._ocr = PaddleOCR(
            text_detection_model_name=det_name,
            text_detection_model_dir=det_dir,
            text_recognition_model_name=rec_name,
            text_recognition_model_dir=rec_dir,
            use_doc_orientation_classify=False,
            use_doc_unwarping=False,
            use_textline_orientation=False,
            text_rec_score_thresh=min_confidence,
            device="cpu",
            engine="onnxruntime",
            engine_config={"intra_op_num_threads": 1, "inter_op_num_threads": 1},
        )

    def read(self, image: np.ndarray) -> str:
        """Text in an (H, W, 3) uint8 RGB image, lines joined in reading order; empty where there is none."""
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise ValueError(f"OCR reads (H, W, 3) uint8 images, not {image.shape} {image.dtype}")
        return "".join(self._ocr.predict(np.ascontiguousarray(image))[0]["rec_texts"])

"""OCR self-test of an installation: `python -m miles_core.rewards.self_test` reads one drawn word."""

import sys

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from miles_core.config.folders import home
from miles_core.rewards.ocr import OcrReader, ocr_reward
from miles_core.rewards.ocr_models import ocr_model_dirs


def drawn(word: str) -> np.ndarray:
    """(128, 256, 3) uint8: the word in black on white."""
    picture = Image.new("RGB", (256, 128), "white")
    ImageDraw.Draw(picture).text((24, 36), word, fill="black", font=ImageFont.load_default(size=48))
    return np.asarray(picture)


def main() -> int:
    """0 where the word is read."""
    det, rec = ocr_model_dirs(home() / "models")
    read = OcrReader(det, rec).read(drawn("MILES"))
    if ocr_reward(read, "MILES") != 1.0:
        print(f"the OCR self-test drew MILES and read {read!r}: reinstall with ./install", file=sys.stderr)
        return 1
    print(f"OCR reads {read!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

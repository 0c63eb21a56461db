"""JPEG rewards: size of the image as JPEG at quality 95, in kB of 1000 bytes (as verl's jpeg_compressibility)."""

import io

import numpy as np
from PIL import Image

JPEG_QUALITY = 95
JPEG_VERSION = f"jpeg-1:quality{JPEG_QUALITY}"


def jpeg_kilobytes(image: np.ndarray) -> float:
    """Size in kB of an (H, W, 3) uint8 RGB image as JPEG. Raises OSError where JPEG cannot hold it."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="JPEG", quality=JPEG_QUALITY)
    return len(buffer.getvalue()) / 1000


def jpeg_incompressibility(image: np.ndarray) -> float:
    """Size in kB: more for a richer image."""
    return jpeg_kilobytes(image)


def jpeg_compressibility(image: np.ndarray) -> float:
    """-kB / 500: more, up to 0, for a smoother image."""
    return -jpeg_kilobytes(image) / 500

"""A table of examples for each reward function."""

import io

import numpy as np
import pytest
from PIL import Image

from miles_core.rewards.jpeg import jpeg_compressibility, jpeg_incompressibility
from miles_core.rewards.ocr import ocr_reward


def distance(a: str, b: str) -> int:
    """Levenshtein distance by its recurrence, row by row."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        previous, row = row, [i]
        for j, y in enumerate(b, start=1):
            row.append(min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (x != y)))
    return row[-1]


class TestOcr:
    @pytest.mark.parametrize(
        ("recognized", "target", "reward"),
        [
            ("MILES", "MILES", 1.0),
            ("miles", "MiLeS", 1.0),
            ("M I LES", "MILES", 1.0),
            ("thestepgoalachieved", "Step Goal", 1.0),
            ("xxMILESyy", "MILES", 1.0),
            ("MILE", "MILES", 0.8),
            ("MILEX", "MILES", 0.8),
            ("MXLXS", "MILES", 0.6),
            ("ES", "MILES", 0.4),
            ("SELIM", "MILES", 0.2),
            ("", "MILES", 0.0),
            ("   ", "MILES", 0.0),
            ("QQQQQ", "MILES", 0.0),
            ("a whole paragraph about nothing", "MILES", 0.0),
            ("O", "A", 0.0),
        ],
    )
    def test_examples(self, recognized: str, target: str, reward: float) -> None:
        assert ocr_reward(recognized, target) == pytest.approx(reward, abs=1e-15)

    def test_against_the_formula_on_random_words(self) -> None:
        rng = np.random.default_rng(0)
        seen = set()
        for _ in range(500):
            read, wanted = ("".join(rng.choice(list("abc "), rng.integers(low, 9))) for low in (0, 1))
            a, b = read.replace(" ", ""), wanted.replace(" ", "")
            if not b:
                continue
            expected = 1.0 if b in a else 1 - min(distance(a, b), len(b)) / len(b)
            assert ocr_reward(read, wanted.upper()) == expected
            seen.add(expected)
        assert {0.0, 0.5, 1.0} < seen

    @pytest.mark.parametrize("target", ["", "  "])
    def test_an_empty_target_is_an_error_not_a_number(self, target: str) -> None:
        with pytest.raises(ValueError, match="empty target"):
            ocr_reward("MILES", target)


def images() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    ramp = np.broadcast_to(np.arange(128, dtype=np.uint8)[None, :, None], (64, 128, 3)).copy()
    return {
        "flat": np.full((64, 128, 3), 200, np.uint8),
        "ramp": ramp,
        "noise": rng.integers(0, 256, (64, 128, 3), dtype=np.uint8),
    }


def kilobytes(image: np.ndarray) -> float:
    buffer = io.BytesIO()
    Image.fromarray(image, mode="RGB").save(buffer, "JPEG", quality=95)
    return buffer.tell() / 1000


class TestJpegIncompressibility:
    @pytest.mark.parametrize("name", ["flat", "ramp", "noise"])
    def test_is_the_size_in_kilobytes_of_1000(self, name: str) -> None:
        assert jpeg_incompressibility(images()[name]) == kilobytes(images()[name])

    def test_grows_with_detail(self) -> None:
        sizes = [jpeg_incompressibility(image) for image in images().values()]
        assert 0.5 < sizes[0] < sizes[1] < sizes[2]
        assert 10 < sizes[2] < 30


class TestJpegCompressibility:
    @pytest.mark.parametrize("name", ["flat", "ramp", "noise"])
    def test_is_minus_the_size_over_500(self, name: str) -> None:
        assert jpeg_compressibility(images()[name]) == -kilobytes(images()[name]) / 500

    def test_falls_with_detail_and_is_below_zero(self) -> None:
        scores = [jpeg_compressibility(image) for image in images().values()]
        assert 0 > scores[0] > scores[1] > scores[2]

    def test_an_image_that_jpeg_cannot_hold_is_an_error(self) -> None:
        with pytest.raises(OSError, match=r"."):
            jpeg_compressibility(np.zeros((1, 65_501, 3), np.uint8))

"""A grid in images is found in their spectrum, and no other picture is taken for one."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from miles_core.observe.spectrum import grid_energy, log_power

Random = np.random.Generator
SIDE, IMAGES = 128, 16
# What the guard's default lets a grid grow by.
FACTOR = 2.0


def photo(random: Random, height: int = SIDE, width: int = SIDE) -> np.ndarray:
    """A field with the spectrum of photographs, power over frequency squared; its borders do not meet."""
    rows, columns = np.fft.fftfreq(2 * height)[:, None], np.fft.fftfreq(2 * width)[None]
    radius = np.hypot(rows, columns)
    radius[0, 0] = 1.0
    field = np.fft.ifft2(np.fft.fft2(random.standard_normal((2 * height, 2 * width))) / radius).real[:height, :width]
    return whole(128 + 48 * (field - field.mean()) / field.std())


def leaves(random: Random, height: int = SIDE, width: int = SIDE) -> np.ndarray:
    """Discs that hide each other, with a sensor's noise: edges as photographs have them."""
    picture, (rows, columns) = np.full((height, width), 128.0), np.mgrid[:height, :width]
    for _ in range(150):
        radius = min(height, width) / 2 * random.random() ** 3 + 2
        disc = (rows - random.random() * height) ** 2 + (columns - random.random() * width) ** 2 < radius**2
        picture[disc] = random.random() * 255
    return whole(picture + 2 * random.standard_normal((height, width)))


def boxes(random: Random, height: int = SIDE, width: int = SIDE) -> np.ndarray:
    """Flat boxes with upright edges and no noise at all, as a drawing has them."""
    picture = np.full((height, width), 255.0)
    for _ in range(30):
        (top, bottom), (left, right) = np.sort(random.integers(0, height, 2)), np.sort(random.integers(0, width, 2))
        picture[top:bottom, left:right] = random.integers(0, 256)
    return picture


def whole(picture: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(picture), 0, 255)


def seams(period: int, height: int = SIDE, width: int = SIDE) -> np.ndarray:
    """Lines of 1 at the borders of blocks."""
    grid = np.zeros((height, width))
    grid[::period, :] += 1
    grid[:, ::period] += 1
    return grid


def tiles(period: int) -> np.ndarray:
    """The same block everywhere, of spread 1."""
    block = np.random.default_rng(period).standard_normal((period, period))
    return np.tile((block - block.mean()) / block.std(), (SIDE // period, SIDE // period))


Kind = Callable[..., np.ndarray]
KINDS: list[Kind] = [photo, leaves, boxes]


def energies(kind: Kind, seed: int, added: np.ndarray | None = None) -> dict[int, float]:
    random = np.random.default_rng(seed)
    return grid_energy([whole(kind(random) + (0 if added is None else added)) for _ in range(IMAGES)])


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_grid_the_energy_is_about_two_and_steady(kind: Kind) -> None:
    """The guard compares means of two iterations: half of this spread is far from its factor of 2."""
    found = [energies(kind, seed) for seed in range(6)]
    for period in (8, 16):
        logs = np.log([one[period] for one in found])
        assert 1.2 < np.exp(logs.mean()) < 2.4
        assert logs.std() < 0.2 and np.ptp(logs) < math.log(FACTOR)


@pytest.mark.parametrize("period", [8, 16])
@pytest.mark.parametrize("kind", [photo, leaves])
def test_seams_of_ten_grey_levels_of_255_are_found_and_by_their_period(kind: Kind, period: int) -> None:
    """Grid artefacts on the images while the reward rises (pitfall 28)."""
    clean, with_seams = energies(kind, 1), energies(kind, 1, 10 * seams(period))
    assert with_seams[period] > FACTOR * clean[period]
    other = 24 - period
    # The lines of an 8-pixel grid are no multiples of 1/16 but of 1/8; those of a 16-pixel grid are both.
    assert period == 16 or with_seams[other] < FACTOR * clean[other]


@pytest.mark.parametrize("period", [8, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_repeats_is_found_at_three_grey_levels(kind: Kind, period: int) -> None:
    """(pitfall 28)"""
    assert energies(kind, 2, 3 * tiles(period))[period] > FACTOR * energies(kind, 2)[period]


@pytest.mark.parametrize("kind", [photo, leaves])
def test_twice_the_grid_is_more_energy(kind: Kind) -> None:
    found = [energies(kind, 3, amount * seams(8))[8] for amount in (4, 8, 16)]
    assert found == sorted(found) and found[2] > 2 * found[0]


def test_noise_blur_and_contrast_are_no_grid() -> None:
    random = np.random.default_rng(4)
    plain = [photo(random) for _ in range(IMAGES)]
    for changed in (
        [whole(p + 20 * random.standard_normal(p.shape)) for p in plain],
        [whole((p + np.roll(p, 1, 0) + np.roll(p, 1, 1) + np.roll(p, (1, 1), (0, 1))) / 4) for p in plain],
        [whole(128 + 0.3 * (p - 128)) for p in plain],
        [p[::-1, ::-1] for p in plain],
    ):
        found, before = grid_energy(changed), grid_energy(plain)
        assert all(found[period] < FACTOR * before[period] for period in (8, 16))


def test_sizes_without_room_for_a_period_leave_it_out() -> None:
    random = np.random.default_rng(5)
    assert grid_energy([photo(random, 40, 40)]).keys() == {8}
    assert grid_energy([photo(random, 64, 128)]).keys() == {8, 16}
    assert grid_energy([photo(random, 60, 60)]) == {} == grid_energy([])


def test_images_of_one_colour_have_no_grid() -> None:
    assert grid_energy([np.full((64, 64, 3), 7, np.uint8)] * 3) == {8: 1.0, 16: 1.0}


def test_the_spectrum_is_that_of_the_brightness() -> None:
    """A wave of 1/8 stands at its frequency and its mirror's, and colours count by how bright they are."""
    wave = np.tile(128 + 100 * np.cos(2 * np.pi * np.arange(64) / 8), (64, 1))
    spectrum = log_power(wave)
    assert set(zip(*np.unravel_index(np.argsort(spectrum, axis=None)[-2:], spectrum.shape), strict=True)) == {
        (0, 8),
        (0, 56),
    }
    green, blue = (log_power(np.stack([wave if i == c else np.zeros_like(wave) for i in range(3)], -1)) for c in (1, 2))
    assert green[0, 8] > blue[0, 8] + 2

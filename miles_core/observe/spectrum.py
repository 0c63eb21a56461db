"""Grid artefacts in images: a pattern that repeats every 8 or 16 pixels, as the seams of a VAE's blocks or of patches do, is
a comb of peaks in the power spectrum, at the multiples of 1/8 and 1/16 of the sampling frequency (Durall et al.,
arXiv:2003.01826, find upsampling in the spectrum)."""

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np

PERIODS = (8, 16)
_GREY = np.array([0.299, 0.587, 0.114])
# Power below that of rounding to whole numbers in 0 … 255 is none.
_ROUNDING = 1 / 12
# A grid has few strong peaks: a mean over all of them would hide it.
_STRONGEST = 4
# Closer to frequency 0 the spectrum of any image is too steep to compare neighbours, in steps of the transform.
_LOWEST = 7.5


def log_power(image: np.ndarray) -> np.ndarray:
    """(H, W) natural logarithm of the power at each frequency of an image, (H, W, 3) or (H, W) in 0 … 255, under a Hann
    window: opposite borders that do not meet stay at the lowest frequencies."""
    grey = image.astype(np.float64) @ _GREY if image.ndim == 3 else image.astype(np.float64)
    window = np.outer(*(np.hanning(side + 1)[:-1] for side in grey.shape))
    power = np.abs(np.fft.fft2((grey - grey.mean()) * window)) ** 2
    return np.asarray(np.log(power + _ROUNDING * np.sum(window**2)))


def grid_energy(images: Iterable[np.ndarray]) -> dict[int, float]:
    """How far a grid of each period (pixels) stands out of the images, all of one size: the power of its four strongest
    peaks over that of the frequencies around them, each a geometric mean; about 2 where there is no grid, since the
    strongest are chosen. Peaks of period 8 do not count for 16.

    A period that is found in no image of this size (sides that are no multiples of it, or below four times it) is left out.
    """
    spectra = [log_power(image) for image in images]
    if not spectra:
        return {}
    mean = np.mean(spectra, axis=0)
    combs = {period: _comb(*mean.shape, period) for period in PERIODS}
    return {period: _energy(mean, *comb) for period, comb in combs.items() if comb}


def _energy(spectrum: np.ndarray, peaks: np.ndarray, around: np.ndarray) -> float:
    excess = spectrum[peaks[:, 0], peaks[:, 1]] - spectrum[around[..., 0], around[..., 1]].mean(axis=1)
    return math.exp(np.sort(excess)[-_STRONGEST:].mean())


@lru_cache(maxsize=16)
def _comb(height: int, width: int, period: int) -> tuple[np.ndarray, np.ndarray] | None:
    """(P, 2) frequencies of a grid's peaks, each once of the two that mirror each other, and (P, 16, 2) those around."""
    rows, columns = height // period, width // period
    if height % period or width % period or min(rows, columns) < 4:
        return None
    peaks, around = [], []
    half = period // 2
    for k in range(half + 1):
        for m in range(1 - half, half + 1):
            mirrored = k in (0, half) and m < 0
            of_half_the_period = period > min(PERIODS) and k % 2 == m % 2 == 0
            y, x = k * rows, m * columns
            if mirrored or of_half_the_period or math.hypot(y, x) < _LOWEST:
                continue
            peaks.append((y, x))
            around.append(_around(y, x))
    size = (height, width)
    return np.array(peaks) % size, np.array(around) % size


def _around(y: int, x: int) -> list[tuple[int, int]]:
    """16 frequencies two steps away, since the window spreads a peak over its neighbours; on an axis, where edges that
    stand upright or lie flat gather, those along it."""
    if y == 0 or x == 0:
        along = [(0, step) if y == 0 else (step, 0) for step in (-2, 2)]
        return [(y + dy, x + dx) for dy, dx in along] * 8
    ring = [(dy, dx) for dy in range(-2, 3) for dx in range(-2, 3) if 2 in (abs(dy), abs(dx))]
    return [(y + dy, x + dx) for dy, dx in ring]

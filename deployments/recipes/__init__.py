"""Recipes: functions that return a whole, checked configuration, named <model>_<reward>_<algorithm>."""

from collections.abc import Callable

from deployments.recipes.tiny_sd3_jpeg_grpo import tiny_sd3_jpeg_grpo
from deployments.recipes.tiny_sd3_ocr_grpo import tiny_sd3_ocr_grpo
from miles_core.config import RunConfig
from miles_core.errors import InputError

SHORT = {"tiny": tiny_sd3_jpeg_grpo, "tiny-ocr": tiny_sd3_ocr_grpo}
RECIPES: dict[str, Callable[[], RunConfig]] = {f.__name__: f for f in SHORT.values()} | SHORT


def recipe(name: str) -> RunConfig:
    """The configuration of a recipe. Raises InputError naming those there are."""
    if name not in RECIPES:
        raise InputError(f"there is no recipe {name!r}: choose one of {', '.join(sorted(RECIPES))}")
    return RECIPES[name]()

"""Several rewards for every sample (--rm-types, --rm-weights): each by its own scorer, then their weighted sum."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from miles_core.rewards.scores import Score

JOINED = "+"


def weights_of(args: Any) -> dict[str, float]:
    """The scorers of --rm-types with their weights, 1 each where --rm-weights is unset; none where one scorer is enough."""
    names = tuple(getattr(args, "rm_types", None) or ())
    weights = getattr(args, "rm_weights", None) or (1.0,) * len(names)
    return dict(zip(names, weights, strict=True))


def alone(args: Any, name: str) -> Any:
    """The options as if this were the only scorer."""
    return SimpleNamespace(**{**vars(args), "rm_type": name, "rm_types": None, "rm_weights": None})


def together(scores: Mapping[str, Score], weights: Mapping[str, float]) -> Score:
    """The weighted sum as one Score: names and versions joined, what OCR read, the most tries, the seconds of all."""
    parts = [scores[name] for name in weights]
    return Score(
        reward=sum(weights[name] * scores[name].reward for name in weights),
        rm_type=JOINED.join(weights),
        rm_version=JOINED.join(part.rm_version for part in parts),
        recognized=next((part.recognized for part in parts if part.recognized is not None), None),
        target=next((part.target for part in parts if part.target is not None), None),
        tries=max(part.tries for part in parts),
        seconds=sum(part.seconds for part in parts),
        components={name: scores[name].reward for name in weights},
    )

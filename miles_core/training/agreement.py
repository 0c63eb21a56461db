"""What is said and done where the trainer's log-probs lie far from the engine's."""

# A difference of this share of the clip range makes the ratio's noise count beside what training moves.
NEAR = 0.5


def told(mean: float, clip_range: float, *, recompute: bool) -> str:
    """What to say of a mean absolute difference of log-probs; empty where it is far below the clip range."""
    if mean <= NEAR * clip_range:
        return ""
    said = (
        f"the trainer's log-probs lie {mean:.2g} from the engine's on average, and the ratio is clipped at "
        f"{clip_range:.2g}"
    )
    if recompute:
        return f"{said}: the trainer's own are taken (--diffusion-recompute-old-log-prob)"
    return f"{said}: give --diffusion-recompute-old-log-prob, or both the same precision and batch"


def gate(mean: float, clip_range: float, mode: str) -> str:
    """Why training must not begin: a difference that nears the clip range where `mode` is stop; empty where it may."""
    said = told(mean, clip_range, recompute=False) if mode == "stop" else ""
    return f"{said} (--alignment-gate stop)" if said else ""

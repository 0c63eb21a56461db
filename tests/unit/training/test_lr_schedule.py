import math
from types import SimpleNamespace

import pytest

from miles_core.config import build
from miles_core.training.lr_schedule import learning_rate

LR, MIN_LR = 1e-3, 1e-4


def arguments(**changes) -> SimpleNamespace:
    defaults = {
        "lr": LR,
        "min_lr": MIN_LR,
        "lr_decay_style": "constant",
        "lr_warmup_init": 0.0,
        "lr_warmup_iters": 0,
        "lr_warmup_fraction": None,
        "lr_decay_iters": None,
        "lr_wsd_decay_iters": None,
        "lr_wsd_decay_style": None,
    }
    return SimpleNamespace(**defaults | changes)


def curve(steps: int, **changes) -> list[float]:
    args = arguments(**changes)
    return [learning_rate(step, args) for step in range(steps)]


def test_the_default_is_the_learning_rate_throughout() -> None:
    assert curve(4) == [LR] * 4


def test_warm_up_moves_at_step_0_and_reaches_the_learning_rate_at_its_last_step() -> None:
    assert curve(6, lr_warmup_iters=4) == pytest.approx([LR / 4, LR / 2, 3 * LR / 4, LR, LR, LR])


def test_warm_up_starts_above_its_initial_value() -> None:
    assert curve(3, lr_warmup_iters=2, lr_warmup_init=2e-4) == pytest.approx([6e-4, 1e-3, 1e-3])


def test_a_fraction_of_the_decay_is_the_same_warm_up() -> None:
    by_fraction = curve(25, lr_decay_style="cosine", lr_decay_iters=20, lr_warmup_fraction=0.25)
    by_steps = curve(25, lr_decay_style="cosine", lr_decay_iters=20, lr_warmup_iters=5)
    assert by_fraction == by_steps != curve(25, lr_decay_style="cosine", lr_decay_iters=20)


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize(
    ("style", "share"),
    [("linear", lambda r: 1 - r), ("cosine", lambda r: (1 + math.cos(math.pi * r)) / 2)],
)
def test_decay_runs_from_the_end_of_warm_up_to_min_lr(style, share, warmup: int) -> None:
    values = curve(30, lr_decay_style=style, lr_decay_iters=20, lr_warmup_iters=warmup)
    expected = [MIN_LR + (LR - MIN_LR) * share((i - warmup) / (20 - warmup)) for i in range(warmup, 20)]
    assert values[warmup:20] == pytest.approx(expected)
    assert values[warmup] == LR and values[20:] == [MIN_LR] * 10
    assert MIN_LR < values[19] < values[warmup + 1] < LR


def test_inverse_square_root_never_falls_below_min_lr() -> None:
    values = curve(500, lr_decay_style="inverse-square-root", lr_decay_iters=450, lr_warmup_iters=4)
    assert values[4:400] == pytest.approx([LR * math.sqrt(4 / i) for i in range(4, 400)])
    assert values[400:] == [MIN_LR] * 100
    assert curve(3, lr_decay_style="inverse-square-root", lr_decay_iters=9) == pytest.approx(
        [LR, LR, LR / math.sqrt(2)]
    )


@pytest.mark.parametrize(
    ("style", "share"),
    [
        ("linear", lambda r: 1 - r),
        ("cosine", lambda r: (1 + math.cos(math.pi * r)) / 2),
        ("exponential", lambda r: 2 * 0.5**r - 1),
        ("minus_sqrt", lambda r: 1 - math.sqrt(r)),
        (None, lambda r: 2 * 0.5**r - 1),
    ],
)
def test_wsd_is_stable_and_decays_over_its_last_steps(style, share) -> None:
    values = curve(
        25, lr_decay_style="WSD", lr_decay_iters=20, lr_wsd_decay_iters=8, lr_wsd_decay_style=style, lr_warmup_iters=3
    )
    assert values[2:13] == [LR] * 11
    assert values[13:20] == pytest.approx([MIN_LR + (LR - MIN_LR) * share((i - 12) / 8) for i in range(13, 20)])
    assert values[13] < LR and values[20:] == [MIN_LR] * 5


def test_warm_up_that_fills_the_decay_ends_at_min_lr() -> None:
    values = curve(6, lr_decay_style="linear", lr_decay_iters=4, lr_warmup_iters=4)
    assert values == pytest.approx([LR / 4, LR / 2, 3 * LR / 4, LR, MIN_LR, MIN_LR])


def test_it_reads_the_run_configuration_and_not_the_length_of_the_run() -> None:
    optimizer = {"lr": LR, "lr_decay_style": "linear", "lr_decay_iters": 10}
    short, long = (
        build({"optimizer": optimizer, "lora": {"use_lora": True}, "run": {"num_rollout": n}}).args() for n in (1, 900)
    )
    values = [learning_rate(step, short) for step in range(12)]
    assert values == [learning_rate(step, long) for step in range(12)]
    assert values[0] == LR and values[5] == pytest.approx(LR / 2) and values[11] == 0


def test_an_unknown_style_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown decay style 'sawtooth'"):
        learning_rate(0, arguments(lr_decay_style="sawtooth", lr_decay_iters=5))

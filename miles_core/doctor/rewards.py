"""The reward: the scorers work, the images can be scored above nothing, and a group's rewards differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from miles_core.algorithms.advantages import post_process_rewards
from miles_core.data.sample import Sample
from miles_core.doctor.check import Finding, passed, stopped, warned
from miles_core.doctor.subject import Subject
from miles_core.rewards.remote import REMOTE
from miles_core.rewards.rm_hub import score_sample
from miles_core.rewards.rm_types import CUSTOM
from miles_core.rewards.scores import Score

_EPS = 1e-4
_NOTHING, _SOMETHING = 0.02, 0.1
_WORD = "MILES"


def self_test(subject: Subject) -> Finding:
    """Each scorer of the recipe tells two drawn images apart, in the right order."""
    from miles_core.rewards.self_test import drawn

    word, blank = drawn(_WORD), np.full((128, 256, 3), 255, np.uint8)
    found = []
    if CUSTOM in subject.inputs.components:
        return _asked(str(subject.config.reward.custom_rm_path), subject.own_reward.scores, word, blank)
    if subject.inputs.components == (REMOTE,):
        args = subject.config.args()
        return _asked(f"the service {args.rm_url}", subject.scorers.remote(args).scores, word, blank)
    for name in subject.inputs.components:
        if name == REMOTE:
            continue
        more, less = (subject.scorers.score(name, image, f'"{_WORD}"') for image in (word, blank))
        if name == "jpeg_compressibility":
            more, less = less, more
        if name == "pickscore":
            # Which of two drawn images people like better it need not know.
            found.append(f"pickscore {less.reward:.3f} and {more.reward:.3f} ({more.rm_version})")
            continue
        if not more.reward > less.reward or (name == "ocr" and more.reward < 1):
            return stopped(
                f"{name} scores {more.reward:.3f} where it must be high and {less.reward:.3f} where it must be low"
                + (f"; it read {more.recognized!r} for {_WORD!r}" if name == "ocr" else ""),
                "run ./install again, or give other --ocr-det-model-dir and --ocr-rec-model-dir",
            )
        found.append(f"{name} {less.reward:.3f} and {more.reward:.3f} ({more.rm_version})")
    return passed(f"on a blank image and a drawn word, low to high: {'; '.join(found)}")


def _asked(name: str, scores: Callable[[list[Sample]], list[Score]], *images: np.ndarray) -> Finding:
    """What an own reward or a service gives two drawn images: it runs, and tells them apart."""
    samples = [
        Sample(group_index=0, index=i, prompt=f'"{_WORD}"', seed=0, generated_output=image.transpose(2, 0, 1) / 255)
        for i, image in enumerate(images)
    ]
    word, blank = (score.reward for score in scores(samples))
    found = f"{name} gives {word:.3f} to a drawn word and {blank:.3f} to a blank image"
    if word == blank:
        return warned(f"{found}: it does not tell them apart", "see whether it looks at the image")
    return passed(found)


def noise_level(subject: Subject) -> Finding:
    """Whether the model can draw it at all: the recipe's reward without noise, and with the recipe's."""
    level = subject.config.rollout.diffusion_noise_level
    with_noise, without = _scored(subject, subject.trial.noisy), _scored(subject, subject.trial.images(0.0))
    mean, clean = (float(np.mean(_rewards(groups))) for groups in (with_noise, without))
    found = (
        f"mean reward {clean:.4f} at noise level 0 and {mean:.4f} at {level:g}, {len(_rewards(without))} images each"
    )
    read, clean_read = (_of_ocr(subject, groups) for groups in (with_noise, without))
    if not read:
        return passed(found)
    return judge_legibility(found, float(np.mean(read)), float(np.mean(clean_read)), _quieter(subject))


def judge_legibility(found: str, mean: float, clean: float, quieter: str) -> Finding:
    """Mean OCR rewards with the recipe's noise and without any."""
    if clean < _NOTHING and mean < _NOTHING:
        return warned(
            f"{found}: the model does not draw the words even without noise",
            "another --hf-checkpoint or easier --prompt-data; more --diffusion-num-steps or --diffusion-height and -width",
        )
    if mean < _NOTHING and clean >= _SOMETHING:
        return stopped(f"{found}: the noise makes the words illegible", quieter)
    if mean < clean / 2:
        return warned(f"{found}: the noise costs more than half of the reward", quieter)
    return passed(found)


def spread(subject: Subject) -> Finding:
    """Standard deviation of the rewards within each group; a group without one teaches nothing."""
    groups = _scored(subject, subject.trial.noisy)
    samples = [sample for group in groups for sample in group]
    _, advantages = post_process_rewards(subject.config.args(), samples)
    stds = [float(np.std(rewards)) if np.ptp(rewards) else 0.0 for rewards in map(_of, groups)]
    flat = sum(std == 0 for std in stds)
    found = (
        f"{flat} of {len(groups)} groups without spread; standard deviation within a group "
        f"{min(stds):.2g} to {max(stds):.2g}, largest advantage {max(map(abs, advantages)):.2f}"
    )
    way = (
        "--prompt-data neither too hard nor too easy, more --n-samples-per-prompt, or a larger --diffusion-noise-level"
    )
    if flat:
        return warned(f"{found}: a group without spread teaches nothing", way)
    if not subject.config.algorithm.disable_grpo_std_normalization and max(stds) < _EPS:
        return warned(f"{found}: the spread is below the {_EPS:g} that is added to it", f"another --rm-type; {way}")
    return passed(found)


def _quieter(subject: Subject) -> str:
    r = subject.config.rollout
    return (
        f"--diffusion-noise-level {r.diffusion_noise_level / 2:g}, more than --diffusion-num-steps {r.diffusion_num_steps}, "
        "or --diffusion-num-sde-steps with --diffusion-sde-window-range over the first steps alone"
    )


def _scored(subject: Subject, groups: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
    """The groups with their rewards, by the recipe's own scorers."""
    if CUSTOM in subject.inputs.components:
        for group in groups:
            for sample, score in zip(group, subject.own_reward.scores(group), strict=True):
                sample.reward = score.reward
        return [list(group) for group in groups]
    args, scorers = subject.config.args(), subject.scorers
    for sample in (sample for group in groups for sample in group if sample.reward is None):
        sample.reward = score_sample(args, sample, scorers).reward
    return [list(group) for group in groups]


def _rewards(groups: Sequence[Sequence[Sample]]) -> list[float]:
    return [reward for group in groups for reward in _of(group)]


def _of(group: Sequence[Sample]) -> list[float]:
    return [float(sample.reward) for sample in group if isinstance(sample.reward, int | float)]


def _of_ocr(subject: Subject, groups: Sequence[Sequence[Sample]]) -> list[float]:
    if subject.config.reward.rm_types:
        # The reward is of all of them together.
        return []
    run = subject.config.reward.rm_type
    return _rewards([[sample for sample in group if (sample.rm_type or run) == "ocr"] for group in groups])

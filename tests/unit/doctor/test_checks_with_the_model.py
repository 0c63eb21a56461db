"""The trial: one microgroup through real engine, trainer and engine, and what is found when they differ."""

from pathlib import Path

import pytest

from miles_core.doctor import policy, rewards
from miles_core.doctor.subject import Subject
from miles_core.doctor.trial import Trial
from miles_core.errors import StageError
from miles_core.families.tiny_sd3 import make_tiny_sd3
from miles_core.training.trainer import TrainerRank


@pytest.fixture(scope="module")
def other_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_sd3(tmp_path_factory.mktemp("other") / "tiny-stable-diffusion-3.5-medium", seed=1)


def test_a_good_recipe_passes(subject):
    made = subject()
    assert policy.ratio(made).status == "pass"
    assert policy.parity(made).status == "pass"
    noise, spread = rewards.noise_level(made), rewards.spread(made)
    assert noise.status == spread.status == "pass", (noise, spread)
    assert "0 of 2 groups without spread" in spread.found
    row = made.trial.trained.result.metrics[0]
    assert made.trial.engine.checksum() == made.trial.trained_from, "the images are those of policy/init"
    assert row["pairs"] == 2 * 2 and row["grad_norm"] > 0 and made.trial.proof.moved > 1e-3
    assert not (Path(made.config.run.artifact_root)).exists()


def test_a_wrong_base_has_a_ratio_off_1_and_no_parity(subject, other_base):
    class OtherBase(Subject):
        def trainer(self, config):
            right = super().trainer(config)
            return TrainerRank(config, str(other_base), "sd3", master_port=right._port, device="cpu")

    made = subject(OtherBase)
    ratio, parity = policy.ratio(made), policy.parity(made)
    assert ratio.status == "stop" and "do not compute the same policy" in ratio.found
    assert parity.status == "stop" and "train/rollout mismatch" in parity.found and "--hf-checkpoint" in parity.way_out


def test_a_push_that_changes_nothing_has_no_parity(subject, monkeypatch):
    made = subject()
    assert made.trial.trained.mismatch is None
    monkeypatch.setattr(Trial, "_push", lambda self, parts: None)
    with pytest.raises(StageError, match="does not compute with the new policy|did not reach the engine"):
        policy.parity(made)


def test_another_batch_in_the_trainer_still_has_a_ratio_of_1(subject):
    """Micro-batches of one beside microgroups of two: rounding alone."""
    made = subject(micro_batch_size=1)
    assert policy.ratio(made).status == "pass"
    assert made.trial.trained.result.metrics[0]["ratio_max_abs_dev"] < 1e-5


def test_a_reward_without_spread(subject):
    made = subject()
    for sample in (sample for group in made.trial.noisy for sample in group):
        sample.reward = 0.25
    found = rewards.spread(made)
    assert found.status == "warn" and "2 of 2 groups without spread" in found.found
    made.trial.noisy[0][0].reward = 0.5
    assert "1 of 2 groups without spread" in rewards.spread(made).found


def test_a_spread_below_what_is_added_to_it(subject):
    made = subject()
    for number, sample in enumerate(sample for group in made.trial.noisy for sample in group):
        sample.reward = 0.25 + 1e-6 * number
    found = rewards.spread(made)
    assert found.status == "warn" and "below the 0.0001" in found.found


def test_images_without_noise_do_not_depend_on_the_noise(subject):
    pictures = []
    for level in (0.7, 0.9):
        with subject(diffusion_noise_level=level) as made:
            pictures += [_pictures(made.trial.images(0.0)), _pictures(made.trial.noisy)]
    clean, noisy, clean_too, noisier = pictures
    assert all((a == b).all() for a, b in zip(clean, clean_too, strict=True))
    assert not any((a == b).all() for a, b in zip(clean, noisy, strict=True))
    assert not any((a == b).all() for a, b in zip(noisy, noisier, strict=True))


def test_nothing_is_left_of_a_trial(subject):
    with subject() as made:
        folder = Path(made.trial.files.root)
        assert folder.is_dir() and made.trial.engine.health()
    assert not folder.exists() and not made.trial.engine.health()


def _pictures(groups):
    return [sample.generated_output for group in groups for sample in group]

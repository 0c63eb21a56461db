"""Several rewards with weights: every sample by every scorer, the weighted sum, each normalized by itself if asked."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_reward_worker import ARGS, noise, png, rollout_part

from deployments.recipes import recipe
from miles_core.algorithms.advantages import normalize, several_rewards
from miles_core.config.overrides import from_flags
from miles_core.data.prompts import load_prompts
from miles_core.errors import InputError
from miles_core.pipeline.inputs import resolve_inputs
from miles_core.rewards.worker import RewardWorker
from miles_core.store.files import Files
from miles_core.store.parts import read_table

BOTH = ["jpeg_compressibility", "jpeg_incompressibility"]
IMAGES = [png(noise(i)) for i in range(4)]


def scored(folder: Path, **args: Any) -> list[dict[str, Any]]:
    files = Files(str(folder / "store"))
    part = rollout_part(files, IMAGES)
    metadata: dict[int, Any] = {20: {"rm_type": "ocr"}, 21: None, 22: {"rm_type": "jpeg_compressibility"}, 23: None}
    worker = RewardWorker(ARGS | {"rm_types": tuple(BOTH)} | args, name="w")
    return read_table(files, worker.score(files, part, "rewards/0.parquet", BOTH, metadata)).to_pylist()


@pytest.mark.parametrize(("given", "first", "second"), [(None, 1.0, 1.0), ((500.0, -2.0), 500.0, -2.0)])
def test_every_sample_is_scored_by_all_and_gets_the_weighted_sum(
    tmp_path: Path, given: tuple[float, ...] | None, first: float, second: float
) -> None:
    """Each component is kept by its name beside the sum (pitfall 26)."""
    rows = scored(tmp_path, rm_weights=given)
    for row in rows:
        kilobytes = row["score_jpeg_incompressibility"]
        assert kilobytes > 0 and row["score_jpeg_compressibility"] == pytest.approx(-kilobytes / 500)
        assert row["reward"] == pytest.approx(first * row["score_jpeg_compressibility"] + second * kilobytes)
        assert row["rm_type"] == "jpeg_compressibility+jpeg_incompressibility"
        assert row["rm_version"].count("+") == 1 and row["tries"] == 1
    assert len({row["score_jpeg_incompressibility"] for row in rows}) > 1


def args(**changes: Any) -> SimpleNamespace:
    plain = {"disable_grpo_std_normalization": False, "globalize_reward_mean": False, "globalize_reward_std": False}
    return SimpleNamespace(**plain | {"n_samples_per_prompt": 2} | changes)


class TestNormalized:
    REWARDS = {"a": [0.0, 1.0, 5.0, 5.0], "b": [1000.0, 3000.0, 100.0, 300.0]}  # noqa: RUF012
    GROUPS = [0, 0, 1, 1]  # noqa: RUF012

    def test_no_reward_outweighs_another_by_its_scale(self) -> None:
        """The hard reward is not starved by a loud one (pitfall 26)."""
        told = several_rewards(args(), self.REWARDS, self.GROUPS, {"a": 1.0, "b": 1.0})
        assert told.advantage == pytest.approx([-2, 2, -1, 1], abs=1e-3)
        larger = {"a": self.REWARDS["a"], "b": [1000 * value for value in self.REWARDS["b"]]}
        assert several_rewards(args(), larger, self.GROUPS, {"a": 1.0, "b": 1.0}).advantage == pytest.approx(
            told.advantage, abs=1e-3
        )
        plain = [a + b for a, b in zip(*self.REWARDS.values(), strict=True)]
        of_sum = normalize(plain, self.GROUPS, use_std=False, global_mean=False, global_std=False)
        assert told.group_mean == pytest.approx(of_sum.group_mean)

    def test_weights_count(self) -> None:
        told = several_rewards(args(), self.REWARDS, self.GROUPS, {"a": 0.5, "b": -3.0})
        assert told.advantage == pytest.approx([2.5, -2.5, 3, -3], abs=1e-2)

    def test_a_group_teaches_nothing_where_no_reward_differs(self) -> None:
        flat = {"a": [1.0, 1.0, 5.0, 5.0], "b": [2.0, 2.0, 1.0, 3.0]}
        told = several_rewards(args(), flat, self.GROUPS, {"a": 1.0, "b": 1.0})
        assert told.zero_std.tolist() == [True, True, False, False] and told.advantage[:2].tolist() == [0, 0]
        assert np.isfinite(told.advantage).all()

    def test_the_options_of_normalization_hold_for_each(self) -> None:
        whole = several_rewards(args(globalize_reward_std=True), self.REWARDS, self.GROUPS, {"a": 1.0, "b": 0.0})
        alone = normalize(self.REWARDS["a"], self.GROUPS, use_std=True, global_mean=False, global_std=True)
        assert whole.advantage == pytest.approx(alone.advantage)
        centred = several_rewards(
            args(disable_grpo_std_normalization=True), self.REWARDS, self.GROUPS, {"a": 1.0, "b": 1.0}
        )
        assert centred.advantage == pytest.approx([-1000.5, 1000.5, -100, 100])


class TestInputs:
    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--rm-weights", "1,2"], "--rm-weights belongs to --rm-types"),
            (["--rm-normalize"], "--rm-normalize belongs to --rm-types"),
            (["--rm-types", "ocr,beauty"], "names 'beauty', which is no scorer: choose from pickscore, ocr"),
            (["--rm-types", "ocr,ocr"], "one twice"),
            (["--rm-types", "ocr,jpeg_compressibility", "--rm-weights", "1"], "has 1 weights for the 2 scorers"),
            (["--rm-types", "ocr", "--rm-weights", "nan"], "a finite number"),
            (["--rm-types", "ocr", "--custom-rm-path", "a.b"], "both say what the reward is"),
            (
                ["--rm-types", "ocr", "--rm-normalize", "--custom-reward-post-process-path", "a.b"],
                "--custom-reward-post-process-path and --rm-normalize both say",
            ),
        ],
    )
    def test_what_does_not_fit_is_refused(self, flags: list[str], words: str) -> None:
        with pytest.raises(InputError, match=words):
            recipe("tiny").replace(**from_flags(flags))

    def test_scorers_of_all_samples_whatever_their_metadata_names(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("MILES_HOME", str(tmp_path))
        asked = recipe("tiny-ocr").replace(
            **from_flags(["--rm-types", "ocr,jpeg_compressibility", "--rm-weights", "1,0.1"])
        )
        assert resolve_inputs(asked).components == ("jpeg_compressibility", "ocr")
        assert asked.reward.rm_weights == (1.0, 0.1)

    def test_prompts_must_suit_every_scorer(self, tmp_path: Path) -> None:
        (tmp_path / "p.txt").write_text("a cat\n")
        assert load_prompts(tmp_path / "p.txt", rm_type=None, rm_types=("jpeg_compressibility",))
        with pytest.raises(InputError, match="line 1"):
            load_prompts(tmp_path / "p.txt", rm_type=None, rm_types=("jpeg_compressibility", "ocr"))

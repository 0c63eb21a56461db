"""A sample that kills every scorer is found and named; all other parts stay scored, and the command goes on from them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from commands import Place

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

REWARD = """
import os, signal
from pathlib import Path


async def deadly(args, samples, **kwargs):
    here = Path(args.code_path)
    for sample in samples:
        if sample.index == 5 and (here / "poison").exists():
            os.kill(os.getpid(), signal.SIGKILL)
    with (here / "scored").open("a") as told:
        told.write("".join(f"{sample.index}\\n" for sample in samples))
    return [float(sample.index) for sample in samples]
"""


def test_a_sample_that_kills_every_scorer_is_named_and_costs_no_other_part(place: Place, tmp_path: Path) -> None:
    (tmp_path / "deadly_reward.py").write_text(REWARD)
    poison, scored = tmp_path / "poison", tmp_path / "scored"
    poison.touch()
    words = [
        *("--code-path", str(tmp_path), "--num-rollout", "1", "--run-id", "poisoned"),
        *("--custom-rm-path", "deadly_reward.deadly", "--reward-max-retries", "1"),
    ]
    said = place.miles("train", "tiny", *words, code=1)
    assert "on sample 5 (prompt '" in said and "the scorer's process died" in said, said
    rollout = place.on_line("poisoned", 0, "rollout")
    (part,) = [part for part in rollout.data if part.path in said]
    poison.unlink()
    scored.write_text("")
    place.miles("train", "tiny", *words)
    assert place.on_line("poisoned", 0, "rollout") == rollout
    again = [int(line) for line in scored.read_text().split()]
    assert 5 in again and len(again) == part.rows < sum(p.rows for p in rollout.data)

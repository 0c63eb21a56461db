"""A user's own reward in the place of all scorers: what it gets, what comes of its answers and faults."""

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_reward_worker import ARGS, noise, png, rollout_part

from miles_core.errors import StageError
from miles_core.rewards.rm_types import CUSTOM
from miles_core.rewards.worker import RewardWorker
from miles_core.store.files import Files
from miles_core.store.parts import read_table

IMAGES = [png(noise(i)) for i in range(4)]


def worker(folder: Path, body: str, **args: Any) -> RewardWorker:
    """A worker with a reward of this body, in a module of its own."""
    name = f"own_{abs(hash((str(folder), body))):x}"
    source = "from pathlib import Path\n\nasync def score(args, samples, **kwargs):\n" + textwrap.indent(body, "    ")
    (folder / f"{name}.py").write_text(source)
    given = ARGS | {"custom_rm_path": f"{name}.score", "code_path": str(folder), "rm_type": None} | args
    return RewardWorker(given, name="w")


def scored(folder: Path, body: str, **args: Any) -> list[dict[str, Any]]:
    files = Files(str(folder / "store"))
    part = rollout_part(files, IMAGES)
    metadata: dict[int, Any] = {20: {"rm_type": "beauty", "mood": "calm"}, 21: None, 22: None, 23: {"rm_type": "ocr"}}
    made = worker(folder, body, **args).score(files, part, "rewards/0.parquet", [CUSTOM], metadata)
    return read_table(files, made).to_pylist()


def test_it_gets_samples_with_images_and_its_numbers_are_the_rewards(tmp_path: Path) -> None:
    body = "return [s.index + float(s.generated_output.mean()) * 0 + len(s.prompt) + len(s.rm_type or '') for s in samples]"
    rows = scored(tmp_path, body)
    assert [row["reward"] for row in rows] == [row["score_custom"] for row in rows] == [37.0, 32.0, 33.0, 37.0]
    assert {row["rm_type"] for row in rows} == {CUSTOM}
    assert all(row["rm_version"].startswith("custom:") and row["tries"] == 1 for row in rows)
    assert [row["sample_index"] for row in rows] == [20, 21, 22, 23]


def test_it_reads_the_runs_options(tmp_path: Path) -> None:
    rows = scored(tmp_path, "return [float(args.rm_url.rsplit(':', 1)[1])] * len(samples)", rm_url="http://x:77")
    assert [row["reward"] for row in rows] == [77.0] * 4


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return [1.0]", "returned 1 values for 4 samples"),
        ("return 1.0", "returned a float for 4 samples"),
        ("return ['a'] * 4", "returned 'a' for sample 20, which is no number"),
        ("return [1.0, 2.0, float('nan'), 0.0]", "returned nan for sample 22, which is not finite"),
        ("raise OSError('the service is away')", "OSError: the service is away"),
    ],
)
def test_a_bad_answer_is_an_error_that_names_hook_and_samples_and_writes_nothing(
    tmp_path: Path, body: str, words: str
) -> None:
    with pytest.raises(StageError) as caught:
        scored(tmp_path, body, reward_max_retries=1)
    told = str(caught.value)
    assert words in told and "--custom-rm-path own_" in told and "failed on samples 20 to 23 in each of 2 tries" in told
    assert not (tmp_path / "store/rewards").exists()


def test_a_passing_fault_is_tried_again(tmp_path: Path) -> None:
    body = """
mark = Path(args.code_path) / "tried"
if not mark.exists():
    mark.touch()
    raise OSError("away")
return [2.5] * len(samples)
"""
    assert [(row["reward"], row["tries"]) for row in scored(tmp_path, body)] == [(2.5, 2)] * 4


def test_it_gets_the_whole_metadata_of_a_prompt(tmp_path: Path) -> None:
    rows = scored(tmp_path, "return [float(s.metadata.get('mood') == 'calm') for s in samples]")
    assert [row["reward"] for row in rows] == [1.0, 0.0, 0.0, 0.0]

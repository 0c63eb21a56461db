"""Dynamic sampling in a real run: waves until enough groups are kept, killed and carried on, with data sources of one's own."""

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from commands import Place

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ITERATIONS = 2
OPTIONS = [
    *("--num-rollout", str(ITERATIONS), "--rollout-batch-size", "2", "--over-sampling-batch-size", "3"),
    *("--n-samples-per-prompt", "4", "--rollout-microgroup-size", "2", "--diffusion-num-steps", "4"),
    *("--num-steps-per-rollout", "1", "--micro-batch-size", "8"),
]
# Of the groups 0, 1, 2 one is kept, of 3, 4, 5 two: the second is left over.
PROJECT = '''
import json
from pathlib import Path

from miles.rollout.data_source import pop_first
from miles.rollout.filter_hub.base_types import DynamicFilterOutput
from miles.utils.types import Sample

DROPPED = (0, 1, 3, 6)


def keep(args, samples: list[Sample], **kwargs):
    assert all(sample.prompt and sample.reward is not None for sample in samples)
    index = samples[0].group_index
    return DynamicFilterOutput(keep=index not in DROPPED, reason=f"remainder_{index % 2}")


class Shelf:
    """Numbered prompts, and a buffer; both in one file."""

    def __init__(self, args):
        self.args, self.number, self.buffer = args, 0, []

    def get_samples(self, num_samples):
        taken = pop_first(self.args, None, self.buffer, num_samples)
        fresh = range(self.number, self.number + num_samples - len(taken))
        self.number = fresh.stop
        return [self.group(g) for g in [*taken, *fresh]]

    def group(self, g):
        n = self.args.n_samples_per_prompt
        return [Sample(group_index=g, index=g * n + i, prompt=f"book {g}", seed=100 * g + i) for i in range(n)]

    def add_samples(self, samples):
        self.buffer += [group[0].group_index for group in samples]

    def save(self, rollout_id):
        (Path(self.args.save) / "shelf.json").write_text(json.dumps([self.number, self.buffer]))

    def load(self, rollout_id=None):
        self.number, self.buffer = json.loads((Path(self.args.load) / "shelf.json").read_text())
'''


@pytest.fixture(scope="module")
def filtered(place: Place, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a run with a filter of its own."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "mine.py").write_text(PROJECT)
    return [*OPTIONS, "--code-path", str(folder), "--dynamic-sampling-filter-path", "mine.keep"]


@pytest.fixture(scope="module")
def undisturbed(place: Place, filtered: list[str]) -> str:
    """What a run that nothing happened to says."""
    return place.miles("train", "tiny", "--run-id", "undisturbed", *filtered)


def rows(place: Place, run: str, iteration: int, stage: Any, folder: str = "data/") -> list[dict[str, Any]]:
    manifest = place.on_line(run, iteration, stage)
    tables = [pq.read_table(f"{place.artifacts}/{part.path}") for part in manifest.under(folder)]
    found = [row for table in tables for row in table.to_pylist()]
    return sorted(found, key=lambda row: row.get("sample_index", row["group_index"]))


def test_groups_are_dropped(place: Place, undisturbed: str) -> None:
    """What is dropped was generated and scored, and stays as rows that are not kept."""
    assert "wave 1: 1 of 3 groups kept, 1 of the 2 that are trained on" in undisturbed
    assert "wave 2: 2 of 3 groups kept, 3 of the 2 that are trained on" in undisturbed
    assert "rollout/dynamic_sampling/waves=2" in undisturbed
    assert "2 waves: 3 groups kept, dropped 2 remainder_1, 1 remainder_0, 1 surplus, 1 in the buffer" in undisturbed
    assert "rollout/dynamic_sampling/drop_remainder_1=2" in undisturbed
    for stage in ("prompts", "rollout", "rewards", "advantages"):
        assert [row["sample_index"] for row in rows(place, "undisturbed", 0, stage)] == list(range(24))
    advantages = {row["group_index"]: row for row in rows(place, "undisturbed", 0, "advantages")}
    assert {index: (row["kept"], row["reason"]) for index, row in advantages.items()} == {
        0: (False, "remainder_0"),
        1: (False, "remainder_1"),
        2: (True, None),
        3: (False, "remainder_1"),
        4: (True, None),
        5: (False, "surplus: in the buffer"),
    }
    (update,) = pq.read_table(f"{place.artifacts}/{place.on_line('undisturbed', 0, 'update').data[0].path}").to_pylist()
    assert update["samples"] == 8 and update["grad_norm"] > 0


def test_the_surplus_is_served_first(place: Place, undisturbed: str) -> None:
    """Under its own number and seeds, generated again by the policy in force."""
    first, second = (rows(place, "undisturbed", i, "rollout") for i in range(ITERATIONS))
    assert [row["group_index"] for row in second[::4]] == [5, 6, 7]
    before = {row["sample_index"]: row for row in first}
    for row in second[:4]:
        assert row["seed"] == before[row["sample_index"]]["seed"]
        assert row["policy_digest"] != before[row["sample_index"]]["policy_digest"]
    assert place.on_line("undisturbed", 1, "prompts").summary["buffer"] == 0


def test_a_rerun_scores_what_is_stored(place: Place, undisturbed: str) -> None:
    """Another reward draws no wave and moves no line; the groups are chosen anew by it."""
    line = place.digests("undisturbed", ITERATIONS)
    reward = ("--rm-type", "jpeg_incompressibility")
    said = place.miles("rerun", "undisturbed", "0", "rewards", "--downstream", *reward)
    assert "the stored samples are scored, no wave is drawn" in said
    assert not re.search(r"wave \d+:", said)
    assert place.digests("undisturbed", ITERATIONS) == line
    rewards = place.store("undisturbed").committed("rewards", 0)
    assert [m.rows for m in rewards] == [24, 24] and len({m.content_digest for m in rewards}) == 2


def test_killed_in_the_second_wave(place: Place, filtered: list[str], undisturbed: str) -> None:
    """And in it again, and before prompts are committed: the bits are those of a run that was never disturbed."""
    for fault in (
        "rollout:landed:8:kill9",
        "rewards:landed:10:kill9",
        "prompts:before_commit:1:kill9",
    ):
        killed = ["train", "tiny", "--run-id", "killed", *filtered]
        said = place.miles(*killed, code=-signal.SIGKILL, MILES_FAULT=fault)
        assert "wave 1: 1 of 3 groups kept" in said and "prompts    computed" not in said
    said = place.miles("train", "tiny", "--run-id", "killed", *filtered)
    assert place.digests("killed", ITERATIONS) == place.digests("undisturbed", ITERATIONS)
    for iteration in range(ITERATIONS):
        assert place.checkpoint("killed", iteration) == place.checkpoint("undisturbed", iteration)
    folder = Path(place.artifacts) / "killed/iteration=000000/stage=rollout"
    (attempt,) = folder.iterdir()
    assert len(list(attempt.glob("data/*.parquet"))) - 12 <= 2, "what was made before a kill was made again"


def test_too_many_waves_fail_and_are_carried_on(place: Place, filtered: list[str], undisturbed: str) -> None:
    words = ["train", "tiny", "--run-id", "few", *filtered, "--num-rollout", "1", "--dynamic-sampling-max-waves"]
    said = place.miles(*words, "1", code=1)
    assert "1 wave of 3 prompts kept 1 group, and --rollout-batch-size asks for 2" in said
    assert "(dropped: 1 remainder_0, 1 remainder_1)" in said
    place.miles(*words, "2")
    assert place.digests("few", 1) == place.digests("undisturbed", 1)
    assert place.on_line("few", 0, "prompts").summary["waves"] == 2


def test_an_own_data_source_is_carried_on_from_its_own_files(place: Place, filtered: list[str]) -> None:
    """Killed in the middle of an iteration's wave: the source is where the iteration before left it, its buffer too."""
    words = ["train", "tiny", "--run-id", "shelf", *filtered, "--data-source-path", "mine.Shelf", "--prompt-data", ""]
    place.miles(*words, code=-signal.SIGKILL, MILES_FAULT="prompts:wave_scored:3:kill9")
    files = place.on_line("shelf", 0, "prompts").under("data_source/")
    assert [json.loads(Path(place.artifacts, part.path).read_text()) for part in files] == [[6, [5]]]
    place.miles(*words)
    drawn = [[row["prompt"] for row in rows(place, "shelf", i, "prompts")[::4]] for i in range(ITERATIONS)]
    assert drawn == [[f"book {i}" for i in range(6)], ["book 5", "book 6", "book 7"]]
    assert [row["seed"] for row in rows(place, "shelf", 1, "rollout")[:4]] == [500, 501, 502, 503]

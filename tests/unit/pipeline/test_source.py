"""A data source of one's own: its files are committed with the prompts, and it goes on from those and nothing else."""

import json
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from deployments.recipes import recipe
from miles_core.config import RunConfig
from miles_core.errors import InputError, StageError
from miles_core.pipeline import prompts
from miles_core.pipeline.inputs import resolve_inputs
from miles_core.pipeline.source import opened
from miles_core.pipeline.stage import Step, run_stage
from miles_core.pipeline.upstream import previous_prompts
from miles_core.runtime.workers import Workers
from miles_core.store.files import Files
from miles_core.store.manifest import Manifest
from miles_core.store.parts import read_table
from miles_core.store.run_store import RunStore

SOURCE = '''
import json
from pathlib import Path

from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.utils.types import Sample


class Counting:
    """Prompts by number; where it is lies under args.save, as the reference's own classes have it."""

    def __init__(self, args):
        self.args, self.number, self.loaded = args, 0, None

    def group(self):
        n, group = self.args.n_samples_per_prompt, self.number
        self.number += 1
        return [
            Sample(
                group_index=group, index=group * n + i, prompt=f"number {group}", seed=1000 * group + i, metadata={"g": group}
            )
            for i in range(n)
        ]

    def get_samples(self, num_samples):
        return [self.group() for _ in range(num_samples)]

    def add_samples(self, samples):
        raise NotImplementedError

    def save(self, rollout_id):
        path = Path(self.args.save) / "rollout" / "number.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"number": self.number, "saved_in": rollout_id}))

    def load(self, rollout_id=None):
        state = json.loads((Path(self.args.load) / "rollout" / "number.json").read_text())
        assert state["saved_in"] == rollout_id
        self.number = state["number"]


class Stock(RolloutDataSourceWithBuffer):
    """The stock source, every prompt in capitals."""

    def get_samples(self, num_samples):
        groups = super().get_samples(num_samples)
        for sample in (s for group in groups for s in group):
            sample.prompt = sample.prompt.upper()
        return groups


class Few(Counting):
    def get_samples(self, num_samples):
        return super().get_samples(num_samples - 1)


class SameSeeds(Counting):
    def group(self):
        group = super().group()
        for sample in group:
            sample.seed = 7
        return group


class Unnumbered(Counting):
    def group(self):
        group = super().group()
        for sample in group:
            sample.index = 0
        return group


class Mixed(Counting):
    def group(self):
        group = super().group()
        group[1].prompt = "another"
        return group


class Again(Counting):
    def get_samples(self, num_samples):
        return [self.group()] * num_samples


class Breaking(Counting):
    def get_samples(self, num_samples):
        raise OSError("the shelf is empty")


class Lacking:
    def __init__(self, args):
        pass

    def get_samples(self, num_samples):
        return []


class OtherSignature(Counting):
    def get_samples(self):
        return []


def function(args):
    return Counting(args)
'''


@pytest.fixture
def config(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run whose sources lie in a module of the test's own: a process imports one content once."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    (tmp_path / "p.txt").write_text("a cat\na dog\na cow\n")
    name = f"source_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return recipe("tiny").replace(
        hf_checkpoint=str(folder),
        prompt_data="",
        rollout_batch_size=2,
        n_samples_per_prompt=4,
        code_path=str(tmp_path),
        data_source_path=f"{name}.Counting",
    )


def named(config: RunConfig, name: str, **changes: Any) -> RunConfig:
    module = str(config.sampling.data_source_path).rpartition(".")[0]
    return config.replace(data_source_path=f"{module}.{name}", **changes)


def draw(config: RunConfig, root: Path, iteration: int) -> Manifest:
    """One iteration's prompts as a command of its own makes them."""
    store = RunStore(Files(str(root)), "r")
    store.create_record({"recipe": "tiny", "config": {}, "meaning": {}})
    step = Step(config, resolve_inputs(config), store, cast(Workers, None), iteration)
    return run_stage(step, "prompts", previous_prompts(step), prompts.draw).manifest


def rows(manifest: Manifest, root: Path) -> list[dict[str, Any]]:
    found = pa.concat_tables([read_table(Files(str(root)), p) for p in manifest.data]).to_pylist()
    return cast(list[dict[str, Any]], found)


def test_every_iteration_goes_on_from_the_committed_files(config: RunConfig, tmp_path: Path) -> None:
    """(pitfall 46)"""
    root = tmp_path / "runs"
    made = [draw(config, root, i) for i in range(3)]
    assert [row["prompt"] for m in made for row in rows(m, root)[::4]] == [f"number {i}" for i in range(6)]
    assert [row["seed"] for row in rows(made[1], root)] == [*range(2000, 2004), *range(3000, 3004)]
    assert {json.loads(row["metadata"])["g"] for row in rows(made[2], root)} == {4, 5}
    for iteration, manifest in enumerate(made):
        (part,) = manifest.under("data_source/")
        assert part.path == f"{manifest.folder}/data_source/rollout/number.json"
        assert json.loads((root / part.path).read_text()) == {"number": 2 * iteration + 2, "saved_in": iteration}
    (root / made[1].under("data_source/")[0].path).unlink()
    again = [draw(config, root, i) for i in range(3)]
    assert again[1].attempt == f"{made[1].attempt}.2"
    assert [m.content_digest for m in again] == [m.content_digest for m in made]


def test_a_rerun_and_a_fork_go_on_from_the_same_files(config: RunConfig, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    first, second = (draw(config, root, i) for i in range(2))
    for run in ("r", "child"):
        store = RunStore(Files(str(root)), run)
        step = Step(config, resolve_inputs(config), store, cast(Workers, None), 1, moves_line=False, force=True)
        again = run_stage(step, "prompts", {"prompts": first}, prompts.draw).manifest
        assert again.folder != second.folder and again.content_digest == second.content_digest


def test_its_files_are_part_of_the_content(config: RunConfig, tmp_path: Path) -> None:
    made = draw(config, tmp_path / "one", 0)
    text = SOURCE.replace('"saved_in": rollout_id', '"saved_in": rollout_id, "more": 1')
    module = str(config.sampling.data_source_path).rpartition(".")[0]
    (tmp_path / f"{module}_2.py").write_text(text)
    other = draw(config.replace(data_source_path=f"{module}_2.Counting"), tmp_path / "two", 0)
    assert rows(other, tmp_path / "two") == rows(made, tmp_path / "one")
    assert (other.content_digest != made.content_digest) and (other.fingerprint != made.fingerprint)


def test_one_derived_from_the_stock_source_reads_the_prompt_file(config: RunConfig, tmp_path: Path) -> None:
    root, stock = tmp_path / "runs", named(config, "Stock", prompt_data=str(tmp_path / "p.txt"))
    found = [row["prompt"] for i in range(3) for row in rows(draw(stock, root, i), root)[::4]]
    assert sorted(found[:3]) == sorted(found[3:]) == ["A CAT", "A COW", "A DOG"]
    with pytest.raises(InputError, match="--prompt-data is missing"):
        resolve_inputs(stock.replace(prompt_data=""))
    (tmp_path / "p.txt").write_text("a bird\n")
    assert resolve_inputs(stock).prompts[0].text == "a bird"


def test_what_it_reads_by_prompt_data_counts_by_its_bytes(config: RunConfig, tmp_path: Path) -> None:
    """In whatever format it is."""
    path = tmp_path / "p.bin"
    path.write_bytes(b"\x00\xff")
    given = config.replace(prompt_data=str(path))
    before = resolve_inputs(given).prompts_digest
    assert before != resolve_inputs(config).prompts_digest
    path.write_bytes(b"\x00\xfe")
    assert resolve_inputs(given).prompts_digest != before
    with pytest.raises(InputError, match="gone.bin cannot be read"):
        resolve_inputs(config.replace(prompt_data=str(tmp_path / "gone.bin")))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Few", r"get_samples\(2\) returned 1 in iteration 0: return 2 groups"),
        ("SameSeeds", r"group 0 with the seeds 7 and 7: give sample i the first one's seed \+ i"),
        ("Unnumbered", r"group 0 with the index 0: number samples group_index \* 4 \+ offset"),
        ("Mixed", "group 0 that mixes groups or prompts"),
        ("Again", "group 0 was drawn twice in iteration 0"),
        ("Breaking", "Breaking failed in iteration 0: OSError: the shelf is empty"),
    ],
)
def test_an_answer_that_cannot_be_generated_is_told(config: RunConfig, tmp_path: Path, name: str, told: str) -> None:
    """Before an engine starts; the members of a group have seeds of their own (pitfalls 19, 35)."""
    with pytest.raises((StageError, InputError), match=told):
        draw(named(config, name), tmp_path / "runs", 0)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Lacking", "lacks add_samples: write it as class "),
        (
            "OtherSignature",
            r"with get_samples\(self, num_samples\), add_samples\(self, samples\), save\(self, rollout_id\)",
        ),
        ("function", r"is no class: write it as class RolloutDataSourceWithBuffer\(args\) with "),
        ("Missing", "has no Missing"),
    ],
)
def test_what_is_no_data_source_is_refused_at_the_start(config: RunConfig, name: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        resolve_inputs(named(config, name))


def test_the_stock_source_does_not_go_on_from_anothers_files(config: RunConfig, tmp_path: Path) -> None:
    made = draw(config, tmp_path / "runs", 0)
    stock = config.replace(data_source_path=None, prompt_data=str(tmp_path / "p.txt"))
    with pytest.raises(StageError, match="drawn by an own data source"):
        with opened(stock, 1, Files(str(tmp_path / "runs")), made):
            pass


def test_no_file_is_restored_outside_its_folder(config: RunConfig, tmp_path: Path) -> None:
    made = draw(config, tmp_path / "runs", 0)
    manifest = tmp_path / "runs" / made.folder / "manifest.json"
    manifest.write_text(
        manifest.read_text().replace("data_source/rollout/number.json", "data_source/../../../../evil.json")
    )
    (tmp_path / "runs" / "r" / "evil.json").write_text("{}")
    evil = RunStore(Files(str(tmp_path / "runs")), "r").manifest("prompts", 0, made.attempt)
    with pytest.raises(InputError, match="leads outside"):
        with opened(config, 1, Files(str(tmp_path / "runs")), evil):
            pass

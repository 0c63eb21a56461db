"""A name belongs to one run: nothing is added to it under another meaning, or where what it meant is lost."""

from pathlib import Path
from typing import Any

import pytest
from roots import BucketRoot, Root

from deployments.recipes import recipe
from miles_core.errors import InputError
from miles_core.pipeline.run import Plan, begin_run, open_run, plan_run
from miles_core.store.run_store import RunStore


@pytest.fixture
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As much of a model and prompts as a plan looks at."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    (folder / "p.txt").write_text("a cat\n")
    return folder


def plan(root: Root, model: Path, **changes: Any) -> Plan:
    places = {"hf_checkpoint": str(model), "prompt_data": str(model / "p.txt"), "artifact_root": root.files.root}
    return plan_run(recipe("tiny").replace(**(places | changes)), "tiny")


def begin(root: Root, model: Path, **changes: Any) -> RunStore:
    planned = plan(root, model, **changes)
    begin_run(planned, "tiny", "/code")
    return planned.store


def test_another_meaning_under_a_taken_name_changes_nothing(root: Root, model: Path) -> None:
    """A resume that would pollute another run's id (pitfall 47)."""
    begin(root, model)
    before = {name: root.get(name) for name in root.names()}
    assert list(before) == ["tiny/run.json"]
    with pytest.raises(InputError, match="--lr .* → 0.5.*--new"):
        begin(root, model, lr=0.5)
    assert {name: root.get(name) for name in root.names()} == before
    begin(root, model, num_rollout=7)
    assert RunStore(root.files, "tiny").record() != before


def test_of_two_commands_that_begin_a_name_at_once_the_second_is_refused(root: Root, model: Path) -> None:
    """A resume that would pollute another run's id (pitfall 47): both looked before either wrote."""
    first, second = plan(root, model), plan(root, model, lr=0.5)
    begin_run(first, "tiny", "/code")
    before = root.get("tiny/run.json")
    with pytest.raises(InputError, match="--lr"):
        begin_run(second, "tiny", "/code")
    assert root.get("tiny/run.json") == before


@pytest.mark.parametrize(
    "left", ["tiny/policy/init/f/attempt.json", "tiny/iteration=000000/stage=prompts/f/attempt.json"]
)
def test_a_run_whose_record_is_lost_is_not_taken_for_a_new_one(left: str, root: Root, model: Path) -> None:
    """A resume that would pollute another run's id (pitfall 47): what the stages there mean cannot be told."""
    store = begin(root, model)
    record = root.get("tiny/run.json")
    root.put(left, b"{}")
    root.remove("tiny/run.json")
    for refused in (lambda: plan(root, model), lambda: open_run("tiny", root.files.root)):
        with pytest.raises(InputError) as caught:
            refused()
        assert root.files.url("tiny/run.json") in str(caught.value)
        assert "put it back from a copy, or give another --run-id" in str(caught.value)
    assert plan(root, model, new=True).store.run == "tiny-2"
    root.put("tiny/run.json", record)
    assert plan(root, model).begun
    assert store.begun()


def test_a_root_in_a_bucket_is_proved_before_anything_is_read(bucket: BucketRoot, model: Path) -> None:
    with pytest.raises(InputError, match="has no bucket nowhere"):
        plan(bucket, model, artifact_root="s3://nowhere/x")
    plan(bucket, model)
    assert bucket.names() == []

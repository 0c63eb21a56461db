"""A sample traced through real manifests."""

import json

import pytest
from roots import Root
from synthetic_run import SyntheticRun, reward_of

from miles_core.errors import InputError
from miles_core.observe.lineage_text import lineage_lines
from miles_core.store.lineage import trace

GROUPS, SAMPLES = 2, 4


def build(root: Root, iterations: int = 3) -> SyntheticRun:
    made = SyntheticRun(root.files, "r", GROUPS, SAMPLES)
    for iteration in range(iterations):
        made.iterate(iteration)
    made.draw_line()
    return made


def test_a_sample_from_prompt_to_optimizer_step(root: Root) -> None:
    made = build(root)
    found = trace(made.store, 2, 21)
    stages = found.stages
    assert stages["prompts"]["prompt"] == stages["rollout"]["prompt"] == "a black hen"
    assert stages["rollout"]["part"] == "data/00000001-1.parquet" and stages["rollout"]["seed"] == 1021
    assert stages["rewards"]["reward"] == stages["advantages"]["raw_reward"] == reward_of(21, 5)
    assert [(s["step"], s["global_step"]) for s in stages["update"]["steps"]] == [(1, 5)]
    assert [s["global_step"] for s in trace(made.store, 2, 19).stages["update"]["steps"]] == [4]
    for stage, facts in stages.items():
        manifest = made.store.on_line(stage, 2)  # type: ignore[arg-type]
        assert manifest is not None
        assert (facts["attempt"], facts["content_digest"]) == (manifest.attempt, manifest.content_digest)
        assert (facts["stale"], facts["damage"], facts["pruned"]) == ([], None, None)
    assert [(p["stage"], p["iteration"]) for p in found.policies] == [("update", 1), ("update", 0), ("policy", -1)]
    assert found.policies[0]["policy_digest"] == stages["rollout"]["policy_digest"]
    json.dumps(found.to_json(), default=str)


def test_other_rewards_and_what_is_stale_are_told(root: Root) -> None:
    made = build(root)
    beside = made.make("rewards", 2, on_line=False, rm_type="ocr", reward=lambda i, g: i / 1000)
    found = trace(made.store, 2, 21)
    assert [(o["attempt"], o["reward"], o["same_image"]) for o in found.beside] == [(beside.attempt, 0.021, True)]
    made.line["rollout"] = made.store.on_line("rollout", 2) or beside
    moved = made.make("rewards", 2, rm_type="ocr", reward=lambda i, g: 0.25, mark="again")
    made.draw_line()
    found = trace(made.store, 2, 21)
    assert found.stages["rewards"]["attempt"] == moved.attempt
    assert moved.content_digest[:12] in found.stages["advantages"]["stale"][0]
    assert len(found.beside) == 2
    text = "\n".join(lineage_lines(found))
    assert "stale: made from rewards of iteration 2" in text and "beside the line, of the same image" in text


def test_a_stage_that_is_not_there_yet(root: Root) -> None:
    made = build(root, 1)
    made.make("prompts", 1)
    made.draw_line()
    with pytest.raises(InputError, match="rollout of iteration 1 is not committed"):
        trace(made.store, 1, 8)
    made.make("rollout", 1)
    made.draw_line()
    found = trace(made.store, 1, 8)
    assert "not committed yet" in found.stages["rewards"]["missing"] and found.stages["rollout"]["image"]
    assert "update of iteration 1 is not committed yet" in "\n".join(lineage_lines(found))


@pytest.mark.parametrize("sample_index", [7, 16, 999])
def test_a_row_out_of_range_is_one_sentence(root: Root, sample_index: int) -> None:
    made = build(root, 2)
    with pytest.raises(InputError, match="from 8 to 15"):
        trace(made.store, 1, sample_index)

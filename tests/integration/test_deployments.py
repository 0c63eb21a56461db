"""Runs from the UI: a real server and worker, what people press there, and what breaks under them."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from commands import MILES, Place
from prefect_api import FINAL, Api

from miles_core.store.lock import read_lock

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
DEPLOYMENTS = {"train", "iteration", "rerun-stage", "evaluate", "fork", "inspect"}


def up(place: Place, folder: Path) -> str:
    """`miles up`, given in a folder that is not the clone; what it says."""
    done = subprocess.run(
        [MILES, "up"], env=place.environment(), cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def api(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Api:
    said = up(place, tmp_path_factory.mktemp("elsewhere"))
    address = re.search(r"Prefect UI (http://\S+)", said)
    assert address, said
    return Api(f"{address[1]}/api")


def options(run: str, iterations: int = 1, **more: object) -> dict[str, object]:
    return {"recipe": "tiny", "options": {"run": {"run_id": run, "num_rollout": iterations}, **more}}


@pytest.fixture(scope="module")
def undisturbed(place: Place, api: Api) -> dict[str, str]:
    """Digests of a run of two iterations that was started from the form's parameters and never disturbed."""
    api.wait(api.run("train", options("undisturbed", 2)))
    return place.digests("undisturbed", 2)


def process_of(place: Place, api: Api, flow_run: str) -> psutil.Process:
    """The flow's process, once it trains."""
    run = api.flow_run(flow_run)["parameters"]["options"]["run"]["run_id"]

    def holder() -> psutil.Process | None:
        held = read_lock(place.store(run).files, run)
        return psutil.Process(held.holder.pid) if held and not held.released else None

    found: psutil.Process = api.until(holder, f"holder of {run}")
    return found


def test_up_serves_the_deployments_and_again_is_harmless(place: Place, api: Api, tmp_path: Path) -> None:
    there = {one["name"] for one in api.post("/deployments/filter", {})}
    assert there == DEPLOYMENTS
    assert "runs already" in up(place, tmp_path)
    assert len(api.post("/automations/filter", {})) == 2


def test_the_form_explains_each_option_and_refuses_wrong_types(api: Api) -> None:
    schema = api.deployment("train")["parameter_openapi_schema"]
    groups = schema["definitions"]["Options"]["properties"]
    assert {"run", "rollout", "reward", "lora"} <= set(groups)
    lr = schema["definitions"]["OptimizerOptions"]["properties"]["lr"]
    assert lr["type"] == "number" and "learning rate" in lr["description"]
    assert "tiny-ocr" in schema["properties"]["recipe"]["enum"]
    deployment = api.deployment("train")["id"]
    for wrong in (
        {"recipe": "huge"},
        {"options": {"run": {"num_rollout": "two"}}},
        {"options": {"run": {"num_rollout": 0}}},
        {"options": {"run": {"no_such_option": 1}}},
        {"options": {"no_such_group": {}}},
        {"options": {"reward": {"rm_type": "beauty"}}},
    ):
        answer = api.post(f"/deployments/{deployment}/create_flow_run", {"parameters": wrong}, 409)
        assert "Validation failed" in answer["detail"], answer


def test_what_only_the_whole_tells_is_refused_before_anything_is_written(place: Place, api: Api) -> None:
    flow_run = api.run("train", options("odd", data={"rollout_batch_size": 3, "num_steps_per_rollout": 7}))
    run = api.wait(flow_run, "FAILED")
    assert "--num-steps-per-rollout 7" in run["state"]["message"]
    assert not (place.home / "artifacts/odd").exists()
    (artifact,) = api.artifacts("odd-failure")
    assert "miles train tiny" in artifact["data"] and "--num-steps-per-rollout 7" in artifact["data"]


def test_after_a_failure_in_update_retry_finds_the_earlier_stages_cached(
    place: Place, api: Api, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    fault = {"MILES_FAULT": "update:before_commit:1:error", "MILES_FAULT_COUNTS": str(tmp_path)}
    flow_run = api.run("train", options("retried", 2), fault)
    api.wait(flow_run, "FAILED")
    (artifact,) = api.artifacts("retried-failure")
    assert "failed in update" in artifact["data"] and "Retry" in artifact["data"]
    api.retry(flow_run)
    api.until(lambda: api.flow_run(flow_run)["run_count"] == 2, "second try")
    api.wait(flow_run)
    states = {
        run["name"]: run["state_name"]
        for run in api.post("/task_runs/filter", {"sort": "EXPECTED_START_TIME_ASC"})
        if run["flow_run_id"] in tries(api, "retried · iteration 0")[1:]
    }
    assert {n for n, s in states.items() if s == "Cached"} == {"policy", "prompts", "rollout", "rewards", "advantages"}
    assert {n for n, s in states.items() if s == "Completed"} == {"update", "sync"}
    assert place.digests("retried", 2) == undisturbed


def tries(api: Api, name: str) -> list[str]:
    """Ids of the flow runs of a name, the first one first."""
    found = api.post("/flow_runs/filter", {"flow_runs": {"name": {"any_": [name]}}, "sort": "START_TIME_ASC"})
    return [run["id"] for run in found]


def test_a_cancelled_run_gives_all_back_and_resumes(
    place: Place, api: Api, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    slow = {"MILES_FAULT": "rollout:generate:3:slow=120", "MILES_FAULT_COUNTS": str(tmp_path)}
    flow_run = api.run("train", options("cancelled", 2), slow)
    process = process_of(place, api, flow_run)
    rollout = place.home / "artifacts/cancelled/iteration=000000/stage=rollout"
    api.until(lambda: list(rollout.glob("*/data/*.parquet")), "first part")
    api.cancel(flow_run)
    api.wait(flow_run, "CANCELLED")
    psutil.wait_procs([process], timeout=60)
    assert not process.is_running()
    held = read_lock(place.store("cancelled").files, "cancelled")
    assert held is not None and held.released
    assert place.ray_processes() == set()
    place.miles("train", "tiny", "--run-id", "cancelled", "--num-rollout", "2")
    assert place.digests("cancelled", 2) == undisturbed


def test_a_killed_flow_is_restarted_by_the_automation(
    place: Place, api: Api, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    kill = {"MILES_FAULT": "update:after_commit:1:kill9", "MILES_FAULT_COUNTS": str(tmp_path)}
    flow_run = api.run("train", options("killed", 2), kill)
    run = api.wait(flow_run, seconds=400)
    assert run["run_count"] == 2
    assert place.digests("killed", 2) == undisturbed


def test_a_killed_worker_and_flow_are_noticed_and_the_next_worker_carries_on(
    place: Place, api: Api, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    slow = {"MILES_FAULT": "rewards:landed:2:slow=60", "MILES_FAULT_COUNTS": str(tmp_path)}
    flow_run = api.run("train", options("orphan", 2), slow)
    process = process_of(place, api, flow_run)
    rewards = place.home / "artifacts/orphan/iteration=000000/stage=rewards"
    api.until(lambda: list(rewards.glob("*/data/*.parquet")), "first scores")
    worker = json.loads((place.home / "prefect/worker.json").read_text())["pid"]
    os.kill(worker, signal.SIGKILL)
    process.kill()
    assert api.flow_run(flow_run)["state_type"] == "RUNNING"
    assert "started" in up(place, tmp_path)
    run = api.wait(flow_run, seconds=500)
    assert run["run_count"] == 2
    assert place.digests("orphan", 2) == undisturbed


def test_two_trainings_of_one_run_do_not_meet(place: Place, api: Api, tmp_path: Path) -> None:
    slow = {"MILES_FAULT": "rollout:landed:2:slow=20", "MILES_FAULT_COUNTS": str(tmp_path)}
    first = api.run("train", options("twice"), slow)
    process = process_of(place, api, first)
    second = api.run("train", options("twice"))
    refused = api.wait(second, "FAILED")
    assert str(process.pid) in refused["state"]["message"]
    api.wait(first)


def test_a_suspended_run_goes_on_where_it_stood(
    place: Place, api: Api, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    slow = {"MILES_FAULT": "rollout:landed:2:slow=5", "MILES_FAULT_COUNTS": str(tmp_path)}
    flow_run = api.run("train", options("suspended", 2), slow)
    process = process_of(place, api, flow_run)
    api.suspend(flow_run)
    psutil.wait_procs([process], timeout=200)
    assert not process.is_running()
    assert api.flow_run(flow_run)["state_name"] == "Suspended"
    assert place.store("suspended").line_iterations("update") == []
    api.post(f"/flow_runs/{flow_run}/resume", {})
    api.wait(flow_run)
    assert place.digests("suspended", 2) == undisturbed


def test_the_schedule_scores_the_newest_iterations_while_training_goes_on(
    place: Place, api: Api, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    deployment = api.deployment("rerun-stage")
    assert [(one["slug"], one["active"]) for one in deployment["schedules"]] == [("newest-rewards", True)]
    held = {"MILES_FAULT": "update:before_commit:2:held", "MILES_FAULT_COUNTS": str(tmp_path)}
    training = api.run("train", options("scheduled", 2), held)
    api.until(lambda: place.store("scheduled").line_iterations("update"), "first iteration", 300)
    other = {"reward": {"rm_type": "jpeg_incompressibility"}}
    often = {
        "schedule": {"interval": 15},
        "slug": "often",
        "active": True,
        "parameters": {"run": "latest", "iterations": "latest:3", "stage": "rewards", "options": other},
    }
    (made,) = api.post(f"/deployments/{deployment['id']}/schedules", [often])
    try:
        done = api.until(lambda: scheduled(api, deployment["id"]), "scheduled rerun", 400)
        assert api.flow_run(training)["state_type"] == "RUNNING"
    finally:
        (tmp_path / "update-before_commit.go").touch()
        api.delete(f"/deployments/{deployment['id']}/schedules/{made['id']}")
    assert done["state_type"] == "COMPLETED", done["state"]
    line = place.on_line("scheduled", 0, "rewards")
    beside = [m for m in place.store("scheduled").committed("rewards", 0) if m.attempt != line.attempt]
    assert [m.affecting_config["rm_type"] for m in beside] == ["jpeg_incompressibility"]
    api.wait(training)
    assert place.digests("scheduled", 2) == undisturbed


def scheduled(api: Api, deployment: str) -> dict[str, Any] | None:
    """The first run of a deployment that its schedule `often` began and that is over."""
    runs = api.post(
        "/flow_runs/filter", {"flow_runs": {"deployment_id": {"any_": [deployment]}}, "sort": "START_TIME_ASC"}
    )
    over = [run for run in runs if run["parameters"].get("options") and run["state_type"] in FINAL - {"CANCELLED"}]
    return over[0] if over else None


def test_a_fork_with_another_reward_trains_on(place: Place, api: Api, undisturbed: dict[str, str]) -> None:
    before = parent_of_fork(place)
    other = {"reward": {"rm_type": "jpeg_incompressibility"}}
    api.wait(api.run("fork", {"run": "undisturbed", "iteration": 1, "run_id": "forked", "options": other}))
    api.wait(api.run("train", {"recipe": "same", "options": {"run": {"run_id": "forked", "num_rollout": 2}}}))
    made = place.digests("forked", 2)
    same = {slot for slot, digest in made.items() if digest == undisturbed[slot]}
    assert same == {slot for slot in made if slot.startswith("0/")} | {"1/prompts", "1/rollout"}
    assert parent_of_fork(place) == before


def parent_of_fork(place: Place) -> dict[Path, bytes]:
    """All that the parent holds but the note of its forks."""
    files = (place.home / "artifacts/undisturbed").rglob("*")
    return {path: path.read_bytes() for path in files if path.is_file() and path.parent.name != "forks"}


def test_inspect_lays_out_what_the_run_holds(place: Place, api: Api, undisturbed: dict[str, str]) -> None:
    query = "SELECT count(*) AS n FROM samples"
    parameters = {"run": "undisturbed", "iterations": "all", "sql": query, "gallery": True}
    api.wait(api.run("inspect", parameters))
    (answer,) = api.artifacts("undisturbed-sql")
    assert json.loads(answer["data"]) == [{"n": "64"}]
    assert json.loads(api.artifacts("undisturbed-iterations")[0]["data"])[0]["iteration"] == 1
    assert "data:image/" in api.artifacts("undisturbed-samples")[0]["data"]
    assert "data:image/svg+xml" in api.artifacts("undisturbed-reward-curve")[0]["data"]
    assert (place.home / "galleries/undisturbed.html").stat().st_size > 100_000

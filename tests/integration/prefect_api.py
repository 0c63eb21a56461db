"""A person at the Prefect UI, as far as the UI's own API calls go."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


@dataclass(frozen=True)
class Api:
    """The API of a Prefect server at `url`."""

    url: str

    def post(self, path: str, body: dict[str, Any], code: int | None = None) -> Any:
        answer = self._asked("POST", path, json=body)
        if code is None:
            assert answer.is_success, answer.text
        else:
            assert answer.status_code == code, answer.text
        return answer.json()

    def _asked(self, method: str, path: str, **more: Any) -> httpx.Response:
        # A server with much to do answers 503, and the UI asks again.
        for _ in range(20):
            answer = httpx.request(method, f"{self.url}{path}", timeout=60, **more)
            if answer.status_code != 503:
                break
            time.sleep(1)
        return answer

    def get(self, path: str) -> Any:
        answer = self._asked("GET", path)
        assert answer.is_success, answer.text
        return answer.json()

    def delete(self, path: str) -> None:
        answer = self._asked("DELETE", path)
        assert answer.is_success, answer.text

    def deployment(self, name: str) -> dict[str, Any]:
        found = self.post("/deployments/filter", {"deployments": {"name": {"any_": [name]}}})
        assert len(found) == 1, found
        made: dict[str, Any] = found[0]
        return made

    def run(self, deployment: str, parameters: dict[str, Any], environment: dict[str, str] | None = None) -> str:
        """Press Run on a deployment; the flow run's id."""
        body: dict[str, Any] = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        if environment:
            body["job_variables"] = {"env": environment}
        made = self.post(f"/deployments/{self.deployment(deployment)['id']}/create_flow_run", body)
        return str(made["id"])

    def set_state(self, flow_run: str, kind: str, name: str | None = None) -> None:
        state = {"type": kind, "name": name or kind.capitalize()}
        self.post(f"/flow_runs/{flow_run}/set_state", {"state": state, "force": False})

    def retry(self, flow_run: str) -> None:
        """Press Retry."""
        self.set_state(flow_run, "SCHEDULED", "AwaitingRetry")

    def suspend(self, flow_run: str) -> None:
        """What the client's suspend_flow_run asks for: to be scheduled anew on resume."""
        later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        details = {"pause_reschedule": True, "pause_timeout": later}
        state = {"type": "PAUSED", "name": "Suspended", "state_details": details}
        self.post(f"/flow_runs/{flow_run}/set_state", {"state": state, "force": False})

    def cancel(self, flow_run: str) -> None:
        self.set_state(flow_run, "CANCELLING", "Cancelling")

    def flow_run(self, flow_run: str) -> dict[str, Any]:
        made: dict[str, Any] = self.get(f"/flow_runs/{flow_run}")
        return made

    def tasks(self, flow_run: str) -> dict[str, str]:
        """State names by name of the newest task runs below a flow run, its newest iteration's included."""
        children = self.post(
            "/flow_runs/filter",
            {
                "flow_runs": {"parent_flow_run_id": {"any_": [flow_run]}},
                "sort": "EXPECTED_START_TIME_DESC",
            },
        )
        newest = children[0]["id"] if children else flow_run
        runs = self.post("/task_runs/filter", {"flow_runs": {"id": {"any_": [newest]}}})
        return {run["name"]: run["state_name"] for run in runs}

    def artifacts(self, key: str) -> list[dict[str, Any]]:
        """Artifacts of a key, the newest first."""
        found: list[dict[str, Any]] = self.post(
            "/artifacts/filter", {"artifacts": {"key": {"any_": [key]}}, "sort": "CREATED_DESC"}
        )
        return found

    def wait(self, flow_run: str, wanted: str = "COMPLETED", seconds: float = 300) -> dict[str, Any]:
        """Wait for a state; the flow run. Fails the test where another final state comes, or none in time."""
        return self.until(lambda: self._arrived(flow_run, wanted), f"{wanted} of {flow_run}", seconds)

    def _arrived(self, flow_run: str, wanted: str) -> dict[str, Any] | None:
        run = self.flow_run(flow_run)
        if run["state_type"] == wanted:
            return run
        assert run["state_type"] not in FINAL - {"CRASHED"}, run["state"]
        return None

    def until(self, ask: Callable[[], Any], what: str, seconds: float = 300) -> Any:
        """Ask again and again for something that is not nothing."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if answer := ask():
                return answer
            time.sleep(0.3)
        raise AssertionError(f"no {what} in {seconds} s")

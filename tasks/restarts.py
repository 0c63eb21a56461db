"""How often a flow run may crash and be restarted without getting on."""

from collections.abc import Sequence

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.runtime import flow_run

from miles_core.errors import StageError
from miles_core.store.run_store import RunStore

CRASHES = 5


def crashes_in_vain(states: Sequence[State], moved_at: float) -> int:
    """Crashes since the run's line moved last (seconds since 1970), and since the flow run last ended in another way;
    `states` oldest first."""
    count = 0
    for state in reversed(states):
        if state.type in (StateType.FAILED, StateType.COMPLETED, StateType.CANCELLED):
            break
        count += state.type == StateType.CRASHED and state.timestamp.timestamp() > moved_at
    return count


def refuse_in_vain(store: RunStore) -> None:
    """End a flow run that the automation miles-restart would restart for ever. Raises StageError."""
    if not flow_run.id or flow_run.run_count <= 1:
        return
    with get_client(sync_client=True) as client:
        states = client.read_flow_run_states(flow_run.id)
    count = crashes_in_vain(states, (store.record() or {}).get("moved_at", 0.0))
    if count >= CRASHES:
        raise StageError(
            f"it crashed {count} times without a stage committed, and is not restarted again: see the flow run's logs and "
            "the worker's, then press Retry"
        )

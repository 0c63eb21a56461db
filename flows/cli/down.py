"""miles down: end what commands left running."""

from flows.cli.server import end_server
from flows.cli.worker import end_worker
from miles_core.config.folders import home
from miles_core.runtime.heads import end_left_heads


def down() -> None:
    """End the local worker with the flows it runs, the local Prefect server, and Ray heads that no command uses. Runs
    stay resumable."""
    worker, server, heads = end_worker(), end_server(), end_left_heads(home() / "state")
    said = [
        f"{what} {'ended' if ended else 'was not running'}"
        for what, ended in (("worker", worker), ("Prefect server", server))
    ]
    print(f"{', '.join(said)}, {heads} left Ray heads ended")

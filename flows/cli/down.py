"""miles down: end what commands left running."""

from flows.cli.server import end_server
from miles_core.config.folders import home
from miles_core.runtime.heads import end_left_heads


def down() -> None:
    """End the local Prefect server, and Ray heads that no command uses."""
    server, heads = end_server(), end_left_heads(home() / "state")
    print(f"Prefect server {'ended' if server else 'was not running'}, {heads} left Ray heads ended")

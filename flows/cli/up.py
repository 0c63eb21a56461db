"""miles up: server, worker and deployments, to train from the browser."""

import typer
from filelock import FileLock

from flows.cli.server import SERVER, ensure_server, ui_address


def up(
    database: str | None = typer.Option(
        None, help="Database of the local server, e.g. postgresql+asyncpg://user:password@host/name; unset: SQLite."
    ),
    host: str = typer.Option("127.0.0.1", help="Address that the local server listens on."),
    port: int | None = typer.Option(None, help="Port of the local server; unset: 4200, or any if that is taken."),
) -> None:
    """Start what the browser needs: a Prefect server (unless PREFECT_API_URL names one), a worker on this machine, and the
    deployments of prefect.yaml with their schedule and automations. Again is harmless; `miles down` ends it."""
    api = ensure_server(database, host, port)
    from flows.cli.worker import POOL, deploy, ensure_automations, ensure_worker

    print(f"Prefect UI {ui_address(api)}", flush=True)
    started = ensure_worker(api)
    print(f"worker of the pool {POOL} {'started' if started else 'runs already'}", flush=True)
    # Two at once would each find no automation there and make it.
    with FileLock(SERVER.folder / "up.lock"):
        print(f"deployments {', '.join(deploy(api))}", flush=True)
        print(f"automations {', '.join(ensure_automations())}", flush=True)
    print(f"start a run: {ui_address(api)}/deployments → train → Run → Custom run", flush=True)

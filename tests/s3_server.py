"""A real S3-protocol server in a process of its own, and a proxy that makes it fail. Both on loopback, any port.

python tests/s3_server.py PORT       serves until it is ended
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import boto3
import httpx

KEYS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_REGION": "us-east-1"}


def serve(port: int) -> None:
    """moto's server. It looks at a condition and stores in two steps; the lock makes them one, as a real server's
    are."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    app, one = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def locked(environ: dict[str, Any], start: Any) -> Any:
        with one:
            return app(environ, start)

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_request(self, *arguments: Any) -> None:
            pass

    make_server("127.0.0.1", port, locked, threaded=True, request_handler=Quiet).serve_forever()


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Start the server; its address. Ended at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, __file__, str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None and time.monotonic() < deadline, "moto's server did not start"
            try:
                httpx.get(f"http://127.0.0.1:{port}/moto-api/", timeout=5)
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def client(endpoint: str) -> Any:
    """Another program's view of the server."""
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        region_name=KEYS["AWS_REGION"],
    )


if __name__ == "__main__":
    # A listing of a few hundred names has several pages.
    os.environ["MOTO_S3_DEFAULT_MAX_KEYS"] = "100"
    serve(int(sys.argv[1]))

"""The command line of a sglang server: ours, the user's, and switches of both kinds."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from miles_core.errors import StageError
from miles_core.rollout.sglang.server import Server, command


def flags(**options: str) -> dict[str, list[str]]:
    """The flags and the words behind each."""
    found: dict[str, list[str]] = {}
    words = command("/models/a b", "sd3", "bf16", (4000, 4001, 4002), "nonce", options)
    for word in words[words.index("serve") + 1 :]:
        if word.startswith("--"):
            name = found.setdefault(word, [])
        else:
            name.append(word)
    return found


def test_what_it_must_be_told() -> None:
    told = flags()
    assert told["--model-path"] == ["/models/a b"]
    assert told["--backend"] == ["sglang"] and told["--model-id"] == ["stable-diffusion-3.5-medium"]
    assert told["--port"] == ["4000"] and told["--scheduler-port"] == ["4001"] and told["--master-port"] == ["4002"]
    assert told["--served-model-name"] == ["nonce"]
    assert told["--dit-precision"] == ["bf16"] and told["--text-encoder-precisions"] == ["bf16"] * 3
    assert told["--sleep-on-idle"] == [] and told["--strict-ports"] == []
    assert told["--dit-cpu-offload"] == ["false"] and told["--text-encoder-cpu-offload"] == ["false"]


@pytest.mark.parametrize(
    ("options", "name", "words"),
    [
        ({"attention_backend": "torch_sdpa"}, "--attention-backend", ["torch_sdpa"]),
        ({"enable_torch_compile": "true"}, "--enable-torch-compile", []),
        ({"vae_cpu_offload": "false"}, "--vae-cpu-offload", ["false"]),
        ({"dit_cpu_offload": "true"}, "--dit-cpu-offload", []),
        ({"sleep_on_idle": "false"}, "--sleep-on-idle", None),
        ({"text_encoder_precisions": "fp32 fp32 bf16"}, "--text-encoder-precisions", ["fp32", "fp32", "bf16"]),
    ],
)
def test_the_users_options_come_before_ours(options: dict[str, str], name: str, words: list[str] | None) -> None:
    assert flags(**options).get(name) == words


class LeftOver(BaseHTTPRequestHandler):
    """Answers as a server of a killed run does, under the name that run gave it."""

    name = "miles-of-a-killed-run"

    def do_GET(self) -> None:
        body = json.dumps({"served_model_name": self.name, "architectures": ["SD3"]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        return


def test_pitfall_33_a_server_left_over_from_a_killed_run_is_not_talked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its nonce is that of another: each server has one of its own, and only that one is ours."""
    server, other = (Server(n, "/m", "sd3", "bf16", "cpu", tmp_path / "log", {}) for n in ("engine-0", "engine-1"))
    assert server._nonce != other._nonce
    left = ThreadingHTTPServer(("127.0.0.1", 0), LeftOver)
    threading.Thread(target=left.serve_forever, daemon=True).start()
    server.url = f"http://127.0.0.1:{left.server_port}"
    try:
        with pytest.raises(
            StageError, match="somebody else's server \\(miles-of-a-killed-run\\), not the one of engine-0"
        ):
            server._prove()
        monkeypatch.setattr(LeftOver, "name", server._nonce)
        server._prove()
    finally:
        left.shutdown()
        left.server_close()

"""A sglang-diffusion server of this process's own, on loopback: started, proved to be ours, ended with us."""

import os
import re
import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from miles_core.errors import StageError
from miles_core.runtime.guard import Guarded
from miles_core.runtime.ports import free_ports

# What the server's registry calls the model whose native pipeline serves a family: a folder's name tells it nothing.
MODEL_IDS = {"sd3": "stable-diffusion-3.5-medium"}
_ENCODERS = {"sd3": 3}
# An image model's transformer and encoders would lie in host memory between requests.
_RESIDENT = {"dit-cpu-offload": "false", "text-encoder-cpu-offload": "false"}
_FALLBACK = "Diffusers"
_LAST_LINES = 8
# It stays up and never serves: its HTTP port lives, what stands behind it is gone.
_BROKEN = "exited; restart the server"
_PORT = re.compile(r"broker exited|port \d+ is unavailable|address already in use", re.IGNORECASE)


class PortTaken(StageError):
    """Another process holds a port that was free a moment ago."""


def command(
    checkpoint: str, family: str, dtype: str, ports: tuple[int, int, int], nonce: str, options: Mapping[str, str]
) -> list[str]:
    """The server's command line. `options` are the server's own by name (`attention_backend`) and come before our defaults;
    the value "true" is a switch, "false" takes a default of ours away or is passed on. `ports`: of HTTP (its
    broker takes the next one), of its scheduler and of its process group; the last two would be 5555 and 30005 for every
    server."""
    ours = {
        "model-type": "diffusion",
        "model-path": checkpoint,
        "model-id": MODEL_IDS[family],
        # With auto it would serve by a slower backend of its own that knows no rollouts, and say nothing.
        "backend": "sglang",
        "served-model-name": nonce,
        "host": "127.0.0.1",
        "port": str(ports[0]),
        "scheduler-port": str(ports[1]),
        "master-port": str(ports[2]),
        "strict-ports": "true",
        "warmup-mode": "off",
        "dit-precision": dtype,
        "text-encoder-precisions": " ".join([dtype] * _ENCODERS[family]),
        # Else it spins on a core while it has nothing to do.
        "sleep-on-idle": "true",
    }
    given = _RESIDENT | {name.replace("_", "-"): value for name, value in options.items()}
    words = [sys.executable, "-c", "from sglang.cli.main import main; main()", "serve"]
    for name, value in (ours | given).items():
        if value == "true":
            words.append(f"--{name}")
        elif value != "false" or name not in ours:
            # A folder may have a space in its name.
            words += [f"--{name}", *([value] if name == "model-path" else value.split())]
    return words


class Server:
    """The server's process and address. log: file that it prints into. device: cpu or cuda."""

    def __init__(
        self, name: str, checkpoint: str, family: str, dtype: str, device: str, log: Path, options: Mapping[str, str]
    ) -> None:
        self.name, self.log = name, log
        self._nonce = f"miles-{secrets.token_hex(8)}"
        self._served = checkpoint, family, dtype, dict(options)
        self.url = ""
        self._environment = dict(os.environ) | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if device == "cpu":
            self._environment |= {"SGLANG_DIFFUSION_PLATFORM_OVERRIDE": "cpu", "OMP_NUM_THREADS": "1"}
        self._process: Guarded | None = None

    def start(self, seconds: float) -> None:
        """Start it and wait until it serves; where another took one of its ports meanwhile, on others. Raises StageError
        with its last lines where it ends or takes longer, and where what answers is not ours or not its native engine."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        for last in (False, False, True):
            try:
                return self._start(seconds)
            except PortTaken:
                if last:
                    raise

    def _start(self, seconds: float) -> None:
        checkpoint, family, dtype, options = self._served
        http, _broker, scheduler, master = free_ports(4)
        self.url = f"http://127.0.0.1:{http}"
        words = command(checkpoint, family, dtype, (http, scheduler, master), self._nonce, options)
        before = self.log.stat().st_size if self.log.exists() else 0
        self._process = Guarded(words, self._environment, self.log)
        deadline = time.monotonic() + seconds
        try:
            while not self.healthy():
                said = self._printed(before)
                if _BROKEN in said or self._process.ended():
                    kind = PortTaken if _PORT.search(said) else StageError
                    raise kind(f"the sglang server of {self.name} did not start: {self.last_lines()}")
                if time.monotonic() > deadline:
                    raise StageError(
                        f"the sglang server of {self.name} was not ready within {seconds:.0f} s: {self.last_lines()}"
                    )
                time.sleep(0.2)
            self._prove()
        except BaseException:
            self.stop()
            raise

    def healthy(self, seconds: float = 5.0) -> bool:
        """Whether it answers within so long that it serves."""
        try:
            return httpx.get(f"{self.url}/health", timeout=seconds, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def ended(self, seconds: float | None) -> bool:
        """Whether the server has ended, waiting so long; None: until it has."""
        return self._process is None or self._process.ended(seconds)

    def stop(self) -> None:
        """End it and all below it; a second call changes nothing."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def last_lines(self) -> str:
        """The end of what it printed, in one line."""
        if not self.log.exists():
            return "it printed nothing"
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{' | '.join(lines[-_LAST_LINES:])} (all of it: {self.log})"

    def _printed(self, since: int) -> str:
        with self.log.open("rb") as file:
            file.seek(since)
            return file.read().decode(errors="replace")

    def _prove(self) -> None:
        said = self._ask("server_info").get("served_model_name")
        if said != self._nonce:
            raise StageError(f"{self.url} is somebody else's server ({said}), not the one of {self.name}")
        kinds = self._ask("model_info").get("architectures") or [_FALLBACK]
        if any(_FALLBACK in kind for kind in kinds):
            raise StageError(
                f"the sglang server of {self.name} serves this model by its diffusers backend, which knows no rollouts: "
                "use another sglang version, or --rollout-engine diffusers"
            )

    def _ask(self, what: str) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.url}/{what}", timeout=30, trust_env=False).json()
        return answer

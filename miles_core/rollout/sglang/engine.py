"""The sglang rollout engine: a RolloutEngine (miles_core.rollout.protocol) over a server of its own."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from miles_core.errors import StageError
from miles_core.rollout.protocol import GenerateRequest, GenerateResult, SyncReply
from miles_core.rollout.sglang import answers, push
from miles_core.rollout.sglang.answers import PackedResult
from miles_core.rollout.sglang.server import Server
from miles_core.rollout.sglang.texts import text_tokens
from miles_core.weights.digest import policy_digest
from miles_core.weights.packing import from_safetensors

MODULE = "transformer"


@dataclass(frozen=True)
class Looks:
    """How a server is looked after, in seconds."""

    interval: float
    timeout: float
    first_wait: float


class SglangEngine:
    """Calls from several threads are served one after another, as the server itself does.

    checkpoint: pipeline folder. dtype: fp32 or bf16, of the forward. The server merges the LoRA into its weights.
    log: what the server prints. options: the server's own, by name. seconds: time limit of a start and of a call. looks:
    how often the server is asked how it is; None: never.
    """

    def __init__(
        self,
        *,
        name: str,
        checkpoint: str,
        family: str,
        dtype: str,
        device: str,
        log: Path,
        options: Mapping[str, str],
        seconds: float,
        looks: Looks | None = None,
    ) -> None:
        self._looks = looks
        self.name, self._device, self._seconds = name, device, seconds
        self.server = Server(name, checkpoint, family, dtype, device, log, options)
        self._lock = threading.RLock()
        self._client: httpx.Client | None = None
        self._asleep = False
        self._pushed, self._digest = dict[str, str](), ""
        self._bucket: push.Bucket | None = None
        self._text_tokens = text_tokens(Path(checkpoint), family, guided=False)

    def start(self) -> None:
        """Start the server and wait until it serves; a second call changes nothing. Raises StageError."""
        with self._lock:
            if self._client is None:
                self.server.start(self._seconds)
                self._client = httpx.Client(base_url=self.server.url, timeout=self._seconds, trust_env=False)

    def health(self) -> bool:
        return self._client is not None and self.server.healthy()

    def generate(self, request: GenerateRequest) -> GenerateResult:
        """K = num_outputs samples of one prompt. Raises StageError where the engine is asleep, not started, or refuses."""
        return self.answer(request, describe=True).opened()

    def answer(self, request: GenerateRequest, *, describe: bool) -> PackedResult:
        """The server's answer undecoded; with `describe` the conditioning too. Raises StageError as `generate` does."""
        request.check_device(self._device == "cuda")
        request.sde_steps()
        with self._lock:
            self._awake()
            started_at, clock = time.time(), time.perf_counter()
            body = self._post("/rollout/generate", self._body(request)).content
            seconds = time.perf_counter() - clock
            described = None
            if describe:
                cheap = answers.for_conditioning(request)
                described = self._post("/rollout/generate", self._body(cheap, conditioning=True)).content
            return PackedResult(request, body, described, self.name, started_at, seconds)

    def update_weights(self, adapter: bytes, *, lora_alpha: int, lora_rank: int) -> SyncReply:
        """Replace the LoRA by `adapter` (safetensors bytes, PEFT names without `base_model.model.`).

        Raises StageError, and holds no policy, where the engine is asleep, leaves a pair out, or then reports other
        parameters than were pushed.
        """
        with self._lock:
            self._awake()
            clock = time.perf_counter()
            tensors = from_safetensors(adapter)
            self._pushed, self._digest = {}, ""
            bucket = push.Bucket.of(tensors, self._device)
            body = bucket.body(module=MODULE, lora_alpha=lora_alpha, lora_rank=lora_rank)
            told = self._post("/update_weights_from_tensor", body).json()
            self._bucket = bucket
            bound = push.layers_updated(str(told.get("message")), len(tensors) // 2)
            self._prove(push.live_digests(tensors))
            self._pushed, self._digest = push.live_digests(tensors), policy_digest(adapter)
            return SyncReply(self.name, self._digest, bound, len(adapter), time.perf_counter() - clock)

    def checksum(self) -> str:
        """Content digest of the adapter in force, once the server has proved that its live parameters are those; "" for
        the base model. Raises StageError where they are not."""
        with self._lock:
            if self._pushed:
                self._prove(self._pushed)
            return self._digest

    def sleep(self) -> None:
        """Give the device's memory back; `generate` and `update_weights` are refused until `wake`."""
        with self._lock:
            if not self._asleep and self._device == "cuda":
                self._post("/release_memory_occupation", {})
            self._asleep = True

    def wake(self) -> None:
        with self._lock:
            if self._asleep and self._device == "cuda":
                self._post("/resume_memory_occupation", {})
            self._asleep = False

    def stop(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client.close()
            self._client, self._asleep = None, False
            self._pushed, self._digest = {}, ""
            self.server.stop()
            self._bucket = None

    def when_gone(self, then: Callable[[], None]) -> None:
        """Call `then` where the server ends and was not stopped, or is looked after and does not answer."""

        def watch() -> None:
            looks = self._looks
            if looks is None:
                self.server.ended(None)
            elif not self.server.ended(looks.first_wait):
                while self.server.healthy(looks.timeout) and not self.server.ended(looks.interval):
                    pass
            if self._client is not None:
                then()

        threading.Thread(target=watch, name="server", daemon=True).start()

    def _awake(self) -> None:
        if self._asleep:
            raise StageError(f"engine {self.name} is asleep: wake it before it generates or takes a policy")

    def _body(self, request: GenerateRequest, *, conditioning: bool = False) -> dict[str, Any]:
        return answers.body_of(request, conditioning=conditioning, text_tokens=self._text_tokens)

    def _prove(self, digests: Mapping[str, str]) -> None:
        self._post(
            "/update_weights_from_tensor_checker",
            {"target_module": MODULE, "expected_named_tensors_sha256": dict(digests)},
        )

    def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        if self._client is None:
            raise StageError(f"engine {self.name} is not started")
        try:
            answer = self._client.post(path, json=body)
        except httpx.HTTPError as fault:
            raise StageError(
                f"the sglang server of {self.name} gave no answer to {path} ({type(fault).__name__}: {fault}): "
                f"{self.server.last_lines()}"
            ) from None
        if answer.status_code != 200:
            told = " ".join(answer.text.split())[:600]
            raise StageError(f"the sglang server of {self.name} answered {answer.status_code} to {path}: {told}")
        return answer

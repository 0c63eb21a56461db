"""A proxy in front of the S3 server that makes it fail: real sockets, HTTP/1.1, in a thread of the test."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

REFUSAL = b"<Error><Code>%s</Code><Message>%s</Message></Error>"


@dataclass(frozen=True)
class Request:
    """One request as it came: method, path with query, lower-case headers, body."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Fault = Callable[[Request], "Answer | None"]


@dataclass(frozen=True)
class Answer:
    """What the proxy does with a request: an answer of its own, after a pause (seconds); or the server's, where
    `status` is 0, with the `drop`ped headers taken out of the request. `then` is done, in a thread, before the client
    hears of it. `lose` hangs up instead of answering, `truncate` in the middle of the answer."""

    status: int = 0
    code: str = ""
    pause: float = 0.0
    lose: bool = False
    truncate: bool = False
    drop: tuple[str, ...] = ()
    then: Callable[[], object] | None = None


class Proxy:
    """`fault` decides about each request; None passes it through. `seen` counts all that came."""

    def __init__(self, server: str) -> None:
        self.server = server
        self.fault: Fault = lambda request: None
        self.seen: list[Request] = []
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._listening: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def listen(self) -> None:
        """Take connections, at the same port as before."""
        self._run(self._listen())

    def hang_up(self) -> None:
        """An outage: connections are cut and new ones refused."""
        self._run(self._hang_up())

    @contextlib.contextmanager
    def running(self) -> Iterator["Proxy"]:
        self._thread.start()
        self.listen()
        try:
            yield self
        finally:
            self.hang_up()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _listen(self) -> None:
        self._listening = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=2**20)
        self.port = self._listening.sockets[0].getsockname()[1]

    async def _hang_up(self) -> None:
        if self._listening:
            self._listening.close()
        for writer in list(self._open):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while (request := await _read_request(reader, writer)) is not None:
                self.seen.append(request)
                answer = self.fault(request) or Answer()
                await asyncio.sleep(answer.pause)
                data = _own(request, answer) if answer.status else await self._ask(request, answer.drop)
                if answer.then:
                    await asyncio.to_thread(answer.then)
                if answer.lose:
                    break
                writer.write(data[: len(data) // 2] if answer.truncate else data)
                await writer.drain()
                if answer.truncate:
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._open.discard(writer)
            writer.close()

    async def _ask(self, request: Request, drop: tuple[str, ...]) -> bytes:
        """The server's whole answer, by a connection of its own."""
        place = urlsplit(self.server)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        headers = {k: v for k, v in request.headers.items() if k not in (*drop, "connection", "expect")}
        lines = [f"{request.method} {request.path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
        writer.write("\r\n".join([*lines, "connection: close", "", ""]).encode() + request.body)
        await writer.drain()
        data = await reader.read(-1)
        writer.close()
        head, _, body = data.partition(b"\r\n\r\n")
        kept = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
        return b"\r\n".join(kept) + b"\r\n\r\n" + body


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode().rstrip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.strip().lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
    if headers.get("expect") == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    if headers.get("transfer-encoding") == "chunked":
        body = await _chunks(reader)
    return Request(method, path, headers, body)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    """A chunked body as it stands on the wire."""
    data = b""
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        data += line + await reader.readexactly(size + 2)
        if size == 0:
            return data


def _own(request: Request, answer: Answer) -> bytes:
    body = b"" if request.method == "HEAD" else REFUSAL % (answer.code.encode(), b"said by the proxy")
    head = f"HTTP/1.1 {answer.status} {answer.code}\r\ncontent-type: application/xml\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body

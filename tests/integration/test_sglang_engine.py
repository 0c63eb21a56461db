"""A run whose engines are sglang servers on the CPU: how they start, what happens where one dies."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from commands import Place

from miles_core.errors import StageError
from miles_core.families.tiny_sd3 import make_tiny_sd3
from miles_core.rollout.sglang import server
from miles_core.rollout.sglang.engine import SglangEngine
from miles_core.runtime import ports

pytest.importorskip("sglang.multimodal_gen", reason="the sglang extra is not installed")
pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]


def servers(place: Place) -> list[psutil.Process]:
    """The servers of this home's commands that live, by their first process; not the guards that end them."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        guard = "miles_core.runtime.guard" in words
        if "serve" in words and not guard and any(word.startswith(str(place.home)) for word in words):
            found.append(process)
    return found


def test_a_server_that_does_not_start_is_told_with_its_own_last_words(tmp_path: Path) -> None:
    model = make_tiny_sd3(tmp_path / "model")
    engine = SglangEngine(
        name="engine-0",
        checkpoint=str(model),
        family="sd3",
        dtype="fp32",
        device="cpu",
        log=tmp_path / "log.txt",
        options={"no_such_option": "1"},
        seconds=200,
    )
    with pytest.raises(StageError, match=r"engine-0 did not start: .*no-such-option.*log.txt"):
        engine.start()
    assert not engine.health()


def test_a_port_that_another_took_meanwhile_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server binds the port behind its own only once the model is loaded; without it, it lives and never serves."""
    model = make_tiny_sd3(tmp_path / "model")
    first = ports.free_ports(4)
    rows = iter([first, ports.free_ports(4)])
    monkeypatch.setattr(server, "free_ports", lambda count: next(rows))
    log = tmp_path / "log.txt"
    served = server.Server("engine-0", str(model), "sd3", "fp32", "cpu", log, {})
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", first[1]))
        try:
            served.start(300)
            assert served.healthy()
        finally:
            served.stop()
    assert "broker exited" in log.read_text()
    assert served.url.rsplit(":", 1)[1] != str(first[0])


def test_a_server_lost_in_the_middle_costs_no_row(place: Place) -> None:
    """Two servers, two iterations; while it generates, the processes of one are killed -9 in the first, those of the other
    stopped in the second. The microgroups go elsewhere, the server starts again, and is given the policy in force before
    it serves."""
    options = "--run-id lost --num-rollout 2 --rollout-engine sglang --rollout-num-engines 2"
    options += " --use-fault-tolerance --rollout-health-check-interval 2 --rollout-health-check-timeout 40"
    slow = {"MILES_FAULT": "rollout:landed:6:slow=3,rollout:landed:14:slow=3"}
    command = place.start("train", "tiny", *options.split(), **slow)
    lose_one(place, command, "iteration=000000", signal.SIGKILL)
    lose_one(place, command, "iteration=000001", signal.SIGSTOP)
    output, _ = command.communicate(timeout=700)
    assert command.returncode == 0, output
    for iteration in range(2):
        manifest = place.on_line("lost", iteration, "rollout")
        rows = [row for part in manifest.data for row in pq.read_table(f"{place.artifacts}/{part.path}").to_pylist()]
        assert sorted(row["sample_index"] for row in rows) == list(range(32 * iteration, 32 * iteration + 32))
        assert {row["policy_digest"] for row in rows} == {manifest.summary["policy_digest"]}
        assert {row["engine"] for row in rows} == {"engine-0", "engine-1"}
    deadline = time.monotonic() + 60
    while servers(place):
        assert time.monotonic() < deadline, "a server outlived its command"
        time.sleep(0.2)


def lose_one(place: Place, command: subprocess.Popen[str], iteration: str, how: signal.Signals) -> None:
    """Wait until most of an iteration's parts have landed, then send a signal to the server that began first."""
    rollout = place.home / f"artifacts/lost/{iteration}/stage=rollout"
    deadline = time.monotonic() + 600
    while len(list(rollout.glob("*/data/*.parquet"))) < 6:
        assert time.monotonic() < deadline and command.poll() is None
        time.sleep(0.05)
    victim = min(servers(place), key=lambda process: process.create_time())
    for process in [*victim.children(recursive=True), victim]:
        process.send_signal(how)


def test_servers_end_with_a_killed_head(place: Place) -> None:
    """Who would end them is dead: they end themselves."""
    command = place.start("train", "tiny", "--run-id", "killed", "--rollout-engine", "sglang")
    deadline = time.monotonic() + 300
    while not servers(place):
        assert time.monotonic() < deadline and command.poll() is None
        time.sleep(0.1)
    for process in psutil.Process(command.pid).children(recursive=True):
        process.kill()
    command.kill()
    command.wait()
    for pid in place.ray_processes():
        psutil.Process(pid).kill()
    deadline = time.monotonic() + 120
    while servers(place):
        assert time.monotonic() < deadline, "a server outlived all that wanted it"
        time.sleep(0.2)

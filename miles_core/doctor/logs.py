"""Where metrics and images would go, and whether they would arrive."""

from __future__ import annotations

import netrc
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from miles_core.doctor.check import Finding, passed, stopped, warned
from miles_core.doctor.subject import Subject
from miles_core.observe.log_tensorboard import TensorBoard
from miles_core.observe.log_wandb import wandb_folder, wandb_mode, wandb_wanted
from miles_core.observe.redact import redacted_text
from miles_core.pipeline.log import installed

_SECONDS = 5.0


def logs(subject: Subject) -> Finding:
    """Packages of what is asked for are installed; wandb has a key and its server answers. Nothing is sent."""
    given, found = subject.config.logging, ["metrics.parquet in the run's folder"]
    if given.use_tensorboard:
        if not installed("tensorboardX"):
            return stopped("tensorboardX is not installed", "pip install 'miles-flows[tensorboard]'")
        found.append(TensorBoard(subject.config, subject.store).name)
    if not wandb_wanted(subject.config):
        why = "--no-use-wandb" if given.use_wandb is False else "no WANDB_API_KEY, no --use-wandb"
        return passed("; ".join([*found, f"wandb is off ({why})"]))
    if not installed("wandb"):
        if given.use_wandb:
            return stopped("wandb is not installed", "pip install 'miles-flows[wandb]'")
        return warned(
            "WANDB_API_KEY is set and wandb is not installed: nothing goes there",
            "pip install 'miles-flows[wandb]', or unset the variable",
        )
    if wandb_mode(subject.config) == "offline":
        where = wandb_folder(subject.config, subject.store) / "wandb"
        return passed("; ".join([*found, f"wandb is offline, in {where} until `wandb sync`"]))
    host = given.wandb_host or os.environ.get("WANDB_BASE_URL") or _default_host()
    if not os.environ.get("WANDB_API_KEY") and not _in_netrc(host):
        return warned(
            "wandb is asked for and there is no API key: nothing goes there",
            "set WANDB_API_KEY, `wandb login`, or --wandb-mode offline",
        )
    if fault := _unreachable(host):
        return warned(
            f"nothing answers at {redacted_text(host)} ({fault}): the run would go on without wandb",
            "--wandb-mode offline, or mend the network",
        )
    return passed("; ".join([*found, f"wandb at {redacted_text(host)}"]))


def _default_host() -> str:
    import wandb

    return str(wandb.Settings().base_url)


def _in_netrc(host: str) -> bool:
    path = Path(os.environ.get("NETRC") or Path.home() / ".netrc").expanduser()
    try:
        return netrc.netrc(str(path)).authenticators(urlsplit(host).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _unreachable(host: str) -> str | None:
    place = urlsplit(host)
    try:
        port = place.port or (80 if place.scheme == "http" else 443)
        socket.create_connection((place.hostname or "", port), _SECONDS).close()
    except (OSError, ValueError) as fault:
        return str(fault)
    return None

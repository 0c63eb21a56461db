"""What a person at the terminal sees: a line per stage, progress while a stage is long."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_core.pipeline.stage import Outcome

_EVERY_SECONDS = 5.0


class Terminal:
    """Prints progress: in place on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, int]] = {}

    def say(self, what: str) -> None:
        """Something that takes a while begins."""
        print(f"  {what} …", flush=True)

    def progress(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` samples or pairs of a stage."""
        now = time.monotonic()
        shown, before = self._last.get(stage, (now, 0))
        if done < before:
            shown = now
        self._last[stage] = (shown, done)
        if done >= total:
            self._last.pop(stage)
            if sys.stdout.isatty():
                print("\r\033[K", end="", flush=True)
        elif sys.stdout.isatty():
            print(f"\r\033[K  {stage:<11}{done}/{total}", end="", flush=True)
        elif now - shown > _EVERY_SECONDS:
            self._last[stage] = (now, done)
            print(f"  {stage:<11}{done}/{total}", flush=True)


def bytes_text(count: float) -> str:
    """A number of bytes as people write it: 12.3 MB, powers of 1000."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def several(count: int, noun: str) -> str:
    """1 engine, 2 engines, 2,000 engines."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def fork_text(record: Mapping[str, Any]) -> str:
    """Where a run comes from, by its run.json; nothing where it is no fork."""
    parent = record.get("parent")
    if not parent:
        return ""
    chosen = f", from attempt {parent['attempt']}" if parent["attempt"] else ""
    return f"a fork of {parent['run']} at iteration {parent['iteration']}{chosen}"


def seconds_text(seconds: float) -> str:
    """A duration as people write it: 8.1 s, 12 min, 3 h 05 min."""
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def iteration_line(number: int, total: int, took: Sequence[float], rewards: Mapping[int, float]) -> str:
    """One line after an iteration: its seconds, the mean reward and how it moved, and when the run will be done.

    took: seconds of this command's iterations so far. The first one starts all processes, so what is left is
    estimated from the median of the others' newest ten.
    """
    text = f"iteration {number} done in {seconds_text(took[-1])}"
    if number in rewards:
        before = [rewards[i] for i in sorted(rewards) if i < number]
        moved = f" ({rewards[number] - before[-1]:+.3g})" if before else ""
        text += f" · reward {rewards[number]:.4g}{moved}"
    left = total - number - 1
    if left:
        usual = statistics.median(list(took[1:])[-10:] or took)
        text += f" · {left} to go, {'about' if took[1:] else 'at most about'} {seconds_text(left * usual)}"
    return text


def stage_line(outcome: Outcome) -> str:
    """One line: stage, reused or computed, seconds, rows, figures, why."""
    m = outcome.manifest
    word = "reused" if outcome.reused else "computed"
    figures = figures_of(m.stage, m.summary)
    text = f"  {m.stage:<11}{word:<9}{outcome.seconds:7.1f} s {m.rows:6d} row{'' if m.rows == 1 else 's'}"
    if figures:
        text += f"  {figures}"
    if outcome.reused:
        return text + (f"  · {outcome.reason}" if "other versions" in outcome.reason else "")
    return text + f"  · run: {outcome.reason}"


def _waves(s: Mapping[str, Any]) -> list[str]:
    """Prompts that were drawn in waves, in words."""
    if "waves" not in s:
        return []
    why = ", ".join(f"{count} {reason}" for reason, count in s["groups_dropped"].items())
    dropped = [f"dropped {why}"] if why else []
    return [
        f"{several(s['waves'], 'wave')}: {s['groups_kept']} groups kept",
        *dropped,
        *([f"{s['groups_surplus']} surplus"] if s["groups_surplus"] else []),
        *([f"{s['buffer']} in the buffer"] if "buffer" in s else []),
    ]


def figures_of(stage: str, summary: dict[str, Any]) -> str:
    """The few figures of a stage that a person wants at a glance."""
    s = summary
    if stage == "prompts":
        return ", ".join([f"{s['prompts']} prompts", *([f"epoch {s['epoch']}"] if "epoch" in s else []), *_waves(s)])
    if stage == "rollout":
        # In waves all were made before the stage began.
        told = s["kept_microgroups"] and not s.get("in_waves")
        kept = f", {s['kept_microgroups']} microgroups kept" if told else ""
        return f"policy {s['policy_version']} ({s['policy_digest'][:8]}){kept}"
    if stage == "rewards":
        return f"reward mean {s['reward_mean']:.4g}, min {s['reward_min']:.4g}, max {s['reward_max']:.4g}"
    if stage == "advantages":
        return f"{s['zero_std_groups']} of {s['groups']} groups without spread"
    if stage == "update":
        kl = f"kl {s['kl_loss']:.3g}, " if "kl_loss" in s else ""
        return f"loss {s['loss']:.3g}, {kl}grad norm {s['grad_norm']:.3g}, {s['steps']} steps"
    if stage == "sync":
        proof = f"off {s['probe_diff']:.1e}, moved {s['probe_moved']:.1e}"
        return f"{several(s['engines'], 'engine')}, {several(s['modules_bound'], 'module')}, {proof}"
    if stage == "evaluation":
        sets = (f"{name} reward mean {f['reward_mean']:.4f}" for name, f in s["sets"].items())
        return f"{', '.join(sets)}, policy {s['policy_version']} ({s['policy_digest'][:8]})"
    if stage == "policy":
        return f"{several(s['modules'], 'module')}, {s['parameters']} parameters ({s['policy_digest'][:8]})"
    return ""

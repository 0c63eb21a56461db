"""A phase of training: steps, a log line and a checkpoint every so often, and it carries on where it was broken off."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

EVERY = 250
WARMUP = 100
EMA = 0.999
CLIP = 1.0


@dataclass(frozen=True)
class Phase:
    """steps at most; lr after WARMUP steps, constant or, with decay, falling to 0 as half a cosine."""

    name: str
    steps: int
    lr: float
    batch: int
    decay: bool

    def lr_at(self, step: int) -> float:
        warm = min(1.0, (step + 1) / WARMUP)
        falling = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / self.steps)).item()) if self.decay else 1.0
        return self.lr * warm * falling


def run_phase(
    phase: Phase,
    folder: Path,
    seed: int,
    module: nn.Module,
    loss_of: Callable[[torch.Generator], torch.Tensor],
    watch: Callable[[str], dict[str, float]],
    enough: Callable[[dict[str, float]], bool] = lambda figures: False,
) -> None:
    """Train `module`, whose weights are then their exponential mean. loss_of draws its batch from the generator, whose
    state depends on seed, phase and step alone; watch sees the mean and gives figures for the log; a phase may end
    early. Writes <phase>.safetensors and lines of log.jsonl into `folder`."""
    device = next(module.parameters()).device
    weights = dict(module.named_parameters())
    mean = {name: p.detach().clone() for name, p in weights.items()}
    optimizer = torch.optim.AdamW(
        weights.values(), lr=phase.lr, betas=(0.9, 0.99), weight_decay=0.01, fused=device.type == "cuda"
    )
    kept = folder / f"{phase.name}.safetensors"
    step, done = _restore(kept, weights, mean, optimizer)
    started, losses = time.monotonic(), []
    while step < phase.steps and not done:
        generator = torch.Generator(device).manual_seed(_seed(seed, phase.name, step))
        for group in optimizer.param_groups:
            group["lr"] = phase.lr_at(step)
        loss = loss_of(generator)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        nn.utils.clip_grad_norm_(weights.values(), CLIP)
        optimizer.step()
        decay = min(EMA, (step + 1) / (step + 10))
        torch._foreach_lerp_(list(mean.values()), [p.detach() for p in weights.values()], 1 - decay)
        losses.append(loss.detach())
        step += 1
        if step % EVERY == 0 or step == phase.steps:
            with _in_place(weights, mean):
                figures = {"loss": torch.stack(losses).mean().item(), **watch(f"{phase.name}-{step:05}")}
            seconds = round(time.monotonic() - started, 1)
            line = {"phase": phase.name, "step": step, "seconds": seconds, **figures}
            with (folder / "log.jsonl").open("a") as log:
                log.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
            started, losses = time.monotonic(), []
            done = step == phase.steps or enough(figures)
            _save(kept, phase, step, done, weights, mean, optimizer)
    with torch.no_grad():
        for name, p in weights.items():
            p.copy_(mean[name])


class _in_place:
    """The module has these weights inside."""

    def __init__(self, weights: dict[str, nn.Parameter], mean: dict[str, torch.Tensor]) -> None:
        self.weights, self.mean = weights, mean

    @torch.no_grad()
    def __enter__(self) -> None:
        self.own = {name: p.detach().clone() for name, p in self.weights.items()}
        for name, p in self.weights.items():
            p.copy_(self.mean[name])

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        for name, p in self.weights.items():
            p.copy_(self.own[name])


def _seed(seed: int, phase: str, step: int) -> int:
    return (seed * 1_000_003 + sum(phase.encode()) * 7919 + step * 104_729) % 2**62


def _save(
    path: Path,
    phase: Phase,
    step: int,
    done: bool,
    weights: dict[str, nn.Parameter],
    mean: dict[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> None:
    tensors = {f"weights.{name}": p.detach() for name, p in weights.items()}
    tensors |= {f"mean.{name}": t for name, t in mean.items()}
    for name, p in weights.items():
        tensors |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[p].items()}
    said = {"step": str(step), "done": str(int(done)), "phase": json.dumps(asdict(phase))}
    tensors = {name: t.contiguous().cpu().clone() for name, t in tensors.items()}
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished, said)
    os.replace(unfinished, path)


def _restore(
    path: Path, weights: dict[str, nn.Parameter], mean: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> tuple[int, bool]:
    """Step and whether the phase is done; 0 and no where nothing was kept."""
    if not path.exists():
        return 0, False
    with safe_open(path, "pt") as kept, torch.no_grad():
        said = kept.metadata()
        for name, p in weights.items():
            p.copy_(kept.get_tensor(f"weights.{name}"))
            mean[name].copy_(kept.get_tensor(f"mean.{name}"))
            optimizer.state[p] = {
                key: kept.get_tensor(f"optimizer.{name}.{key}").to(p.device)
                for key in ("step", "exp_avg", "exp_avg_sq")
            }
    return int(said["step"]), said["done"] == "1"

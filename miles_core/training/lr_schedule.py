"""The learning rate of each optimizer step: Megatron's shapes (OptimizerParamScheduler.get_lr), as a function."""

import math
from typing import Any


def learning_rate(step: int, args: Any) -> float:
    """Learning rate of optimizer step `step`, counted from 0 over the whole run.

    Warm-up of W = lr_warmup_iters (or int(lr_warmup_fraction * lr_decay_iters)) steps rises linearly and reaches lr
    at step W - 1. lr_warmup_init stands one step before the first: unlike Megatron, whose step 0 takes
    lr_warmup_init itself, step 0 already moves, because an update at learning rate 0 would waste a whole rollout.
    Afterwards, as in Megatron: constant, or from lr at step W down to min_lr at step lr_decay_iters and from there
    on. inverse-square-root is lr * sqrt(max(W, 1) / step), not below min_lr; WSD stays at lr until its last
    lr_wsd_decay_iters steps.
    """
    warmup = args.lr_warmup_iters or int((args.lr_warmup_fraction or 0) * (args.lr_decay_iters or 0))
    if step < warmup:
        return float(args.lr_warmup_init + (args.lr - args.lr_warmup_init) * (step + 1) / warmup)
    if args.lr_decay_style == "constant":
        return float(args.lr)
    if step >= args.lr_decay_iters:
        return float(args.min_lr)
    if args.lr_decay_style == "inverse-square-root":
        return float(max(args.min_lr, args.lr * math.sqrt(max(warmup, 1) / max(step, 1))))
    return float(args.min_lr + (args.lr - args.min_lr) * _share_left(step, warmup, args))


def _share_left(step: int, warmup: int, args: Any) -> float:
    """1 at the start of the decay, 0 at its end."""
    if args.lr_decay_style == "WSD":
        start = args.lr_decay_iters - args.lr_wsd_decay_iters
        done = float(max(0.0, (step - start) / args.lr_wsd_decay_iters))
        style = args.lr_wsd_decay_style or "exponential"
    else:
        done = float((step - warmup) / (args.lr_decay_iters - warmup))
        style = args.lr_decay_style
    if style == "linear":
        return 1.0 - done
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * done) + 1.0)
    if style == "exponential":
        return 2.0 * math.pow(0.5, done) - 1.0
    if style == "minus_sqrt":
        return 1.0 - math.sqrt(done)
    raise ValueError(f"unknown decay style {style!r}")

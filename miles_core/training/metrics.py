"""Metrics of an optimizer step: summed over micro-batches and ranks in float64, then one row of the update."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist

from miles_core.store.digest import ROW_DIGEST
from miles_core.store.schemas import UPDATE

SUMS = ("loss", "policy_loss", "kl_loss", "clip_frac", "ratio_mean", "log_prob_mean_abs_diff", "adv_mean")
LARGEST = "ratio_max_abs_dev"


class StepMetrics:
    """Sums over pairs of what a loss reports, and the largest ratio deviation. A metric that a loss leaves out is 0."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self._largest = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, loss: torch.Tensor, metrics: Mapping[str, Any]) -> None:
        """One micro-batch: its summed loss and the loss formula's metrics."""
        values = {"loss": loss, **metrics}
        for i, name in enumerate(SUMS):
            if name in values:
                self._sums[i] += torch.as_tensor(values[name]).detach().double()
        if LARGEST in values:
            self._largest = torch.maximum(self._largest, torch.as_tensor(values[LARGEST]).detach().double())

    def total(self, pairs: int) -> dict[str, float]:
        """Over all ranks: the means over `pairs` by name (0 where there is none) and the largest deviation. A
        collective."""
        sums, largest = self._sums.cpu(), self._largest.cpu()
        dist.all_reduce(sums, op=dist.ReduceOp.SUM)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        means = {name: value / max(pairs, 1) for name, value in zip(SUMS, sums.tolist(), strict=True)}
        return means | {LARGEST: largest.item()}


def update_table(rows: list[dict[str, Any]]) -> pa.Table:
    """The update's rows with schema UPDATE; row digests are filled in when the part is written."""
    return pa.Table.from_pylist([{**row, ROW_DIGEST: ""} for row in rows], schema=UPDATE)

"""Metrics of an optimizer step: summed over micro-batches and ranks in float64, then one row of the update."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist

from miles_core.errors import StageError
from miles_core.store.digest import ROW_DIGEST
from miles_core.store.schemas import OWN_METRIC, update_schema
from miles_core.training.distributed import gather

SUMS = ("loss", "policy_loss", "kl_loss", "clip_frac", "ratio_mean", "log_prob_mean_abs_diff", "adv_mean")
LARGEST = "ratio_max_abs_dev"
# What Flow-GRPO's formula reports too, and the trainer counts itself.
_COUNT = "pairs"
_TAKEN = {*update_schema().names} - {*SUMS, LARGEST, _COUNT}
_NAME = re.compile(r"[A-Za-z_]\w*")


class StepMetrics:
    """Sums over pairs of what a loss reports, and the largest ratio deviation.

    own: the loss formula is a user's, which may report anything: what it leaves out is None, and each further name becomes
    a metric of its own, a mean over the pairs too.
    """

    def __init__(self, device: torch.device, *, own: bool = False) -> None:
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._own = own
        self._sums = {} if own else dict.fromkeys(SUMS, self._zero)
        self._largest = {} if own else {LARGEST: self._zero}

    def add(self, loss: torch.Tensor, metrics: Mapping[str, Any]) -> torch.Tensor:
        """One micro-batch: its summed loss and the loss formula's metrics. Whether all of them are finite, (), bool. Raises
        StageError for a user's metric that is no number."""
        values = {**metrics, "loss": loss}
        numbers = {name: self._number(name, value) for name, value in values.items()}
        for name, number in numbers.items():
            if name == LARGEST:
                self._largest[name] = torch.maximum(self._largest.get(name, self._zero), number)
            elif name in self._sums or (self._own and name != _COUNT):
                self._sums[name] = self._sums.get(name, self._zero) + number
        return torch.isfinite(torch.stack(list(numbers.values()))).all()

    def total(self, pairs: int) -> dict[str, float | None]:
        """Over all ranks: the means over `pairs` by name (0 where there is none) and the largest deviation. A
        collective."""
        names = sorted(set().union(*gather(list(self._sums)))) if self._own else list(SUMS)
        largest = any(gather(bool(self._largest))) if self._own else True
        sums = torch.stack([self._sums.get(name, self._zero) for name in names or [LARGEST]]).cpu()
        most = self._largest.get(LARGEST, self._zero).cpu()
        dist.all_reduce(sums, op=dist.ReduceOp.SUM)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        means: dict[str, float | None] = dict.fromkeys(SUMS) | {LARGEST: most.item() if largest else None}
        means |= {"loss": 0.0}
        return means | {name: value / max(pairs, 1) for name, value in zip(names, sums.tolist(), strict=False)}

    def _number(self, name: str, value: Any) -> torch.Tensor:
        if not self._own:
            return torch.as_tensor(value).detach().double()
        try:
            if not _NAME.fullmatch(name) or name in _TAKEN:
                raise ValueError("the name is taken, or more than letters, digits and underscores")
            return torch.as_tensor(value).detach().double().reshape(()).to(self._zero.device)
        except (TypeError, ValueError, RuntimeError) as fault:
            raise StageError(
                f"--custom-loss-function-path reported the metric {name!r}, which cannot be taken ({fault}): put a number or "
                "a tensor of one into metrics, a sum over the pairs"
            ) from None


def update_table(rows: Sequence[Mapping[str, Any]], *, own: bool = False) -> pa.Table:
    """The update's rows with the schema of `own`'s loss; row digests are filled in when the part is written."""
    known = {*update_schema().names}
    extra = sorted({name for row in rows for name in row} - known)
    schema = update_schema(extra if own else None)
    named = [{(f"{OWN_METRIC}{n}" if n in extra else n): value for n, value in row.items()} for row in rows]
    return pa.Table.from_pylist([{**row, ROW_DIGEST: ""} for row in named], schema=schema)

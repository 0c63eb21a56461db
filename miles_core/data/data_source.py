"""The stock data source: prompts in a seeded order, an exact position, and a buffer that is served first."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from miles_core.data.prompts import load_prompts, resolve_prompt_path
from miles_core.data.sample import Sample
from miles_core.errors import InputError
from miles_core.store.digest import ROW_DIGEST, canonical_json
from miles_core.store.schemas import PROMPTS
from miles_core.user_code import own_function

SEED_MODULUS = 2**31

BufferFilter = Callable[[Any, int | None, list[list[Sample]], int], list[list[Sample]]]


@dataclass
class DrawnSample(Sample):
    """A sample to be made, with the row of its prompt in the prompt file and the pass over the file it was
    drawn in; both -1 for a sample that was not drawn from a file."""

    prompt_index: int = -1
    epoch: int = -1


def epoch_order(rollout_seed: int, epoch: int, count: int) -> np.ndarray:
    """(count,) int64: the order in which `epoch` visits the prompts; another one in each epoch."""
    return np.random.default_rng(np.random.SeedSequence([rollout_seed, epoch])).permutation(count)


def sample_seed(rollout_seed: int, group_index: int, n_samples_per_prompt: int, offset: int) -> int:
    """Seed of the group's sample at `offset`: (rollout_seed + group_index * n) mod 2^31 + offset, as the engines count.

    Groups lie n apart, so no two samples of a run share a seed until 2^31 samples have been drawn.
    """
    base = (rollout_seed + group_index * n_samples_per_prompt) % SEED_MODULUS
    return base + offset


def pop_first(args: Any, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """Take up to `num_samples` groups from the buffer's head; the default of --buffer-filter-path."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


class RolloutDataSourceWithBuffer:
    """Default of --data-source-path.

    Reads args.prompt_data, input_key, metadata_key, rm_type, rollout_seed and n_samples_per_prompt. Raises
    InputError where the prompts are at fault. `buffer_filter` chooses what is taken from the buffer: args.buffer_filter_path,
    else pop_first.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.prompts = load_prompts(
            resolve_prompt_path(args.prompt_data),
            input_key=args.input_key,
            metadata_key=args.metadata_key,
            rm_type=args.rm_type,
            rm_types=getattr(args, "rm_types", None),
            custom=bool(getattr(args, "custom_rm_path", None)),
        )
        own = own_function("buffer_filter_path", args) if getattr(args, "buffer_filter_path", None) else None
        self.buffer_filter: BufferFilter = own or pop_first
        self.buffer: list[list[Sample]] = []
        self._epoch = 0
        self._position = 0
        self._next_group_index = 0
        self._order = self._order_of(0)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """`num_samples` groups of n_samples_per_prompt samples: first from the buffer, then fresh prompts.

        A batch that reaches the end of an epoch goes on in the next one.
        """
        groups: list[list[Sample]] = []
        if self.buffer:
            groups = self._from_buffer(num_samples)
        while len(groups) < num_samples:
            groups.append(self._draw())
        return groups

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Put groups at the buffer's end, to be made again under their own indices and seeds.

        What has been generated or scored does not stay with them: the buffer in memory is the one a resumed
        run loads. Raises InputError where a group is not whole or is there already.
        """
        present = {group[0].group_index for group in self.buffer}
        for group in samples:
            kept = [_to_be_made(sample) for sample in group]
            if len(kept) != self.args.n_samples_per_prompt or len({s.group_index for s in kept}) != 1:
                raise InputError(
                    f"add_samples takes lists of the {self.args.n_samples_per_prompt} samples of one group, not of "
                    f"{len(kept)} samples of groups {sorted({s.group_index for s in kept})}: pass whole groups"
                )
            if kept[0].group_index in present:
                raise InputError(f"group {kept[0].group_index} is in the buffer already: add each group once")
            present.add(kept[0].group_index)
            self.buffer.append(list(kept))

    def state_dict(self) -> dict[str, Any]:
        """The exact position, as JSON values."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "next_group_index": self._next_group_index,
            "buffer": [[_json_of(sample) for sample in group] for group in self.buffer],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position that `state_dict` gave. Raises InputError where it does not fit the prompt file."""
        try:
            epoch, position = int(state["epoch"]), int(state["position"])
            next_group_index = int(state["next_group_index"])
            buffer: list[list[Sample]] = [[DrawnSample(**values) for values in group] for group in state["buffer"]]
        except (KeyError, TypeError, ValueError) as fault:
            raise InputError(
                f"this is no state of the data source ({fault!r}): give one that state_dict made"
            ) from None
        if epoch < 0 or next_group_index < 0 or not 0 <= position < len(self.prompts):
            raise InputError(
                f"the data source's position {position} of epoch {epoch} lies outside the {len(self.prompts)} prompts of "
                f"{self.args.prompt_data}: use the prompt file that it was saved with, or start a new run"
            )
        self._epoch, self._position, self._next_group_index = epoch, position, next_group_index
        self.buffer = buffer
        self._order = self._order_of(epoch)

    def save(self, rollout_id: int) -> None:
        """Write the state to state.json in args.data_source_state_dir, where that is given."""
        path = self._state_path()
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_bytes(canonical_json(self.state_dict()))
        os.replace(temporary, path)

    def load(self, rollout_id: int | None = None) -> None:
        """Read the state from state.json in args.data_source_state_dir, where that is given."""
        path = self._state_path()
        if path is None:
            return
        try:
            state = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise InputError(f"{path} does not exist: give the folder that save wrote to") from None
        except ValueError as fault:
            raise InputError(f"{path} is not JSON ({fault}): give the file that save wrote") from None
        self.load_state_dict(state)

    def _from_buffer(self, num_samples: int) -> list[list[Sample]]:
        before = list(self.buffer)
        answer = self.buffer_filter(self.args, None, self.buffer, num_samples)
        if not isinstance(answer, list) or any(all(group is not one for one in before) for group in answer):
            raise InputError(
                "the buffer filter returned something else than a list of groups of the buffer: return those"
            )
        if len(answer) > num_samples:
            raise InputError(
                f"the buffer filter returned {len(answer)} groups and {num_samples} were asked for: return at most those"
            )
        # What is served leaves the buffer, also where the filter left it there.
        self.buffer = [group for group in self.buffer if all(group is not taken for taken in answer)]
        return list(answer)

    def _state_path(self) -> Path | None:
        folder = getattr(self.args, "data_source_state_dir", None)
        return Path(folder) / "state.json" if folder else None

    def _order_of(self, epoch: int) -> np.ndarray:
        return epoch_order(self.args.rollout_seed, epoch, len(self.prompts))

    def _draw(self) -> list[Sample]:
        prompt, epoch = self.prompts[self._order[self._position]], self._epoch
        group, n = self._next_group_index, self.args.n_samples_per_prompt
        self._next_group_index += 1
        self._position += 1
        if self._position == len(self.prompts):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        return [
            DrawnSample(
                group_index=group,
                index=group * n + offset,
                prompt=prompt.text,
                seed=sample_seed(self.args.rollout_seed, group, n, offset),
                metadata=json.loads(json.dumps(prompt.metadata)),
                prompt_index=prompt.index,
                epoch=epoch,
            )
            for offset in range(n)
        ]


def _json_of(sample: Sample) -> dict[str, Any]:
    """What a sample to be made is made from, as JSON values."""
    made = asdict(_to_be_made(sample))
    names = ("group_index", "index", "prompt", "seed", "metadata", "negative_prompt", "prompt_index", "epoch")
    return {name: made[name] for name in names}


def samples_to_table(samples: Iterable[Iterable[Sample]]) -> pa.Table:
    """Groups as rows of the prompts schema, in sample order; `row_digest` is filled when the table is written.

    Raises InputError where two samples have one index, or a sample brings a negative prompt of its own.
    """
    rows = sorted((_to_be_made(sample) for group in samples for sample in group), key=lambda sample: sample.index)
    for before, after in pairwise(rows):
        if before.index == after.index:
            raise InputError(f"two samples have the index {after.index}: a data source gives each sample its own")
    for sample in rows:
        if sample.negative_prompt is not None:
            raise InputError(
                f"sample {sample.index} brings a negative prompt and one per sample is not there yet: "
                "use --diffusion-negative-prompt"
            )
    columns: dict[str, list[Any]] = {
        "sample_index": [s.index for s in rows],
        "group_index": [s.group_index for s in rows],
        "prompt": [s.prompt for s in rows],
        "seed": [s.seed for s in rows],
        "prompt_index": [s.prompt_index for s in rows],
        "epoch": [s.epoch for s in rows],
        "metadata": [canonical_json(s.metadata).decode() for s in rows],
        "rm_type": [s.rm_type or None for s in rows],
        ROW_DIGEST: [""] * len(rows),
    }
    return pa.table(columns, schema=PROMPTS)


def table_to_samples(table: pa.Table) -> list[list[Sample]]:
    """Rows of the prompts schema as groups in group order, each in sample order."""
    groups: dict[int, list[Sample]] = {}
    for row in sorted(table.to_pylist(), key=lambda row: (row["group_index"], row["sample_index"])):
        sample = DrawnSample(
            group_index=row["group_index"],
            index=row["sample_index"],
            prompt=row["prompt"],
            seed=row["seed"],
            metadata=json.loads(row["metadata"]),
            prompt_index=row["prompt_index"],
            epoch=row["epoch"],
        )
        groups.setdefault(sample.group_index, []).append(sample)
    return list(groups.values())


def _to_be_made(sample: Sample) -> DrawnSample:
    """A copy of what the sample is made from, nothing of what was made."""
    place = (sample.prompt_index, sample.epoch) if isinstance(sample, DrawnSample) else (-1, -1)
    try:
        metadata = json.loads(canonical_json(sample.metadata))
    except (TypeError, ValueError) as fault:
        raise InputError(f"the metadata of sample {sample.index} is not JSON ({fault}): use plain values") from None
    return DrawnSample(
        group_index=sample.group_index,
        index=sample.index,
        prompt=sample.prompt,
        seed=sample.seed,
        metadata=metadata,
        negative_prompt=sample.negative_prompt,
        prompt_index=place[0],
        epoch=place[1],
    )

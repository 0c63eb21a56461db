"""The data source of an iteration, where the previous iteration left it: the stock one, or a user's own class.

Neither lives longer than an iteration: what it knows is what was committed with the prompts.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from miles_core.config import RunConfig
from miles_core.config.folders import code_path, own_args
from miles_core.data.data_source import RolloutDataSourceWithBuffer
from miles_core.data.sample import Sample
from miles_core.errors import InputError, StageError
from miles_core.store.digest import canonical_json
from miles_core.store.files import Files
from miles_core.store.manifest import Manifest
from miles_core.store.parts import Part, read_bytes, write_file
from miles_core.store.run_store import Attempt
from miles_core.user_code import load_hook, naming

STATE, FOLDER = "state.json", "data_source/"
_OPTION = "data_source_path"


def own_source(config: RunConfig) -> type | None:
    """The user's class; None where there is none. Raises InputError for what is no data source."""
    path = config.sampling.data_source_path
    found: Any = load_hook(_OPTION, path, code_path(config)) if path else None
    return found


def reads_prompt_file(config: RunConfig) -> bool:
    """Whether the prompts come from --prompt-data as the stock data source reads it."""
    own = own_source(config)
    return own is None or issubclass(own, RolloutDataSourceWithBuffer)


class Source:
    """A data source at work. `folder` holds a user's files while it is."""

    def __init__(self, config: RunConfig, source: Any, folder: Path | None, during: str) -> None:
        self.config, self.source, self.folder, self._during = config, source, folder, during
        self._drawn: set[int] = set()

    def draw(self, count: int) -> list[list[Sample]]:
        """`count` groups. Raises StageError for an own source's answer that cannot be generated."""
        with self._named():
            groups = self.source.get_samples(count)
        if self.folder is not None:
            self._check(groups, count)
        for index in (group[0].group_index for group in groups):
            if index in self._drawn:
                raise StageError(f"group {index} was drawn twice{self._during}: a data source serves a group once")
            self._drawn.add(index)
        return list(groups)

    def put_back(self, groups: list[list[Sample]]) -> None:
        """Groups to be served again, in later iterations."""
        if groups:
            with self._named():
                self.source.add_samples(groups)

    def save(self, iteration: int, files: Files, attempt: Attempt) -> list[Part]:
        """Write what the next iteration goes on from beside the prompts."""
        if self.folder is None:
            return [write_file(files, attempt.path(STATE), canonical_json(self.source.state_dict()))]
        with self._named():
            self.source.save(iteration)
        saved = sorted(path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink())
        names = {path: path.relative_to(self.folder).as_posix() for path in saved}
        return [write_file(files, attempt.path(f"{FOLDER}{name}"), path.read_bytes()) for path, name in names.items()]

    @property
    def figures(self) -> dict[str, int]:
        """Epoch and buffer size, where the source tells."""
        found = {"epoch": self.source.state_dict()["epoch"]} if self.folder is None else {}
        buffer = getattr(self.source, "buffer", None)
        return found | ({"buffer": len(buffer)} if buffer is not None else {})

    def _named(self) -> contextlib.AbstractContextManager[None]:
        if self.folder is None:
            return contextlib.nullcontext()
        return naming(_OPTION, str(self.config.sampling.data_source_path), self._during)

    def _check(self, groups: Any, count: int) -> None:
        who, n = f"--data-source-path {self.config.sampling.data_source_path}", self.config.data.n_samples_per_prompt
        if not isinstance(groups, list | tuple) or len(groups) != count:
            told = len(groups) if isinstance(groups, list | tuple) else type(groups).__name__
            raise StageError(f"{who}: get_samples({count}) returned {told}{self._during}: return {count} groups")
        for group in groups:
            if fault := _fault(group, n):
                raise StageError(f"{who}: get_samples returned a group {fault}{self._during}")


def _fault(group: Any, n: int) -> str | None:
    """Why a group cannot be generated and told apart in the store, in words."""
    if not isinstance(group, list | tuple) or len(group) != n or not all(isinstance(s, Sample) for s in group):
        return f"that is no list of {n} samples (--n-samples-per-prompt)"
    first: Sample = group[0]
    for offset, sample in enumerate(group):
        numbers = (sample.group_index, sample.index, sample.seed)
        if not all(type(number) is int and number >= 0 for number in numbers) or not isinstance(sample.prompt, str):
            return (
                f"with a sample of group_index, index, seed {numbers}: give whole numbers from 0, and a text as prompt"
            )
        if (sample.group_index, sample.prompt) != (first.group_index, first.prompt):
            return f"{first.group_index} that mixes groups or prompts: a group is the samples of one prompt"
        if sample.index != sample.group_index * n + offset:
            return f"{first.group_index} with the index {sample.index}: number samples group_index * {n} + offset"
        if sample.seed != first.seed + offset:
            return f"{first.group_index} with the seeds {first.seed} and {sample.seed}: give sample i the first one's seed + i"
    return None


@contextlib.contextmanager
def opened(config: RunConfig, iteration: int, files: Files, before: Manifest | None) -> Iterator[Source]:
    """The data source as `before`, the previous iteration's prompts, left it; as it begins where there is none."""
    own, during = own_source(config), f" in iteration {iteration}"
    if own is None:
        source = RolloutDataSourceWithBuffer(own_args(config))
        if before is not None:
            source.load_state_dict(json.loads(read_bytes(files, _state(before))))
        yield Source(config, source, None, during)
        return
    with tempfile.TemporaryDirectory(prefix="miles-data-source-") as name:
        folder = Path(name)
        _restore(files, before, folder)
        args = own_args(config)
        # The reference's own classes write under args.save and read under args.load.
        args.data_source_state_dir = args.save = args.load = str(folder)
        with naming(_OPTION, str(config.sampling.data_source_path), during):
            theirs = own(args)
            if before is not None:
                theirs.load(before.iteration)
        yield Source(config, theirs, folder, during)


def _state(before: Manifest) -> Part:
    found: Sequence[Part] = before.under(STATE)
    if not found:
        raise StageError(
            f"{before.folder} was drawn by an own data source, from which the stock one cannot go on: give the "
            "--data-source-path that drew it"
        )
    return found[0]


def _restore(files: Files, before: Manifest | None, folder: Path) -> None:
    parts = () if before is None else (*before.under(FOLDER), *before.under(STATE))
    for part in parts:
        assert before is not None
        name = PurePosixPath(part.path.removeprefix(f"{before.folder}/").removeprefix(FOLDER))
        if name.is_absolute() or ".." in name.parts:
            raise InputError(f"{files.url(part.path)} leads outside the data source's folder: delete this attempt")
        path = folder.joinpath(*name.parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(read_bytes(files, part))

"""What is logged, and what a place that it goes to has to be able to do."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from miles_core.observe.rows import Row

IMAGES = "rollout_media/sample_images"


@dataclass(frozen=True)
class Entry:
    """An iteration or an evaluation. `key` says which and of what content; `when`: seconds since 1970 of its commit;
    `read_rows`: its samples with pictures, from the best reward to the worst, and what each is."""

    key: str
    iteration: int
    when: float
    metrics: Mapping[str, float]
    read_rows: Callable[[], tuple[list[Row], dict[int, str]]] = field(default=lambda: ([], {}))


class Destination(Protocol):
    """A place beside the store. What it raises is told once, and never ends a run."""

    @property
    def name(self) -> str:
        """What logged.json calls it."""

    def open(self) -> None:
        """Be ready to take entries; called before each."""

    def send(self, entry: Entry) -> None:
        """Take an entry; one that it has is not taken twice."""

    def arrived(self) -> Collection[str]:
        """The keys of entries that stay, whatever ends this command."""

    def close(self) -> None:
        """Nothing more comes from this command."""

"""A part as a file that is read here and there: a reader of a few columns fetches their bytes alone."""

import io

from miles_core.store.files import DamagedError, Files
from miles_core.store.parts import Part
from miles_core.store.tombstone import pruned_part


class PartFile(io.RawIOBase):
    """A part's bytes, from a folder or a bucket; nothing is read before it is asked for. The length is the manifest's.

    Reading raises DamagedError for a part that is missing or shorter, PrunedError for one that was pruned; the error is
    also kept in `fault`, for those who read through a library that words it otherwise.
    """

    def __init__(self, files: Files, part: Part) -> None:
        self.files, self.part, self.fault = files, part, None
        self._at = 0

    fault: Exception | None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.part.bytes}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        rest = max(self.part.bytes - self._at, 0)
        count = rest if size is None or size < 0 else min(size, rest)
        try:
            data = self._range(self._at, count) if count else b""
        except Exception as fault:
            self.fault = fault
            raise
        self._at += count
        return data

    def _range(self, start: int, count: int) -> bytes:
        where = self.files.url(self.part.path)
        try:
            data = self.files.read_range(self.part.path, start, start + count)
        except FileNotFoundError:
            raise pruned_part(self.files, self.part.path) or DamagedError(f"{where} is missing") from None
        if len(data) != count:
            raise DamagedError(f"{where} is shorter than the {self.part.bytes} bytes that its manifest says")
        return data

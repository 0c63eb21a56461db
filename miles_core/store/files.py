"""Files under one artifact root, a local folder or a bucket: the few operations the store is built on.

A path is relative to the root, with forward slashes. Creation is exclusive and atomic: a reader sees a whole
file or none, and of several writers one wins.
"""

import contextlib
import errno
import os
import posixpath
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from filelock import FileLock

from miles_core.errors import StoreError

_HIDDEN = (".tmp-", ".lock-", ".probe-")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)


class DamagedError(RuntimeError):
    """An artifact is missing, truncated or altered; the message names the file and what to do."""


@dataclass(frozen=True)
class Files:
    """An artifact root: a folder, or s3://bucket/prefix. Picklable, so that Ray actors write parts themselves; for
    any number of threads and processes.

    Writes raise StoreError where the disk is full, or the root refuses or does not answer; see s3 for a bucket.
    """

    root: str

    @property
    def local(self) -> bool:
        return "://" not in self.root

    def url(self, path: str) -> str:
        """Full path or URL of a file, for people and for other tools."""
        return posixpath.join(self.root, path)

    def read(self, path: str) -> bytes:
        """Whole content. Raises FileNotFoundError."""
        if not self.local:
            return _s3().read(self.url(path))
        return Path(self.url(path)).read_bytes()

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """The bytes from `start` up to `stop`, fewer where the file ends before. Raises FileNotFoundError."""
        if not self.local:
            return _s3().read_range(self.url(path), start, stop)
        with open(self.url(path), "rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def exists(self, path: str) -> bool:
        """Whether there is a file."""
        try:
            self.size(path)
        except FileNotFoundError:
            return False
        return True

    def size(self, path: str) -> int:
        """Bytes. Raises FileNotFoundError."""
        if not self.local:
            return _s3().size(self.url(path))
        return Path(self.url(path)).stat().st_size

    def list(self, path: str) -> list[str]:
        """Names directly under a folder, sorted; empty where there is no folder."""
        if not self.local:
            found = _s3().names(self.url(path))
        else:
            try:
                found = os.listdir(self.url(path))
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(name for name in found if name and not name.startswith(_HIDDEN))

    def create(self, path: str, data: bytes | memoryview) -> bool:
        """Write a file that must not exist yet. False, and nothing changed, where it exists already."""
        if not self.local:
            return _s3().create(self.url(path), data)
        with self._writing(path) as target, _temporary(target, data) as temporary:
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
            _sync_folder(target.parent)
            return True

    def replace(self, path: str, data: bytes | memoryview) -> None:
        """Write a file whether it exists or not, atomically."""
        if not self.local:
            _s3().replace(self.url(path), data)
            return
        with self._writing(path) as target:
            _replace(target, data)

    def edit(self, path: str, change: Callable[[bytes | None], bytes | None]) -> bytes | None:
        """Read, change and write as one step; what is in the file afterwards.

        `change` gets the content, or None where there is no file, and returns the new content, or None to leave all as
        it is. It may be called several times, where others edit the same file. Of all edits none is lost.
        """
        if not self.local:
            return _s3().edit(self.url(path), change)
        with self._writing(path) as target, FileLock(target.parent / f".lock-{target.name}"):
            try:
                data = target.read_bytes()
            except FileNotFoundError:
                data = None
            changed = change(data)
            if changed is None:
                return data
            _replace(target, changed)
            return changed

    def delete(self, path: str) -> None:
        """Remove a file; one that is missing is fine."""
        if not self.local:
            _s3().delete(self.url(path))
            return
        Path(self.url(path)).unlink(missing_ok=True)

    def remove_tree(self, path: str) -> None:
        """Remove a folder with all in it; one that is missing is fine."""
        if not self.local:
            _s3().remove_tree(self.url(path))
            return
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.url(path))

    def modified(self, path: str) -> float:
        """When a file was written, in seconds since 1970. Raises FileNotFoundError."""
        if not self.local:
            return float(_s3().modified(self.url(path)))
        return Path(self.url(path)).stat().st_mtime

    @contextlib.contextmanager
    def _writing(self, path: str) -> Iterator[Path]:
        target = Path(self.url(path))
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            yield target
        except OSError as fault:
            if fault.errno in _FULL:
                raise StoreError(
                    f"no space left on {self.root} for {path}: free some and run the same command again to resume"
                ) from fault
            if fault.errno in _REFUSED:
                raise StoreError(
                    f"{target} cannot be written ({fault.strerror}): make {self.root} writable and run the same command "
                    "again to resume"
                ) from fault
            raise


def prove_conditional_put(files: Files) -> None:
    """Before a run on a bucket begins: see to it that the endpoint honours If-None-Match and If-Match, without which
    two commands could overwrite each other's work. Once a process and root.

    Raises InputError where it does not, or where the root cannot be reached, listed or written.
    """
    if not files.local:
        _s3().prove_conditional_put(files.root)


def reach(files: Files) -> None:
    """Before a command that only looks: see to it that the root answers. Raises InputError."""
    if not files.local:
        _s3().reach(files.root)


def _s3() -> ModuleType:
    # Takes a second to import, which a local root does not need.
    from miles_core.store import s3

    return s3


@contextlib.contextmanager
def _temporary(target: Path, data: bytes | memoryview) -> Iterator[Path]:
    """A whole copy on disk beside the target, gone afterwards."""
    temporary = target.parent / f".tmp-{uuid.uuid4().hex}"
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _replace(target: Path, data: bytes | memoryview) -> None:
    with _temporary(target, data) as temporary:
        os.replace(temporary, target)
        _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

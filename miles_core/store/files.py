"""Files under one artifact root, local or s3, through fsspec: the few operations the store is built on.

A path is relative to the root, with forward slashes. Creation is exclusive and atomic: a reader sees a whole
file or none, and of several writers one wins.
"""

import os
import posixpath
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from filelock import FileLock


class DamagedError(RuntimeError):
    """An artifact is missing, truncated or altered; the message names the file and what to do."""


@dataclass(frozen=True)
class Files:
    """An artifact root. Picklable, so that Ray actors write parts themselves."""

    root: str

    @property
    def local(self) -> bool:
        return "://" not in self.root

    def url(self, path: str) -> str:
        """Full path or URL of a file, for people and for other tools."""
        return posixpath.join(self.root, path)

    def read(self, path: str) -> bytes:
        """Whole content. Raises FileNotFoundError."""
        return self._fs.cat_file(self.url(path))

    def exists(self, path: str) -> bool:
        return self._fs.exists(self.url(path))

    def size(self, path: str) -> int:
        """Bytes. Raises FileNotFoundError."""
        return int(self._fs.size(self.url(path)))

    def list(self, path: str) -> list[str]:
        """Names directly under a folder, sorted; empty where there is no folder."""
        try:
            found = self._fs.ls(self.url(path), detail=False)
        except FileNotFoundError:
            return []
        names = (posixpath.basename(str(name).rstrip("/")) for name in found)
        return sorted(name for name in names if name and not name.startswith((".tmp-", ".lock-")))

    def create(self, path: str, data: bytes) -> bool:
        """Write a file that must not exist yet. False, and nothing changed, where it exists already."""
        if not self.local:
            try:
                self._fs.pipe_file(self.url(path), data, mode="create")
            except FileExistsError:
                return False
            return True
        target, temporary = self._temporary(path, data)
        try:
            os.link(temporary, target)
        except FileExistsError:
            return False
        finally:
            os.unlink(temporary)
        _sync_folder(target.parent)
        return True

    def replace(self, path: str, data: bytes) -> None:
        """Write a file whether it exists or not, atomically."""
        if not self.local:
            self._fs.pipe_file(self.url(path), data)
            return
        target, temporary = self._temporary(path, data)
        os.replace(temporary, target)
        _sync_folder(target.parent)

    def edit(self, path: str, change: Callable[[bytes | None], bytes | None]) -> bytes | None:
        """Read, change and write back as one: of several editors none loses another's change.

        `change` gets the content, None where there is no file, and returns the new one, or None to leave it. A race
        may call it again. Returns what is in the file afterwards.
        """
        target = Path(self.url(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / f".lock-{target.name}"):
            before = target.read_bytes() if target.exists() else None
            after = change(before)
            if after is None:
                return before
            self.replace(path, after)
            return after

    def delete(self, path: str) -> None:
        """Remove a file; one that is missing is fine."""
        if not self.local:
            self._fs.rm_file(self.url(path))
            return
        Path(self.url(path)).unlink(missing_ok=True)

    def modified(self, path: str) -> float:
        """When a file was written, in seconds since 1970. Raises FileNotFoundError."""
        if not self.local:
            return float(self._fs.modified(self.url(path)).timestamp())
        return Path(self.url(path)).stat().st_mtime

    @property
    def _fs(self) -> Any:
        if self.local:
            return fsspec.filesystem("file")
        return fsspec.filesystem(self.root.split("://", 1)[0], use_listings_cache=False)

    def _temporary(self, path: str, data: bytes) -> tuple[Path, Path]:
        target = Path(self.url(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.parent / f".tmp-{uuid.uuid4().hex}"
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return target, temporary


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

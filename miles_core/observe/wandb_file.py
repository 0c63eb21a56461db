"""wandb's own file of a run, read while it grows: what was logged and lies on the disk."""

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER, _BLOCK, _CHUNK = 7, 32768, 7
_FULL, _FIRST, _LAST = 1, 2, 4


class RunFile:
    """A run-ID.wandb. It is a log of LevelDB's format behind a header of 7 bytes: 32 KiB blocks of chunks, each with CRC-32,
    length and kind; a record is a protobuf message."""

    def __init__(self, path: Path) -> None:
        self.path, self._at = path, _HEADER

    def new_rows(self) -> list[dict[str, Any]]:
        """The rows logged since the last call, as far as they are whole; nested names with slashes."""
        from wandb.proto.wandb_internal_pb2 import Record

        rows = []
        for data, end in self._records():
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = ((item.key or "/".join(item.nested_key), item.value_json) for item in record.history.item)
                rows.append({name: json.loads(text) for name, text in items})
            self._at = end
        return rows

    def _records(self) -> Iterator[tuple[bytes, int]]:
        """Each whole record from where the last call ended, and where it ends."""
        start = self._at
        with self.path.open("rb") as file:
            file.seek(start)
            data = file.read()
        at, parts = 0, list[bytes]()
        while at + _CHUNK <= len(data):
            left = _BLOCK - (start + at) % _BLOCK
            if left < _CHUNK:
                at += left
                continue
            crc, length, kind = struct.unpack_from("<IHB", data, at)
            chunk = data[at + _CHUNK : at + _CHUNK + length]
            if len(chunk) < length or zlib.crc32(data[at + _CHUNK - 1 : at + _CHUNK] + chunk) != crc:
                return
            at += _CHUNK + length
            parts = [chunk] if kind in (_FULL, _FIRST) else [*parts, chunk]
            if kind in (_FULL, _LAST):
                yield b"".join(parts), start + at

"""What another program sees of an artifact root, and does to it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from miles_core.store.files import Files


class Root(Protocol):
    """An artifact root; paths are relative to it."""

    @property
    def files(self) -> Files: ...

    def get(self, path: str) -> bytes: ...

    def put(self, path: str, data: bytes) -> None: ...

    def remove(self, path: str) -> None: ...

    def names(self) -> list[str]:
        """All files, hidden ones too."""


@dataclass(frozen=True)
class FolderRoot:
    folder: Path

    @property
    def files(self) -> Files:
        return Files(str(self.folder))

    def get(self, path: str) -> bytes:
        return (self.folder / path).read_bytes()

    def put(self, path: str, data: bytes) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_bytes(data)

    def remove(self, path: str) -> None:
        (self.folder / path).unlink()

    def names(self) -> list[str]:
        return sorted(str(p.relative_to(self.folder)) for p in self.folder.rglob("*") if p.is_file())


@dataclass(frozen=True)
class BucketRoot:
    bucket: str
    prefix: str
    client: Any

    @property
    def files(self) -> Files:
        return Files(f"s3://{self.bucket}/{self.prefix}")

    def get(self, path: str) -> bytes:
        data: bytes = self.client.get_object(Bucket=self.bucket, Key=f"{self.prefix}/{path}")["Body"].read()
        return data

    def put(self, path: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"{self.prefix}/{path}", Body=data)

    def remove(self, path: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=f"{self.prefix}/{path}")

    def names(self) -> list[str]:
        found = self.client.list_objects_v2(Bucket=self.bucket, Prefix=self.prefix).get("Contents", [])
        return sorted(entry["Key"].removeprefix(f"{self.prefix}/") for entry in found)

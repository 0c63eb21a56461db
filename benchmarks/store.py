"""A rollout's parts through the store, against plain Parquet and one SHA-256 of the same table; local and s3.

    python benchmarks/store.py

64 samples of 512² images in parts of 8: latents (3, 16, 64, 64) fp32, PNG bytes precomputed. Median of 5, the sides take
turns. Local: `pyarrow.parquet.write_table` as it is (default) and with the store's own Parquet options (tuned), with one
SHA-256 of the file's bytes, with and without fsync of file and folder; the store always hashes the rows too and syncs.
S3: moto on loopback, plain s3fs puts and gets against the store's files of the same bytes, and against whole tables
(Parquet and hashes too). Writes benchmarks/results/store.json.
"""

import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import s3fs

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from s3_server import KEYS, client, s3_server

from miles_core.store.files import Files
from miles_core.store.parts import Part, parquet_options, read_table, write_table
from miles_core.store.schemas import rollout_schema

HERE = Path(__file__).parent
SAMPLES, PART, REPEATS = 64, 8, 5
SHAPE, POSITIONS, STEPS = (16, 64, 64), 3, 10
PNG_BYTES = 450_000


def rollout() -> pa.Table:
    """Noise of the size of a rollout: nothing of it compresses."""
    noise = np.random.default_rng(0)
    schema = rollout_schema(
        latent_shape=SHAPE, positions=POSITIONS, sde_steps=2, steps=STEPS, latent_dtype=pa.float32()
    )
    size = POSITIONS * int(np.prod(SHAPE))
    rows = {
        "image": [{"bytes": noise.bytes(PNG_BYTES), "path": None} for _ in range(SAMPLES)],
        "sigmas": [[0.0] * (STEPS + 1)] * SAMPLES,
        "timesteps": [[0.0] * STEPS] * SAMPLES,
        "log_probs": [[0.0] * STEPS] * SAMPLES,
        "sde_step_indices": [[1, 2]] * SAMPLES,
        "latent_steps": [[1, 2, 3]] * SAMPLES,
        "started_at": [datetime(2026, 1, 1, tzinfo=UTC)] * SAMPLES,
    }
    latents = pa.FixedSizeListArray.from_arrays(
        pa.array(noise.standard_normal(SAMPLES * size, dtype=np.float32)), type=schema.field("latents").type
    )
    arrays = [
        latents
        if field.name == "latents"
        else pa.array(rows.get(field.name, [_plain(field.type)] * SAMPLES), field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _plain(kind: pa.DataType) -> Any:
    return "a photo of a cat" if pa.types.is_string(kind) else 1


def plain_write(folder: Path, table: pa.Table, *, tuned: bool, synced: bool) -> None:
    """What one would write without a store."""
    for number in range(SAMPLES // PART):
        path = folder / f"{number}.parquet"
        part = table.slice(number * PART, PART)
        pq.write_table(part, path, **(parquet_options(part) if tuned else {}))
        hashlib.sha256(path.read_bytes()).hexdigest()
        if synced:
            for place in (path, folder):
                handle = os.open(place, os.O_RDONLY)
                os.fsync(handle)
                os.close(handle)


def plain_read(folder: Path) -> int:
    """Rows, read from bytes whose SHA-256 was taken."""
    rows = 0
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        hashlib.sha256(data).hexdigest()
        rows += pq.read_table(pa.BufferReader(data)).num_rows
    return rows


def store_write(files: Files, folder: str, table: pa.Table) -> list[Part]:
    """The same through the store: row digests, SHA-256, whole or not at all, on disk when it returns."""
    return [
        write_table(files, f"{folder}/{number}.parquet", table.slice(number * PART, PART))
        for number in range(SAMPLES // PART)
    ]


def store_read(files: Files, parts: list[Part]) -> int:
    return sum(read_table(files, part).num_rows for part in parts)


def seconds(*sides: Callable[[int], Any]) -> list[float]:
    """Median seconds of each side; they take turns. Each gets the number of the turn."""
    took: list[list[float]] = [[] for _ in sides]
    for turn in range(REPEATS + 1):
        for side, times in zip(sides, took, strict=True):
            started = time.perf_counter()
            side(turn)
            times.append(time.perf_counter() - started)
    return [statistics.median(times[1:]) for times in took]


def folder_of(base: Path, name: str) -> Path:
    made = base / name
    made.mkdir()
    return made


def local_figures(table: pa.Table, base: Path) -> dict[str, float]:
    files = Files(str(base))
    made: list[list[Part]] = []
    sides = {
        f"{kind}{'_fsync' if synced else ''}": lambda turn, kind=kind, synced=synced: plain_write(
            folder_of(base, f"{kind}-{synced}-{turn}"), table, tuned=kind == "tuned", synced=synced
        )
        for kind in ("default", "tuned")
        for synced in (False, True)
    }
    *plains, store = seconds(*sides.values(), lambda turn: made.append(store_write(files, f"store-{turn}", table)))
    plain, read = seconds(
        lambda turn: plain_read(base / f"tuned-False-{turn}"), lambda turn: store_read(files, made[turn])
    )
    megabytes = sum(part.bytes for part in made[0]) / 1e6
    return {
        "megabytes": round(megabytes, 1),
        "write_store_mb_s": round(megabytes / store),
        **{f"write_{name}_mb_s": round(megabytes / took) for name, took in zip(sides, plains, strict=True)},
        **{f"write_ratio_to_{name}": round(took / store, 2) for name, took in zip(sides, plains, strict=True)},
        "read_plain_mb_s": round(megabytes / plain),
        "read_store_mb_s": round(megabytes / read),
        "read_ratio": round(plain / read, 2),
    }


def s3_figures(table: pa.Table, base: Path) -> dict[str, float]:
    with s3_server() as address:
        os.environ.update(KEYS | {"AWS_ENDPOINT_URL": address})
        client(address).create_bucket(Bucket="bucket")
        plain = s3fs.S3FileSystem(use_listings_cache=False)
        local = Files(str(base))
        bodies = [local.read(f"store-1/{number}.parquet") for number in range(SAMPLES // PART)]
        made: list[list[Part]] = []

        def put(turn: int) -> None:
            for number, body in enumerate(bodies):
                plain.pipe_file(f"bucket/plain-{turn}/{number}.parquet", body)

        def get(turn: int) -> None:
            for number in range(len(bodies)):
                plain.cat_file(f"bucket/plain-{turn}/{number}.parquet")

        files = Files("s3://bucket/root")

        def create(turn: int) -> None:
            for number, body in enumerate(bodies):
                files.create(f"bare-{turn}/{number}.parquet", body)

        def read(turn: int) -> None:
            for number in range(len(bodies)):
                files.read(f"bare-{turn}/{number}.parquet")

        plain_put, bare_put, store_put = seconds(
            put, create, lambda turn: made.append(store_write(files, f"store-{turn}", table))
        )
        plain_get, bare_get, store_get = seconds(get, read, lambda turn: store_read(files, made[turn]))
    megabytes = sum(map(len, bodies)) / 1e6
    return {
        "put_plain_mb_s": round(megabytes / plain_put),
        "put_files_mb_s": round(megabytes / bare_put),
        "put_ratio": round(plain_put / bare_put, 2),
        "write_table_mb_s": round(megabytes / store_put),
        "write_table_ratio": round(plain_put / store_put, 2),
        "get_plain_mb_s": round(megabytes / plain_get),
        "get_files_mb_s": round(megabytes / bare_get),
        "get_ratio": round(plain_get / bare_get, 2),
        "read_table_mb_s": round(megabytes / store_get),
        "read_table_ratio": round(plain_get / store_get, 2),
    }


def main() -> int:
    """Measure, write the figures."""
    table = rollout()
    with tempfile.TemporaryDirectory(prefix="miles-store-") as folder:
        figures = {"local": local_figures(table, Path(folder)), "s3": s3_figures(table, Path(folder))}
    report = {
        "figures": figures,
        "command": "python benchmarks/store.py",
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=HERE
        ).stdout.strip(),
        "machine": f"{os.cpu_count()} cores, pyarrow {pa.__version__}, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
    }
    (HERE / "results" / "store.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

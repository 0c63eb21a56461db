"""TensorBoard: an event file an entry, named after it, so that one that is written twice is there once."""

import io
import os
import tempfile
from collections.abc import Collection
from pathlib import Path

from miles_core.config import RunConfig
from miles_core.config.folders import local_path
from miles_core.observe.destination import IMAGES, Entry
from miles_core.observe.samples import contact_sheet
from miles_core.store.files import Files
from miles_core.store.run_store import RunStore

_SHEET_BYTES = 8_000_000


class TensorBoard:
    """Event files in a folder or a bucket; the step is the iteration."""

    def __init__(self, config: RunConfig, store: RunStore) -> None:
        self._written = set[str]()
        given = config.logging.tensorboard_dir
        if given is None:
            self.files, self.folder = store.files, f"{store.run}/tensorboard"
        else:
            root = given if "://" in given else str(local_path(given, "--tensorboard-dir"))
            self.files, self.folder = Files(root.rstrip("/")), store.run

    @property
    def name(self) -> str:
        return f"tensorboard {self.files.url(self.folder)}"

    def open(self) -> None:
        return None

    def send(self, entry: Entry) -> None:
        """Write the entry's event file."""
        data = event_file(entry)
        if data is not None:
            self.files.replace(f"{self.folder}/{_file_name(entry)}", data)
        self._written.add(entry.key)

    def arrived(self) -> Collection[str]:
        return self._written

    def close(self) -> None:
        return None


def _file_name(entry: Entry) -> str:
    # TensorBoard reads a folder's files in the order of their names, those alone that hold `tfevents`.
    return f"events.out.tfevents.{int(entry.when):010d}.{entry.key.replace('/', '-')}"


def event_file(entry: Entry) -> bytes | None:
    """The entry's metrics and its contact sheet as TensorBoard events; None where there is nothing to say."""
    from tensorboardX import SummaryWriter

    sheet = contact_sheet(*entry.read_rows(), max_bytes=_SHEET_BYTES)
    if not entry.metrics and sheet is None:
        return None
    with tempfile.TemporaryDirectory(prefix="miles-tensorboard-") as folder:
        writer = SummaryWriter(folder, write_to_disk=True)
        for name, value in sorted(entry.metrics.items()):
            writer.add_scalar(name, value, entry.iteration, walltime=entry.when)
        if sheet is not None:
            import numpy as np
            from PIL import Image

            pixels = np.asarray(Image.open(io.BytesIO(sheet.data)).convert("RGB"))
            writer.add_image(IMAGES, pixels, entry.iteration, walltime=entry.when, dataformats="HWC")
        writer.close()
        (name,) = os.listdir(folder)
        return Path(folder, name).read_bytes()

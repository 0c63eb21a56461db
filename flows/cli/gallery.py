"""miles gallery RUN: the images of a run as one page."""

import shlex
from pathlib import Path

import typer

from miles_core.config.folders import local_path
from miles_core.errors import InputError
from miles_core.observe.gallery import make_gallery, select_iterations
from miles_core.observe.gallery_page import told
from miles_core.pipeline.run import open_run
from miles_core.store.files import Files


def gallery(
    run: str = typer.Argument(help="Name of the run."),
    output: str | None = typer.Option(None, help="The page; else RUN-gallery.html in the current folder."),
    iterations: str = typer.Option("all", help="all, latest, a number, or A:B: from A up to B, B not included."),
    max_mb: float = typer.Option(30.0, help="Size of the page at most, in MB of 1,000,000 bytes."),
    artifact_root: str | None = typer.Option(None, help="Folder of all runs."),
) -> None:
    """Write a page of a run's images with their figures. It needs no server and asks nothing of the network."""
    if not 0 < max_mb <= 2000:
        raise InputError(f"--max-mb {max_mb:g}: give a number above 0, and not above 2000")
    store, _ = open_run(run, artifact_root)
    target = target_of(output or f"{run}-gallery.html", "gallery.html")
    chosen = select_iterations(iterations, store.iterations())
    suffix = f" --artifact-root {shlex.quote(artifact_root)}" if artifact_root else ""
    made = make_gallery(store, chosen, int(max_mb * 1e6), (f"miles lineage {run}", suffix))
    Files(str(target.parent)).replace(target.name, made.html)
    print("\n".join(told(made, str(target))))


def target_of(given: str, example: str) -> Path:
    """The file that --output names. Raises InputError where it cannot be one."""
    target = local_path(given, "--output")
    if target.is_dir():
        raise InputError(f"--output {given} is a folder: name a file in it, e.g. {target / example}")
    if not target.parent.is_dir():
        raise InputError(f"--output {given}: there is no folder {target.parent}, make it or give another")
    return target

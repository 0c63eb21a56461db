"""miles make-tiny sd3 DIR: a random tiny model."""

from pathlib import Path

import typer

from miles_core.errors import InputError


def make_tiny(
    family: str = typer.Argument(help="Model family: sd3."),
    folder: Path = typer.Argument(
        help="New folder; for sglang its name must hold stable-diffusion-3.5-medium.", metavar="DIR"
    ),
) -> None:
    """Make a random tiny pipeline that diffusers and sglang load."""
    if family != "sd3":
        raise InputError(f"there is no tiny model of family {family!r}: choose sd3")
    from miles_core.families.tiny_sd3 import make_tiny_sd3

    print(make_tiny_sd3(folder.expanduser().absolute()))

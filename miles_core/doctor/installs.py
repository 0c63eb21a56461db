"""The libraries that a recipe runs on, against the versions that this package asks for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

from packaging.requirements import Requirement

from miles_core.doctor.check import Finding, passed, stopped, warned
from miles_core.doctor.subject import Subject

_PACKAGE = "miles-flows"
_ALWAYS = ("torch", "diffusers", "transformers", "peft", "ray", "prefect")
_OCR = ("paddleocr", "onnxruntime")


def installs(subject: Subject, version_of: Callable[[str], str] = metadata.version) -> Finding:
    """Versions of what the recipe needs. A missing one stops; one outside of what is asked for warns."""
    wanted, there, missing, other = _asked_for(), [], [], []
    for name in _needed(subject):
        try:
            version = version_of(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
            continue
        there.append(f"{name} {version}")
        if name in wanted and not wanted[name].specifier.contains(version, prereleases=True):
            other.append(f"{name} {version} where {wanted[name]} is asked for")
    if missing:
        return stopped(f"{', '.join(missing)} not installed", "run ./install again")
    if other:
        return warned("; ".join(other), "run ./install again")
    return passed(", ".join(there))


def _needed(subject: Subject) -> list[str]:
    names = list(_ALWAYS)
    engine: str = subject.config.cluster.rollout_engine
    if engine == "sglang":
        names.append("sglang")
    if "ocr" in subject.config.scorers:
        names += _OCR
    return names


def _asked_for() -> dict[str, Requirement]:
    """Requirements by name; none where this package runs from a folder without being installed."""
    try:
        texts = metadata.requires(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        return {}
    return {r.name: r for r in map(Requirement, texts) if r.marker is None}

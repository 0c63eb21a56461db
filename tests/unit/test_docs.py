"""Generated pages are what the classes say, and the pages' links lead somewhere."""

import importlib.util
import re
from pathlib import Path

import pytest

from miles_core.config import FIELDS, flag

ROOT = Path(__file__).parents[2]


def generated(name: str) -> str:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)()


@pytest.mark.parametrize("name", ["configuration", "artifacts", "glossary"])
def test_the_page_is_what_the_classes_say(name: str) -> None:
    assert (ROOT / "docs" / f"{name}.md").read_text() == generated(name), "run: python docs/generate.py"


def test_every_option_is_on_the_page() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert [name for name in FIELDS if f"`{flag(name)}`" not in page] == []


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))])
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    targets = re.findall(r"\]\(([^)#]+)\)", path.read_text())
    assert [t for t in targets if "://" not in t and not (path.parent / t).exists()] == []

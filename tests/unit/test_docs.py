"""Generated pages are what the classes say, and the pages' links lead somewhere."""

import importlib.util
import re
from pathlib import Path

import pytest

from flows.cli import main as cli
from miles_core.config import FIELDS, choices, flag

ROOT = Path(__file__).parents[2]


def generated(name: str) -> str:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "source" / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)()


@pytest.mark.parametrize("name", ["configuration", "artifacts", "glossary"])
def test_the_page_is_what_the_classes_say(name: str) -> None:
    assert (ROOT / "docs" / f"{name}.md").read_text() == generated(name), "run: python docs/source/generate.py"


def test_every_option_is_on_the_page() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert [name for name in FIELDS if f"`{flag(name)}`" not in page] == []


def test_the_page_and_the_command_list_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run(cli.app, ["config"]) == 0
    listed = capsys.readouterr().out.splitlines()
    page = (ROOT / "docs" / "configuration.md").read_text().splitlines()
    for name in ("rm_type", "lr_wsd_decay_style", "fsdp_reduce_dtype", "rollout_engine"):
        words = ", ".join(choices(name))
        at = next(i for i, line in enumerate(listed) if line.split()[:1] == [flag(name)])
        assert words and words in listed[at + 1]
        assert words in next(line for line in page if line.startswith(f"| `{flag(name)}` |"))
    assert (
        choices("rm_type") == ("pickscore", "ocr", "remote_rm", "jpeg_compressibility", "jpeg_incompressibility")
        and choices("lr") == ()
    )


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))])
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    targets = re.findall(r"\]\(([^)#]+)\)", path.read_text())
    assert [t for t in targets if "://" not in t and not (path.parent / t).exists()] == []

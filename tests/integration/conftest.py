import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from commands import Place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A home of the module's own; what its commands left running is ended."""
    made = Place(tmp_path_factory.mktemp("home"))
    yield made
    made.miles("down")

"""What a stage hands on is small: manifests, never what they describe."""

import io
import pickle
from typing import Any

from tiny_run import TinyRun

from miles_core.store.stages import ITERATION_STAGES


class Modules(pickle.Unpickler):
    """Notes the packages of the classes that it meets."""

    found: set[str]

    def find_class(self, module: str, name: str) -> Any:
        self.found.add(module.split(".")[0])
        return super().find_class(module, name)


def test_what_a_stage_returns_is_a_small_manifest_without_a_tensor(run: TinyRun) -> None:
    """Task results get lost or are made again (pitfall 30)."""
    outcomes = run.iterate(1)
    assert list(outcomes) == list(ITERATION_STAGES)
    for stage, outcome in outcomes.items():
        data = pickle.dumps(outcome)
        reader = Modules(io.BytesIO(data))
        reader.found = set()
        assert reader.load() == outcome
        assert reader.found == {"miles_core"}, stage
        assert len(data) < 20_000, stage
    assert sum(part.bytes for part in outcomes["rollout"].manifest.parts) > 20_000

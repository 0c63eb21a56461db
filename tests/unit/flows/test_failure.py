"""What the UI says of where a flow failed."""

from pathlib import Path
from typing import Any, cast

import pytest

from deployments.recipes import recipe
from miles_core.errors import InputError
from miles_core.pipeline.log import RunLog
from miles_core.pipeline.stage import Step
from miles_core.store.files import Files
from miles_core.store.run_store import RunStore
from tasks.failure import _where


def test_a_failure_in_logging_is_no_failure_before_a_stage(tmp_path: Path) -> None:
    config, store = recipe("tiny"), RunStore(Files(str(tmp_path)), "r")
    store.create_record({"config": {}, "meaning": {}})
    (tmp_path / "r" / "run.json").write_text("[")
    with pytest.raises(InputError) as logged, RunLog(config, store, print) as log:
        log.iteration(Step(config, cast(Any, None), store, cast(Any, None), 0))
    with pytest.raises(InputError) as other:
        store.record()
    assert _where(logged.value) == "in logging, after its stages"
    assert _where(other.value) == "before a stage began"

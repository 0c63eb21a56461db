"""prompts: draw the iteration's prompts, expand them to groups, give each sample its index and seed."""

import json

from miles_core.data.data_source import RolloutDataSourceWithBuffer, samples_to_table
from miles_core.data.prompts import prompts_digest
from miles_core.errors import StageError
from miles_core.pipeline.stage import Product, Step, Upstreams
from miles_core.store.digest import canonical_json
from miles_core.store.parts import read_bytes, write_file, write_table
from miles_core.store.run_store import Attempt


def draw(step: Step, attempt: Attempt, upstream: Upstreams) -> Product:
    """Draw rollout_batch_size prompts from where the previous iteration left the data source."""
    files = step.store.files
    source = RolloutDataSourceWithBuffer(step.config.args())
    if prompts_digest(source.prompts) != step.inputs.prompts_digest:
        raise StageError(
            f"{step.inputs.prompt_path} changed while the run went on: put the old content back and run the same command "
            "again, or start another run"
        )
    if "prompts" in upstream:
        (state,) = upstream["prompts"].under("state.json")
        source.load_state_dict(json.loads(read_bytes(files, state)))
    groups = source.get_samples(step.config.data.rollout_batch_size)
    rows = write_table(files, attempt.path("data/prompts.parquet"), samples_to_table(groups))
    state = write_file(files, attempt.path("state.json"), canonical_json(source.state_dict()))
    summary = {"prompts": len(groups), "samples": rows.rows, "epoch": source.state_dict()["epoch"]}
    return Product([rows, state], summary)

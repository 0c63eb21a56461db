"""prompts: draw the iteration's prompts, expand them to groups, give each sample its index and seed."""

from miles_core.data.data_source import RolloutDataSourceWithBuffer, samples_to_table
from miles_core.data.prompts import prompts_digest
from miles_core.errors import StageError
from miles_core.pipeline.source import Source, opened
from miles_core.pipeline.stage import Product, Step, Upstreams
from miles_core.pipeline.waves import draw_waves
from miles_core.store.parts import write_table
from miles_core.store.run_store import Attempt


def draw(step: Step, attempt: Attempt, upstream: Upstreams) -> Product:
    """Draw from where the previous iteration left the data source: rollout_batch_size prompts, or waves of prompts that are
    generated and scored until enough groups are kept."""
    with opened(step.config, step.iteration, step.store.files, upstream.get("prompts")) as source:
        _check_unchanged(step, source)
        if step.config.in_waves:
            return draw_waves(step, attempt, upstream, source)
        return _draw_once(step, attempt, source)


def _draw_once(step: Step, attempt: Attempt, source: Source) -> Product:
    files = step.store.files
    groups = source.draw(step.config.data.rollout_batch_size)
    rows = write_table(files, attempt.path("data/prompts.parquet"), samples_to_table(groups))
    beside = source.save(step.iteration, files, attempt)
    return Product([rows, *beside], {"prompts": len(groups), "samples": rows.rows} | source.figures)


def _check_unchanged(step: Step, source: Source) -> None:
    stock = source.source
    if isinstance(stock, RolloutDataSourceWithBuffer) and prompts_digest(stock.prompts) != step.inputs.prompts_digest:
        raise StageError(
            f"{step.inputs.prompt_path} changed while the run went on: put the old content back and run the same command "
            "again, or start another run"
        )

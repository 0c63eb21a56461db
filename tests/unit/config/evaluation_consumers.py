"""What evaluation makes of a configuration; see consumers."""

from types import SimpleNamespace
from typing import Any, cast

from consumers import Place

from miles_core.config import RunConfig
from miles_core.data.eval_samples import eval_samples
from miles_core.data.sample import Sample
from miles_core.errors import StageError
from miles_core.pipeline import evaluation
from miles_core.pipeline.inputs import resolve_inputs
from miles_core.rollout.protocol import GenerateRequest
from miles_core.rollout.rollout_function import GENERATOR, generate_rollout


def iterations(c: RunConfig, place: Place) -> list[int]:
    return [i for i in range(-1, 5) if evaluation.due(place.step(c).at(i))]


def requests(c: RunConfig, place: Place) -> list[GenerateRequest]:
    """What an evaluation asks the engines for."""
    asked: list[GenerateRequest] = []

    class Listed:
        async def generate(self, request: GenerateRequest, microgroup: list[Sample]) -> None:
            asked.append(request)

    groups = eval_samples(cast(Any, resolve_inputs(c).evaluation).prompts, c.evaluation.n_samples_per_eval_prompt)
    token = GENERATOR.set(Listed())
    args = evaluation.eval_args(c, len(groups))
    generate_rollout(args, 0, SimpleNamespace(get_samples=lambda count: groups[:count]), evaluation=True)
    GENERATOR.reset(token)
    return asked


def requested(name: str) -> Any:
    return lambda c, place: getattr(requests(c, place)[0], name)


def words(c: RunConfig, place: Place) -> set[str]:
    return {request.prompt.split()[0] for request in requests(c, place)}


def samples(c: RunConfig, place: Place) -> tuple[int, list[int]]:
    """How many, and how many in each request."""
    counts = [request.num_outputs for request in requests(c, place)]
    return sum(counts), counts


def after_a_failure(c: RunConfig, place: Place) -> str:
    step = place.step(c)
    step.moves_line, step.workers = True, cast(Any, SimpleNamespace(aborted=False))
    try:
        assert "training goes on" in evaluation.told(step, StageError("no engine"))
    except StageError:
        return "ends"
    return "goes on"

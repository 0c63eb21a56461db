"""What an evaluation does about a scorer that dies or is silent: as training, it scores again what was made."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray import exceptions

from miles_core.data.sample import Sample
from miles_core.errors import StageError
from miles_core.rollout.eval_dispatch import EvaluationDispatch

SILENT = object()


class Scorer:
    """Answers its calls in turn: raises what is an exception, never answers SILENT."""

    def __init__(self, name: str, *answers: Any) -> None:
        self.name, self.answers, self.given = name, list(answers), cast(list[tuple[Any, ...]], [])

    async def call(self, *arguments: Any) -> Any:
        self.given.append(arguments)
        answer = self.answers.pop(0)
        if answer is SILENT:
            await asyncio.sleep(60)
        if isinstance(answer, Exception):
            raise answer
        return answer


def dispatch(scorers: list[Scorer], *, retries: int, aborted: bool = False) -> tuple[EvaluationDispatch, list[str]]:
    replaced: list[str] = []
    workers = SimpleNamespace(
        ray=SimpleNamespace(exceptions=exceptions),
        config=SimpleNamespace(
            reward=SimpleNamespace(reward_max_retries=retries), cluster=SimpleNamespace(rollout_num_engines=1)
        ),
        seconds=0.05,
        aborted=aborted,
        scorers=lambda config, inputs: scorers,
        replace_scorer=lambda group, index, dead, config, inputs: replaced.append(dead.name),
    )
    names = iter(f"data/{n}.parquet" for n in range(9))
    made = EvaluationDispatch(
        cast(Any, workers),
        cast(Any, None),
        evaluated=cast(Any, SimpleNamespace(components=("ocr",))),
        name_part=lambda number: next(names),
        adapter=cast(Any, None),
        digest="",
        version=0,
        landed=lambda number, part: None,
        kept={},
    )
    return made, replaced


def scored(made: EvaluationDispatch) -> Any:
    return asyncio.run(made._scored(0, "what was made", [Sample(group_index=0, index=0, prompt="a", seed=1)]))


def test_a_dead_and_a_silent_scorer_are_replaced_and_the_next_scores_the_same_under_another_name() -> None:
    first, second, third = Scorer("s0", exceptions.RayActorError()), Scorer("s1", SILENT), Scorer("s2", "part")
    made, replaced = dispatch([first, second, third], retries=2)
    assert scored(made) == "part"
    assert replaced == ["s0", "s1"]
    given = [arguments for scorer in (first, second, third) for arguments in scorer.given]
    assert [arguments[2] for arguments in given] == ["what was made"] * 3
    assert len({arguments[3] for arguments in given}) == 3


def test_the_last_try_ends_it_and_says_which_scorer() -> None:
    made, replaced = dispatch([Scorer("s0", exceptions.RayActorError(), exceptions.RayActorError(), "part")], retries=1)
    with pytest.raises(StageError, match=r"could not be scored after 1 retries \(s0: .*run the same command again"):
        scored(made)
    assert replaced == ["s0"]


def test_a_command_that_is_ended_replaces_no_scorer() -> None:
    made, replaced = dispatch([Scorer("s0", exceptions.RayActorError(), "part")], retries=9, aborted=True)
    with pytest.raises(StageError, match="after 0 retries"):
        scored(made)
    assert replaced == []

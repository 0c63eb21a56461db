"""What a run holds, laid out in the UI: the curve, the iterations, images, answers of SQL, the gallery page."""

import shlex
from typing import Literal

from prefect import flow
from prefect.runtime import flow_run

from miles_core.config.folders import home
from miles_core.observe.gallery import select_iterations
from miles_core.observe.history import History
from miles_core.pipeline.run import open_run
from tasks.failure import told
from tasks.pictures import publish_answer, publish_gallery, publish_run, publish_samples

Question = Literal[
    "worst-groups",
    "best-groups",
    "zero-std-prompts",
    "repeated-seeds",
    "slowest-microgroups",
    "reward-by-iteration",
    "reward-by-prompt",
    "times-by-stage",
]
_PICTURES = 20


def _name() -> str:
    given = flow_run.parameters
    return f"{given['run']} · inspect {given['iterations']}"


@flow(name="inspect", flow_run_name=_name)
def inspect(
    run: str = "latest",
    iterations: str = "latest",
    questions: tuple[Question, ...] = ("worst-groups", "zero-std-prompts"),
    sql: str = "",
    gallery: bool = False,
    artifact_root: str | None = None,
) -> None:
    """Lay out what a run holds as artifacts: its reward curve, its iterations, images, and answers to questions. Nothing
    of the run changes, and one that is being trained can be looked at.

    Args:
        run: name of the run, or latest: the one begun last.
        iterations: whose images are shown: latest, a number, FIRST:END (END left out), or all; the newest 20 at most.
        questions: ready questions, each answered as a table; `miles query --questions` says what they ask.
        sql: a query of your own over the stages' views, answered as a table too.
        gallery: also write the page that `miles gallery` writes, under the worker's MILES_HOME.
        artifact_root: folder of all runs; unset: MILES_ARTIFACT_ROOT, else the user's data folder.
    """
    with told(f"inspect of {run}", run, shlex.join(["miles", "show", run])):
        store, _ = open_run(run, artifact_root)
        chosen = select_iterations(iterations, store.iterations())
        history = History(store)
        publish_run(history)
        for number in chosen[-_PICTURES:]:
            rollout = history.on_line("rollout", number)
            if rollout:
                publish_samples(
                    history, rollout, history.on_line("rewards", number), history.on_line("advantages", number)
                )
        for name in questions:
            publish_answer(store, name)
        if sql:
            publish_answer(store, "sql", sql)
        if gallery:
            publish_gallery(store, chosen, home() / "galleries" / f"{store.run}.html")

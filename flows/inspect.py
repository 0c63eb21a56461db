"""What a run holds, laid out in the UI: the curve, the iterations, images, answers of SQL, the gallery page."""

import shlex
from typing import Literal

from prefect import flow
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from miles_core.config.folders import home
from miles_core.errors import InputError
from miles_core.observe.gallery import select_iterations
from miles_core.observe.history import History
from miles_core.pipeline.run import open_run
from tasks.failure import told
from tasks.pictures import answer_of, publish_answer, publish_gallery, publish_run, publish_samples

Question = Literal[
    "worst-groups",
    "best-groups",
    "zero-std-prompts",
    "repeated-seeds",
    "slowest-microgroups",
    "reward-by-iteration",
    "reward-by-prompt",
    "changed-rewards",
    "reward-outliers",
    "clipped",
    "failed-rewards",
    "unscored",
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
        run: name of the run, or latest: the one trained last.
        iterations: whose images are shown, and which the gallery holds: latest, a number, FIRST:END (END left out), or all;
            of more than 20 the images of the newest 20 are shown. Questions and sql are over the whole run.
        questions: ready questions, each answered as a table; `miles query --questions` says what they ask.
        sql: a query of your own over the stages' views, answered as a table too.
        gallery: also write the page that `miles gallery` writes, under the worker's MILES_HOME.
        artifact_root: folder of all runs; unset: MILES_ARTIFACT_ROOT, else the user's data folder.
    """
    with told(f"inspect of {run}", run, shlex.join(["miles", "show", run]), key="inspect-fault"):
        log = get_run_logger()
        store, _ = open_run(run, artifact_root)
        chosen = select_iterations(iterations, store.iterations())
        if not chosen:
            raise InputError(f"run {store.run} has no iteration yet: inspect it when its first one is begun")
        # Before anything is published: a query that fails shall leave nothing half laid out.
        answers = [answer_of(store, name) for name in questions] + ([answer_of(store, "sql", sql)] if sql else [])
        history = History(store)
        publish_run(history)
        log.info("reward curve and iterations of %s: %d iterations", store.run, len(store.iterations()))
        for number in chosen[-_PICTURES:]:
            rollout = history.on_line("rollout", number)
            if rollout is None:
                log.info("images of iteration %d: none, its rollout is not committed yet", number)
                continue
            publish_samples(history, rollout, history.on_line("rewards", number), history.on_line("advantages", number))
            log.info("images of iteration %d", number)
        for answer in answers:
            publish_answer(store.run, answer)
            log.info("%s: %d rows%s", answer.name, len(answer.table), ", and more" if answer.more else "")
        if gallery:
            page = home() / "galleries" / f"{store.run}.html"
            publish_gallery(store, chosen, page)
            log.info("gallery page: %s", page)

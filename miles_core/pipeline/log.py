"""The metrics of a finished iteration, from its committed stages, through the log hooks' place."""

from miles_core.data.sample import Sample
from miles_core.observe.metrics import log_eval_rollout_data, log_rollout_data, metrics_line, train_metrics
from miles_core.pipeline.stage import Step, checked_on_failure
from miles_core.store.manifest import Manifest
from miles_core.store.parts import read_table


def log_iteration(step: Step, rollout: Manifest, rewards: Manifest, update: Manifest) -> None:
    """Print rollout and train metrics under the reference's names."""
    with checked_on_failure(step, {"rewards": rewards}):
        _print(step, rollout, rewards, update)


def log_evaluation(step: Step, evaluation: Manifest) -> None:
    """Print an evaluation's metrics, by set."""
    rewards: dict[str, list[float]] = {}
    with checked_on_failure(step, {"evaluation": evaluation}):
        for part in evaluation.data:
            for row in read_table(step.store.files, part, ["eval_set", "reward"]).to_pylist():
                rewards.setdefault(row["eval_set"], []).append(row["reward"])
    log_eval_rollout_data(step.iteration, step.config.args(), rewards, {"perf/eval_time": _seconds(evaluation)})


def _print(step: Step, rollout: Manifest, rewards: Manifest, update: Manifest) -> None:
    columns = ["sample_index", "group_index", "reward"]
    samples = [
        Sample(group_index=row["group_index"], index=row["sample_index"], prompt="", seed=0, reward=row["reward"])
        for part in rewards.data
        for row in read_table(step.store.files, part, columns).to_pylist()
    ]
    log_rollout_data(step.iteration, step.config.args(), samples, None, _seconds(rollout))
    print(f"  {metrics_line(train_metrics(update.summary, _seconds(update)))}", flush=True)


def _seconds(manifest: Manifest) -> float:
    return manifest.times["committed_at"] - manifest.times["started_at"]

"""What an iteration or an evaluation came to, told after its commit: at the terminal, to the user's functions, to wandb and
TensorBoard, and in metrics.parquet.

The store is what it is made from. logged.json says what went where, so that the next command makes up what is missing and
nothing is told twice.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from miles_core.config import RunConfig, flag
from miles_core.config.folders import own_args
from miles_core.errors import InputError
from miles_core.observe.destination import Destination, Entry
from miles_core.observe.log_tensorboard import TensorBoard
from miles_core.observe.log_wandb import Wandb, wandb_wanted
from miles_core.observe.logged import Ledger, key_of
from miles_core.observe.metrics import (
    ROLLOUT_TIME,
    log_eval_rollout_data,
    log_rollout_data,
    metrics_line,
    metrics_of,
    score_metrics,
    seconds_of,
    train_metrics,
)
from miles_core.observe.metrics_file import update_metrics_file
from miles_core.observe.redact import redacted_text
from miles_core.observe.samples import chosen_rows
from miles_core.pipeline.log_samples import eval_data, reward_samples, rollout_samples
from miles_core.pipeline.stage import Step
from miles_core.runtime.faults import fault_point
from miles_core.store.files import DamagedError
from miles_core.store.lock import read_lock
from miles_core.store.manifest import Manifest
from miles_core.store.run_store import RunStore
from miles_core.store.stages import ITERATION_STAGES
from miles_core.user_code import own_function

TERMINAL = "terminal"
_ROLLOUT, _EVAL = "custom_rollout_log_function_path", "custom_eval_rollout_log_function_path"
_AGAIN_SECONDS = 900.0


def check_logging(config: RunConfig) -> None:
    """Raises InputError where an option asks for a package that is not installed."""
    asked = {"use_tensorboard": ("tensorboardX", "tensorboard"), "use_wandb": ("wandb", "wandb")}
    for option, (package, extra) in asked.items():
        if config.flat()[option] and not installed(package):
            raise InputError(
                f"{flag(option)} needs the package {package}: pip install 'miles-flows[{extra}]', or leave it out"
            )


def installed(package: str) -> bool:
    """Whether a package is installed; nothing is imported."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


class RunLog:
    """The logging of one command. A context: what was handed over is on its way when it ends."""

    def __init__(self, config: RunConfig, store: RunStore, say: Callable[[str], None]) -> None:
        self.config, self.store, self.ledger = config, store, Ledger(store)
        self._say = say
        self._places: list[_Place] = []
        if config.logging.use_tensorboard:
            self._places.append(_Place(TensorBoard(config, store)))
        if wandb_wanted(config):
            self._places.append(_Place(Wandb(config, store, self.ledger)))
        self._looked_at = False

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_: object) -> None:
        for place in self._places:
            place.again_at = 0.0
            if place.owed:
                self._deliver(place)
                place.again_at = 0.0
            self._guarded(place, place.destination.close)
            self._note(place)

    def iteration(self, step: Step) -> None:
        """Log what the line names at the step's iteration and was not logged yet: the evaluation before training, the
        iteration, its evaluation, and what evaluations beside the line left.

        Raises StageError, with its name and the iteration, where a user's function fails: nothing that was committed is lost,
        and the next command calls it again.
        """
        self._looked_at = False
        self.catch_up(step)

    def catch_up(self, step: Step) -> None:
        """The same for an iteration that was finished before this command."""
        if not self._looked_at:
            self._looked_at = True
            update_metrics_file(self.store)
            self._left_by_others(step)
        if step.iteration == 0:
            self._evaluation_on_line(step.at(-1))
        if self.store.kept("update", step.iteration) is None:
            self._iteration(step)
        self._evaluation_on_line(step)

    def evaluation(self, step: Step, made: Manifest) -> None:
        """Log an evaluation beside the line. wandb takes one writer at a time: while a command trains the run, that is left to
        it."""
        trained = _is_trained(self.store)
        self._log(step, made, self._tell_evaluation, partial(_eval_entry, made), leave_wandb=trained)
        if any(isinstance(place.destination, Wandb) and key_of(made) in place.owed for place in self._places):
            self.ledger.wait(made)

    def _evaluation_on_line(self, step: Step) -> None:
        made = self.store.on_line("evaluation", step.iteration)
        if made is not None and self.store.kept("evaluation", step.iteration) is None:
            self._log(step, made, self._tell_evaluation, partial(_eval_entry, made))

    def _left_by_others(self, step: Step) -> None:
        if not any(isinstance(place.destination, Wandb) for place in self._places):
            return
        for key, attempt in self.ledger.waiting().items():
            made = self.store.manifest("evaluation", int(key.split("/")[0]), attempt)
            if made is not None and key_of(made) == key:
                self._log(step, made, self._tell_evaluation, partial(_eval_entry, made))

    def _iteration(self, step: Step) -> None:
        update = self.store.on_line("update", step.iteration)
        if update is None or not self._wanted(update):
            return
        found = {stage: self.store.on_line(stage, step.iteration) for stage in ITERATION_STAGES}
        made = {stage: manifest for stage, manifest in found.items() if manifest is not None}
        if len(made) < len(ITERATION_STAGES):
            return

        def tell(step: Step, update: Manifest) -> bool:
            return self._tell_iteration(step, made)

        self._log(step, made["update"], tell, partial(self._iteration_entry, made))

    def _wanted(self, made: Manifest) -> bool:
        """Whether something of it was not logged yet."""
        names = {TERMINAL, *(place.destination.name for place in self._places)}
        return not names <= self.ledger.of(key_of(made)).to

    def _log(
        self,
        step: Step,
        made: Manifest,
        tell: Callable[[Step, Manifest], bool],
        entry_of: Callable[[bool], Entry],
        *,
        leave_wandb: bool = False,
    ) -> None:
        if not self._wanted(made):
            return
        key = key_of(made)
        before = self.ledger.of(key)
        wanted = [place for place in self._places if place.destination.name not in before.to]
        left = [place for place in wanted if leave_wandb and isinstance(place.destination, Wandb)]
        wanted = [place for place in wanted if place not in left]
        step.fence()
        fault_point("logging:start")
        skipped = before.skipped
        if TERMINAL not in before.to:
            # A function of the user's may log to wandb itself.
            for place in wanted:
                self._guarded(place, place.destination.open)
            skipped = tell(step, made)
            fault_point("logging:sent")
            self.ledger.record([key], TERMINAL, skipped=skipped)
        if left:
            self.ledger.wait(made)
        for place in wanted:
            place.owed[key] = entry_of(skipped)
            self._deliver(place)

    def _deliver(self, place: "_Place") -> None:
        """Send what a place is owed, the oldest first."""

        def send() -> None:
            place.destination.open()
            for key, entry in list(place.owed.items()):
                place.destination.send(entry)
                del place.owed[key]
                place.unnoted.add(key)

        self._guarded(place, send)
        if place.unnoted:
            fault_point("logging:sent")
        self._note(place)

    def _note(self, place: "_Place") -> None:
        """Say in logged.json what has arrived; what has not is noted later, or sent again by the next command."""
        arrived = place.unnoted & set(place.destination.arrived())
        self.ledger.record(arrived, place.destination.name)
        place.unnoted -= arrived

    def _guarded(self, place: "_Place", call: Callable[[], None]) -> None:
        """A place that fails is told of once and tried again a quarter of an hour later, never at the cost of the run."""
        if time.monotonic() < place.again_at:
            return
        try:
            call()
        except Exception as fault:
            place.again_at = time.monotonic() + _AGAIN_SECONDS
            if not place.told:
                place.told = True
                name, said = place.destination.name.split()[0], redacted_text(" ".join(str(fault).split()))
                self._say(
                    f"  warning: {name} takes no metrics ({said or type(fault).__name__}); the run goes on, and the next command "
                    "of it makes up what is missing there"
                )

    def _tell_iteration(self, step: Step, made: dict[Any, Manifest]) -> bool:
        """The user's function and the terminal. Whether what rollout logs by default is left out."""
        rollout, rewards, update = made["rollout"], made["rewards"], made["update"]
        extra = score_metrics(rewards.summary.get("score_means", {})) | metrics_of(made["advantages"])
        generated = metrics_of(made["prompts"]) | metrics_of(rollout)
        seconds = generated.pop(ROLLOUT_TIME)
        with _damage_noted(self.store, rollout, rewards):
            own = _own(step, _ROLLOUT)
            samples = rollout_samples(self.store.files, made) if own else reward_samples(self.store.files, rewards)
            given = (step.iteration, own_args(step.config), samples, extra | generated, seconds)
            skipped = bool(own(*given)) if own else False
            if not skipped:
                log_rollout_data(*given)
        print(f"  {metrics_line(train_metrics(update.summary, seconds_of(update)))}", flush=True)
        return skipped

    def _tell_evaluation(self, step: Step, made: Manifest) -> bool:
        with _damage_noted(self.store, made):
            own = _own(step.at(made.iteration), _EVAL)
            data = eval_data(self.store.files, made)
            given = (made.iteration, own_args(step.config), data, {"perf/eval_time": seconds_of(made)})
            skipped = bool(own(*given)) if own else False
            if not skipped:
                log_eval_rollout_data(*given)
        return skipped

    def _iteration_entry(self, made: dict[Any, Manifest], skipped: bool) -> Entry:
        update = made["update"]
        stages = ("update", "sync") if skipped else ITERATION_STAGES
        metrics = {name: value for stage in stages for name, value in metrics_of(made[stage]).items()}
        count, every = self.config.logging.wandb_log_num_images, self.config.logging.wandb_log_image_interval
        entry = (key_of(update), update.iteration, update.times["committed_at"], metrics)
        if skipped or not count or update.iteration % every:
            return Entry(*entry)
        chosen = (self.store.files, made["rollout"], made["rewards"], made["advantages"])
        return Entry(*entry, lambda: chosen_rows(*chosen, count=count))


class _Place:
    """A destination, what it is owed by key, and what it was sent and may still lose."""

    def __init__(self, destination: Destination) -> None:
        self.destination, self.owed, self.unnoted = destination, dict[str, Entry](), set[str]()
        self.told, self.again_at = False, 0.0


def _eval_entry(made: Manifest, skipped: bool) -> Entry:
    return Entry(key_of(made), made.iteration, made.times["committed_at"], {} if skipped else metrics_of(made))


@contextlib.contextmanager
def _damage_noted(store: RunStore, *read: Manifest) -> Iterator[None]:
    """Where a part cannot be read, note it beside its manifest, so that the next command makes it again."""
    try:
        yield
    except Exception as fault:
        if isinstance(fault, DamagedError) or isinstance(fault.__cause__, DamagedError):
            for manifest in read:
                store.verify(manifest)
        raise


def _own(step: Step, option: str) -> Callable[..., Any] | None:
    where = f"in iteration {step.iteration}" if step.iteration >= 0 else "before training"
    return own_function(option, own_args(step.config), f" {where}")


def _is_trained(store: RunStore) -> bool:
    """Whether a command holds the run's lock, as far as can be seen from here."""
    held = read_lock(store.files, store.run)
    return held is not None and not held.released and held.holder.lives_here() is not False

"""Where a run's metrics and images go beside the store, which they are made from."""

import re
from typing import Literal

from pydantic import model_validator

from miles_core.config.base import Group, Text, option

_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class LoggingGroup(Group):
    """Where metrics and images go: wandb, TensorBoard, functions of one's own. `metrics.parquet` in the run's folder is always
    written."""

    use_wandb: bool | None = option(
        None, "log to Weights & Biases; unset: where WANDB_API_KEY is set. Never stops a run: what fails is told once"
    )
    wandb_project: Text | None = option(None, "wandb project; unset: WANDB_PROJECT, else miles-flows")
    wandb_group: Text | None = option(None, "group that wandb shows the run in")
    wandb_run_id: Text | None = option(
        None, "id of the wandb run, also of one that exists; unset: made once and kept in the run's logged.json"
    )
    wandb_team: Text | None = option(None, "wandb entity (team or user); unset: the key's own")
    wandb_host: Text | None = option(
        None, "address of a wandb server of one's own; unset: WANDB_BASE_URL, else wandb's own"
    )
    wandb_dir: Text | None = option(
        None, "folder for wandb's files; unset: the run's folder, for a run in a bucket wandb/ under MILES_HOME"
    )
    wandb_mode: Literal["online", "offline", "disabled"] | None = option(
        None, "offline: kept in wandb_dir until `wandb sync`; unset: WANDB_MODE, else online"
    )
    wandb_log_num_images: int = option(
        0, "images an iteration for wandb and TensorBoard, from the best reward to the worst; 0: none", ge=0, le=1024
    )
    wandb_log_image_interval: int = option(1, "iterations from one that logs images to the next", ge=1, le=1_000_000)
    use_tensorboard: bool = option(False, "write event files for TensorBoard")
    tensorboard_dir: Text | None = option(
        None,
        "folder, or s3://BUCKET/PREFIX, that gets a folder of the run's name with its event files; unset: tensorboard/ in the "
        "run's folder",
    )
    custom_rollout_log_function_path: Text | None = option(
        None,
        "dotted path of an own function, (rollout_id, args, samples, rollout_extra_metrics, rollout_time) -> bool; true: what "
        "rollout logs by default is left out",
        code=True,
    )
    custom_eval_rollout_log_function_path: Text | None = option(
        None,
        "dotted path of an own function, (rollout_id, args, data, extra_metrics) -> bool; true: what an evaluation logs by "
        "default is left out",
        code=True,
    )

    @model_validator(mode="after")
    def _together(self) -> "LoggingGroup":
        if self.wandb_run_id and not _ID.fullmatch(self.wandb_run_id):
            raise ValueError(
                f"--wandb-run-id {self.wandb_run_id!r} is no id: use up to 64 letters, digits, dots, dashes and underscores"
            )
        if self.wandb_host and not self.wandb_host.startswith(("http://", "https://")):
            raise ValueError(f"--wandb-host {self.wandb_host!r} is no address: write http:// or https:// and the host")
        if self.tensorboard_dir and not self.use_tensorboard:
            raise ValueError("--tensorboard-dir belongs to --use-tensorboard: give that too, or leave it out")
        if "://" in (self.tensorboard_dir or "") and not str(self.tensorboard_dir).startswith("s3://"):
            raise ValueError(f"--tensorboard-dir {self.tensorboard_dir!r}: give a local folder or s3://BUCKET/PREFIX")
        if self.use_wandb and self.wandb_mode == "disabled":
            raise ValueError("--use-wandb and --wandb-mode disabled say the opposite: leave one out")
        return self

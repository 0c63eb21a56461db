"""Two iterations of the tiny recipe on GPUs, without Prefect: engine on one GPU, trainer on another.

    python benchmarks/gpu_iteration.py [--dtype fp32|bf16] [--any-option value]

Needs as many GPUs as engines and trainer ranks together. Writes benchmarks/results/gpu_iteration_<dtype>.json, or into
the folder that the environment variable OUT names: what sync proved, the ratio before the first step, seconds a stage.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from deployments.recipes import recipe
from miles_core.config.overrides import from_flags
from miles_core.pipeline.inputs import resolve_inputs
from miles_core.pipeline.iteration import ensure_policy, finished, run_iteration
from miles_core.pipeline.run import begin_run, plan_run
from miles_core.pipeline.stage import Step
from miles_core.runtime.workers import Workers
from miles_core.store.parts import read_table


def main(arguments: list[str]) -> int:
    """Run, prove, write the figures."""
    dtype = "fp32"
    if "--dtype" in arguments:
        at = arguments.index("--dtype")
        dtype = arguments[at + 1]
        del arguments[at : at + 2]
    folder = Path(tempfile.mkdtemp(prefix="miles-gpu-"))
    os.environ.setdefault("MILES_HOME", str(folder))
    config = recipe("tiny").replace(
        device="cuda",
        diffusion_generator_device="cuda",
        diffusion_forward_dtype=dtype,
        artifact_root=str(folder / "runs"),
    )
    config = config.replace(**from_flags(arguments))
    plan = plan_run(config, f"gpu-{dtype}")
    begin_run(plan, "tiny", os.getcwd())
    figures: dict[str, object] = {}
    with Workers(plan.config, resolve_inputs(plan.config), folder) as workers:
        workers.connect()
        ensure_policy(Step(plan.config, plan.inputs, plan.store, workers, 0))
        for iteration in range(2):
            started = time.perf_counter()
            step = Step(plan.config, plan.inputs, plan.store, workers, iteration)
            done = run_iteration(step)
            seconds = {stage: round(outcome.seconds, 2) for stage, outcome in done.items()}
            rows = read_table(plan.store.files, done["update"].manifest.data[0]).to_pylist()
            sync = done["sync"].manifest.summary
            figures[f"iteration_{iteration}"] = {
                "seconds": round(time.perf_counter() - started, 2),
                "seconds_by_stage": seconds,
                "ratio_max_abs_dev_first_step": rows[0]["ratio_max_abs_dev"],
                "log_prob_mean_abs_diff_first_step": rows[0]["log_prob_mean_abs_diff"],
                "grad_norm": [row["grad_norm"] for row in rows],
                "probe_diff": sync["probe_diff"],
                "probe_moved": sync["probe_moved"],
                "reward_mean": done["rewards"].manifest.summary["reward_mean"],
                "digests": {stage: outcome.manifest.content_digest for stage, outcome in done.items()},
            }
            assert finished(step)
            assert all(row["grad_norm"] > 0 for row in rows)
    report = {
        "figures": figures,
        "command": " ".join(["python benchmarks/gpu_iteration.py", *sys.argv[1:]]),
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "machine": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}, "
        f"Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
    }
    target = Path(os.environ.get("OUT") or Path(__file__).parent / "results") / f"gpu_iteration_{dtype}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

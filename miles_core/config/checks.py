"""What must hold between fields. Each check raises ValueError with one sentence: what, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, get_args

from miles_core.config.guard import guard
from miles_core.config.sampling import NONZERO_STD

if TYPE_CHECKING:
    from miles_core.config.run_config import RunConfig

STRATEGIES = ("sde_window", "epoch_global_random_choice")
OWN = "own"
_HUBS = (
    "",
    "miles.rollout.step_strategy_hub",
    "miles.rollout.step_strategy_hub.py",
    "miles_core.rollout.step_strategies",
)


def strategy_name(path: str | None) -> str:
    """Short name of a stock step strategy, which the reference's dotted and file paths name too; OWN for another dotted path."""
    hub, _, name = (path or STRATEGIES[0]).replace("/", ".").rpartition(".")
    return name if not hub or (hub in _HUBS and name in STRATEGIES) else OWN


def batches(c: RunConfig) -> None:
    total = c.samples_per_rollout
    size, steps = c.data.global_batch_size, c.data.num_steps_per_rollout
    product = (
        f"rollout_batch_size {c.data.rollout_batch_size} x n_samples_per_prompt {c.data.n_samples_per_prompt} = {total}"
    )
    if size and steps and size * steps != total:
        raise ValueError(
            f"{product} must equal global_batch_size {size} x num_steps_per_rollout {steps} = {size * steps}: "
            "change one of the four, or leave out one of the last two"
        )
    if size and total % size:
        raise ValueError(f"{product} is not a multiple of --global-batch-size {size}: change one of them")
    if steps and total % steps:
        raise ValueError(f"{product} is not a multiple of --num-steps-per-rollout {steps}: change one of them")
    n, k = c.data.n_samples_per_prompt, c.rollout.rollout_microgroup_size
    if n % k:
        raise ValueError(
            f"--n-samples-per-prompt {n} is not a multiple of --rollout-microgroup-size {k}: change one of them"
        )
    tile = (c.data.micro_batch_size_sample, c.data.micro_batch_size_tstep)
    if (tile[0] is None) != (tile[1] is None):
        raise ValueError(
            "--micro-batch-size-sample and --micro-batch-size-tstep make one 2D tile: give both or neither"
        )


def steps(c: RunConfig) -> None:
    r = c.rollout
    name, count = strategy_name(r.diffusion_step_strategy_path), r.diffusion_num_sde_steps
    if name not in (*STRATEGIES, OWN):
        raise ValueError(
            f"--diffusion-step-strategy-path {r.diffusion_step_strategy_path}: choose {' or '.join(STRATEGIES)}, or give the "
            "dotted path of your own"
        )
    if r.diffusion_step_strategy_path and count == 0 and name != OWN:
        raise ValueError(
            f"the step strategy {name} picks --diffusion-num-sde-steps steps and that is 0: give at least 1"
        )
    if count > r.diffusion_num_steps:
        raise ValueError(
            f"--diffusion-num-sde-steps {count} is more than --diffusion-num-steps {r.diffusion_num_steps}: lower it"
        )
    if r.diffusion_sde_window_range is not None:
        first, end = r.diffusion_sde_window_range
        if not 0 <= first < end <= r.diffusion_num_steps:
            raise ValueError(
                f"--diffusion-sde-window-range {first},{end} does not lie inside the schedule 0,{r.diffusion_num_steps}: "
                "give first,end with 0 <= first < end <= diffusion_num_steps"
            )
        if count > end - first:
            raise ValueError(f"--diffusion-num-sde-steps {count} does not fit the window range {first},{end}: widen it")
        if name not in ("sde_window", OWN):
            raise ValueError(f"--diffusion-sde-window-range belongs to sde_window, not {name}: leave it out")
        if count == 0 and name != OWN:
            raise ValueError("--diffusion-sde-window-range needs --diffusion-num-sde-steps: give at least 1")
    if r.diffusion_sde_candidate_steps is not None:
        wrong = [s for s in r.diffusion_sde_candidate_steps if not 0 <= s < r.diffusion_num_steps]
        if wrong:
            raise ValueError(
                f"--diffusion-sde-candidate-steps holds {wrong[0]}, outside the steps 0..{r.diffusion_num_steps - 1}: take it out"
            )
        if len(set(r.diffusion_sde_candidate_steps)) != len(r.diffusion_sde_candidate_steps):
            raise ValueError("--diffusion-sde-candidate-steps names a step twice: name each once")
        if name not in ("epoch_global_random_choice", OWN):
            raise ValueError(
                f"--diffusion-sde-candidate-steps belongs to epoch_global_random_choice, not {name}: leave it out"
            )
        if count > len(r.diffusion_sde_candidate_steps):
            raise ValueError(
                f"--diffusion-num-sde-steps {count} is more than the candidate steps: lower it or name more"
            )


def dynamics(c: RunConfig) -> None:
    r = c.rollout
    if c.algorithm.loss_type == "policy_loss" and r.diffusion_sde_type == "ode":
        raise ValueError(
            "--diffusion-sde-type ode leaves --loss-type policy_loss without one SDE step: choose sde or cps"
        )
    if r.diffusion_noise_level == 0 and r.diffusion_sde_type != "ode":
        raise ValueError(
            f"--diffusion-noise-level 0 makes {r.diffusion_sde_type} steps deterministic: give a level above 0"
        )
    if r.diffusion_sde_type == "cps" and r.diffusion_noise_level > 1:
        raise ValueError(f"--diffusion-noise-level {r.diffusion_noise_level}: cps takes levels up to 1, lower it")
    if r.diffusion_sde_type == "cps" and not r.diffusion_log_prob_no_const and _may_train_last_step(c):
        raise ValueError(
            "cps over the last step has no log-prob (its noise is 0): give --diffusion-log-prob-no-const, "
            f"or end the steps before {r.diffusion_num_steps - 1}"
        )
    if r.diffusion_sde_type == "cps" and c.algorithm.diffusion_kl_beta > 0 and _may_train_last_step(c):
        raise ValueError(
            "cps over the last step has no KL (its noise is 0): give --diffusion-kl-beta 0, "
            f"or end the steps before {r.diffusion_num_steps - 1}"
        )
    if r.diffusion_sde_type == "sde" and r.diffusion_num_steps < 2:
        raise ValueError("--diffusion-num-steps 1 gives an sde step no sigma below 1: give at least 2")
    for name in ("diffusion_height", "diffusion_width"):
        if getattr(r, name) % 16:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(r, name)} is not a multiple of 16: change it")


def _may_train_last_step(c: RunConfig) -> bool:
    r = c.rollout
    last = r.diffusion_num_steps - 1
    if strategy_name(r.diffusion_step_strategy_path) == OWN:
        return False
    if r.diffusion_num_sde_steps == 0:
        return True
    if strategy_name(r.diffusion_step_strategy_path) == "sde_window":
        return (r.diffusion_sde_window_range or (0, r.diffusion_num_steps))[1] > last
    return last in (r.diffusion_sde_candidate_steps or range(r.diffusion_num_steps))


def optimizer(c: RunConfig) -> None:
    o = c.optimizer
    if o.lr_decay_style != "constant" and o.lr_decay_iters is None:
        raise ValueError(
            f"--lr-decay-style {o.lr_decay_style} needs --lr-decay-iters, counted in optimizer steps: give it"
        )
    if o.lr_warmup_fraction is not None and o.lr_decay_iters is None:
        raise ValueError("--lr-warmup-fraction is a share of --lr-decay-iters: give that too")
    if o.lr_warmup_fraction is not None and o.lr_warmup_iters:
        raise ValueError("--lr-warmup-fraction and --lr-warmup-iters say the same thing twice: give one")
    if (o.lr_wsd_decay_iters is not None or o.lr_wsd_decay_style is not None) and o.lr_decay_style != "WSD":
        raise ValueError(
            "--lr-wsd-decay-iters and --lr-wsd-decay-style belong to --lr-decay-style WSD: choose it or leave them out"
        )
    if o.lr_decay_style == "WSD" and o.lr_wsd_decay_iters is None:
        raise ValueError("--lr-decay-style WSD needs --lr-wsd-decay-iters: give it")
    if o.lr_wsd_decay_iters is not None and o.lr_decay_iters is not None and o.lr_wsd_decay_iters > o.lr_decay_iters:
        raise ValueError(
            f"--lr-wsd-decay-iters {o.lr_wsd_decay_iters} is more than --lr-decay-iters {o.lr_decay_iters}: lower it"
        )
    if o.min_lr > o.lr:
        raise ValueError(f"--min-lr {o.min_lr} is above --lr {o.lr}: lower it")
    warmup = o.lr_warmup_iters or int((o.lr_warmup_fraction or 0) * (o.lr_decay_iters or 0))
    if o.lr_decay_iters is not None and warmup > o.lr_decay_iters:
        raise ValueError(f"--lr-warmup-iters {warmup} is more than --lr-decay-iters {o.lr_decay_iters}: lower it")


def retention(c: RunConfig) -> None:
    if c.run.keep_full_checkpoints == 1:
        raise ValueError(
            "--keep-full-checkpoints 1 leaves nothing to make the newest update again from: give at least 2, or 0 for all"
        )


def ranks(c: RunConfig) -> None:
    world = c.cluster.actor_num_nodes * c.cluster.actor_num_gpus_per_node
    if world % c.training.dp_replicate_size:
        raise ValueError(
            f"--dp-replicate-size {c.training.dp_replicate_size} does not divide actor_num_nodes "
            f"{c.cluster.actor_num_nodes} x actor_num_gpus_per_node {c.cluster.actor_num_gpus_per_node} = {world} "
            "trainer ranks: change one of the three"
        )


def evaluation(c: RunConfig) -> None:
    if c.evaluation.eval_interval is not None and c.evaluation.eval_prompt_data is None:
        raise ValueError("--eval-interval needs prompts to evaluate on: give --eval-prompt-data NAME PATH")


def needs(c: RunConfig) -> None:
    if not c.lora.use_lora:
        raise ValueError("training all weights is not there yet: give --use-lora")
    if c.algorithm.ref_mode == "none" and c.algorithm.diffusion_kl_beta > 0:
        raise ValueError("--diffusion-kl-beta above 0 needs a reference: leave out --ref-mode none")
    if c.cluster.device == "cpu" and c.rollout.diffusion_generator_device == "cuda":
        raise ValueError(
            "--diffusion-generator-device cuda needs a GPU and --device is cpu: give --diffusion-generator-device cpu"
        )


# What an engine of ours gives its server itself.
_OWN = (
    *("model_type", "model_path", "model_id", "backend", "served_model_name", "host", "port"),
    *("scheduler_port", "master_port"),
    *("strict_ports", "warmup_mode", "dit_precision"),
)


def engine(c: RunConfig) -> None:
    options = c.rollout.sglang_options
    if options and c.cluster.rollout_engine != "sglang":
        raise ValueError(f"--sglang-{next(iter(options)).replace('_', '-')} needs --rollout-engine sglang")
    if c.cluster.use_fault_tolerance and c.cluster.rollout_engine != "sglang":
        raise ValueError(
            "--use-fault-tolerance looks after sglang servers: give --rollout-engine sglang, or leave it out"
        )
    for name in _OWN:
        if name in options:
            raise ValueError(f"--sglang-{name.replace('_', '-')} is given by the run itself: leave it out")
    if options.get("batching_max_size", "1") != "1":
        raise ValueError("--sglang-batching-max-size above 1 makes requests with several outputs fail: leave it out")


def rewards(c: RunConfig) -> None:
    r, known = c.reward, get_args(get_args(type(c.reward).model_fields["rm_type"].annotation)[0])
    if r.rm_types is None:
        for name in ("rm_weights", "rm_normalize"):
            if getattr(r, name):
                raise ValueError(f"--{name.replace('_', '-')} belongs to --rm-types: give that too, or leave it out")
        return
    for wrong in (name for name in r.rm_types if name not in known):
        raise ValueError(f"--rm-types names {wrong!r}, which is no scorer: choose from {', '.join(known)}")
    if len(set(r.rm_types)) != len(r.rm_types) or not r.rm_types:
        raise ValueError("--rm-types names no scorer, or one twice: name each once")
    if r.rm_weights is not None and len(r.rm_weights) != len(r.rm_types):
        raise ValueError(
            f"--rm-weights has {len(r.rm_weights)} weights for the {len(r.rm_types)} scorers of --rm-types: give one each"
        )
    for path in ("custom_rm_path", "custom_reward_post_process_path"):
        own = c.flat()[path]
        if own and (path == "custom_rm_path" or r.rm_normalize):
            raise ValueError(
                f"--{path.replace('_', '-')} and {'--rm-types' if path == 'custom_rm_path' else '--rm-normalize'} both say what "
                "the reward is: leave one out"
            )


def own_objective(c: RunConfig) -> None:
    a, needed = c.algorithm, []
    if a.loss_type == "custom_loss":
        pairs = a.custom_expand_samples_to_train_pairs_path or a.custom_convert_samples_to_train_data_path
        needed = [
            *([] if a.custom_loss_function_path else ["--custom-loss-function-path"]),
            *([] if a.custom_prepare_train_batch_path else ["--custom-prepare-train-batch-path"]),
            *(
                []
                if pairs
                else ["--custom-expand-samples-to-train-pairs-path (or --custom-convert-samples-to-train-data-path)"]
            ),
        ]
    if needed:
        raise ValueError(
            f"--loss-type custom_loss needs {', '.join(needed)}: give them (Flow-GRPO's are in "
            "miles_core.algorithms.flow_grpo and .train_pairs), or replace single ones under --loss-type policy_loss"
        )
    if a.custom_convert_samples_to_train_data_path:
        for name in ("custom_expand_samples_to_train_pairs_path", "custom_reward_post_process_path", "rm_normalize"):
            if c.flat()[name]:
                raise ValueError(
                    f"--custom-convert-samples-to-train-data-path stands in the place of --{name.replace('_', '-')}: leave one "
                    "out"
                )


def waves(c: RunConfig) -> None:
    size, least = c.over_sampling_batch_size, c.data.rollout_batch_size
    if size < least:
        raise ValueError(
            f"--over-sampling-batch-size {size} is less than --rollout-batch-size {least}: a wave draws at least the prompts "
            "that are trained on, raise it"
        )
    if c.sampling.dynamic_sampling_filter_path == NONZERO_STD and c.data.n_samples_per_prompt == 1:
        raise ValueError(
            f"--dynamic-sampling-filter-path {NONZERO_STD} drops every group of one sample: give --n-samples-per-prompt 2 or "
            "more"
        )


CHECKS: tuple[Callable[[RunConfig], None], ...] = (
    batches,
    steps,
    dynamics,
    optimizer,
    retention,
    ranks,
    evaluation,
    engine,
    rewards,
    own_objective,
    waves,
    guard,
    needs,
)

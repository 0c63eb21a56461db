"""Batch sizes and the learning rate's course. That they divide is checked when the configuration is made."""

from __future__ import annotations

from miles_core.doctor.check import Finding, passed, stopped, warned
from miles_core.doctor.subject import Subject
from miles_core.training.lr_schedule import learning_rate

_LOOKED_AT = 200
_STILL = 1e-4


def batches(subject: Subject) -> Finding:
    """Groups that can teach, and work for every engine and every rank."""
    c = subject.config
    n, size, per_step = c.data.n_samples_per_prompt, c.rollout.rollout_microgroup_size, c.global_batch_size
    found = (
        f"{c.samples_per_rollout} samples an iteration ({c.data.rollout_batch_size} prompts x {n}), "
        f"{c.steps_per_rollout} optimizer steps of {per_step}, microgroups of {size}"
    )
    if n == 1 and not c.algorithm.globalize_reward_mean:
        return stopped(f"{found}: with one sample a prompt every advantage is 0", "--n-samples-per-prompt 8")
    microgroups, ranks = c.samples_per_rollout // size, c.cluster.actor_num_nodes * c.cluster.actor_num_gpus_per_node
    if microgroups < c.cluster.rollout_num_engines:
        return warned(
            f"{found}: {microgroups} microgroups leave some of the {c.cluster.rollout_num_engines} engines idle",
            f"--rollout-num-engines {microgroups}, or a smaller --rollout-microgroup-size",
        )
    if per_step % ranks:
        return warned(
            f"{found}: {per_step} samples do not divide over {ranks} trainer ranks, so that some wait for others",
            "change --global-batch-size or --actor-num-gpus-per-node",
        )
    return passed(found)


def learning_rates(subject: Subject) -> Finding:
    """The learning rate over all optimizer steps of the run."""
    c, args = subject.config, subject.config.args()
    total = c.run.num_rollout * c.steps_per_rollout
    steps = sorted({round(i * (total - 1) / (_LOOKED_AT - 1)) for i in range(_LOOKED_AT)})
    rates = [learning_rate(step, args) for step in steps]
    reach = sum(rates) / len(rates) * total
    found = f"{total} optimizer steps, learning rate {rates[0]:g} at the first, {max(rates):g} at most, {rates[-1]:g} at the last"
    dead = next((step for step, rate in zip(steps, rates, strict=True) if rate == 0), None)
    if dead is not None:
        return warned(f"{found}: it is 0 from about step {dead}", f"--lr-decay-iters {total}, or --min-lr above 0")
    if max(rates) < c.optimizer.lr and args.lr_decay_style == "constant":
        return warned(f"{found}: the run ends within its warm-up", f"--lr-warmup-iters below {total}")
    if reach < _STILL:
        return warned(
            f"{found}: Adam moves no weight of the LoRA further than about {reach:.1e} in the whole run",
            "a larger --lr (3e-4 is usual for a LoRA), or more --num-rollout",
        )
    return passed(found)

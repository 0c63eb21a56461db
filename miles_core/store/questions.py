"""Questions that people ask of a run, ready as SQL over its views."""

from dataclasses import dataclass

from miles_core.errors import InputError


@dataclass(frozen=True)
class Question:
    """What is asked, in a line, and the SQL that answers it."""

    asks: str
    sql: str


_GROUPS = """\
SELECT run, iteration, group_index, any_value(prompt) AS prompt, count(*) AS samples,
       avg(reward) AS mean, min(reward) AS min, max(reward) AS max
FROM samples
WHERE reward IS NOT NULL
GROUP BY run, iteration, group_index
ORDER BY mean {order}, run, group_index
LIMIT 20"""

QUESTIONS = {
    "worst-groups": Question("the 20 groups of the lowest mean reward", _GROUPS.format(order="ASC")),
    "best-groups": Question("the 20 groups of the highest mean reward", _GROUPS.format(order="DESC")),
    "zero-std-prompts": Question(
        "prompts whose groups have one reward for all samples and teach nothing",
        """\
SELECT run, prompt, count(DISTINCT group_index) AS groups,
       count(DISTINCT group_index) FILTER (WHERE zero_std) AS without_spread,
       avg(reward) FILTER (WHERE zero_std) AS their_reward
FROM samples
GROUP BY run, prompt
HAVING without_spread > 0
ORDER BY without_spread DESC, run, prompt""",
    ),
    "repeated-seeds": Question(
        "seeds that several samples of a prompt share: they start from the same noise",
        """\
SELECT run, prompt, seed, count(*) AS samples, list(sample_index ORDER BY sample_index) AS sample_indices
FROM prompts
GROUP BY run, prompt, seed
HAVING count(*) > 1
ORDER BY samples DESC, run, seed, prompt""",
    ),
    "slowest-microgroups": Question(
        "the 20 requests that took an engine longest, with the part that holds them",
        """\
SELECT run, iteration, part, engine, count(*) AS samples, max(seconds) AS seconds, min(started_at) AS started_at,
       any_value(prompt) AS prompt
FROM rollout
GROUP BY run, iteration, attempt, part, engine
ORDER BY seconds DESC, run, iteration, part
LIMIT 20""",
    ),
    "reward-by-iteration": Question(
        "mean, spread and range of the reward, iteration by iteration",
        """\
SELECT run, iteration, count(*) AS samples, avg(reward) AS mean, stddev_pop(reward) AS std,
       min(reward) AS min, max(reward) AS max
FROM rewards
GROUP BY run, iteration
ORDER BY run, iteration""",
    ),
    "reward-by-prompt": Question(
        "mean and range of the reward, prompt by prompt, lowest first",
        """\
SELECT run, prompt, count(*) AS samples, avg(reward) AS mean, min(reward) AS min, max(reward) AS max
FROM samples
WHERE reward IS NOT NULL
GROUP BY run, prompt
ORDER BY mean, run, prompt""",
    ),
    "clipped": Question(
        "optimizer steps with clipped pairs, largest share first",
        """\
SELECT run, iteration, step, clip_frac, ratio_mean, ratio_max_abs_dev, pairs, loss
FROM "update"
WHERE clip_frac > 0
ORDER BY clip_frac DESC, run, iteration, step""",
    ),
    "failed-rewards": Question(
        "samples whose scoring failed before it succeeded",
        """\
SELECT run, iteration, sample_index, tries, rm_type, reward, worker, seconds
FROM rewards
WHERE tries > 1
ORDER BY tries DESC, run, sample_index""",
    ),
    "unscored": Question(
        "iterations with generated samples that have no reward yet",
        """\
SELECT run, iteration, count(*) AS samples
FROM samples
WHERE policy_digest IS NOT NULL AND reward IS NULL
GROUP BY run, iteration
ORDER BY run, iteration""",
    ),
    "times-by-stage": Question(
        "seconds from start to commit, stage by stage, over all committed attempts",
        """\
SELECT run, stage, count(*) AS attempts, avg(seconds) AS mean, max(seconds) AS max, sum(seconds) AS total
FROM manifests
GROUP BY run, stage
ORDER BY run, total DESC""",
    ),
}


def question(name: str) -> Question:
    """A question by its name. Raises InputError that lists those there are."""
    if name not in QUESTIONS:
        raise InputError(f"there is no question {name!r}: choose one of {', '.join(QUESTIONS)}")
    return QUESTIONS[name]

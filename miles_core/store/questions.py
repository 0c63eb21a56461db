"""Questions that people ask of a run, ready as SQL over its views."""

from dataclasses import dataclass

from miles_core.errors import InputError


@dataclass(frozen=True)
class Question:
    """What is asked, in a line, and the SQL that answers it."""

    asks: str
    sql: str


# Under --attempts no figure mixes attempts: what is made of one attempt is grouped by it, what goes over a run by `beside`,
# the attempt that is not on the line; null: the line.
_GROUPS = """\
SELECT run, iteration, rewards_attempt, advantages_attempt, on_line, group_index, any_value(prompt) AS prompt,
       count(*) AS samples, avg(reward) AS mean, min(reward) AS min, max(reward) AS max
FROM samples
WHERE reward IS NOT NULL
GROUP BY run, iteration, rewards_attempt, advantages_attempt, on_line, group_index
ORDER BY mean {order}, run, group_index, rewards_attempt, advantages_attempt
LIMIT 20"""

QUESTIONS = {
    "worst-groups": Question("the 20 groups of the lowest mean reward", _GROUPS.format(order="ASC")),
    "best-groups": Question("the 20 groups of the highest mean reward", _GROUPS.format(order="DESC")),
    "zero-std-prompts": Question(
        "prompts whose groups have one reward for all samples and teach nothing",
        """\
SELECT run, prompt, if(on_line, NULL, advantages_attempt) AS beside, count(DISTINCT group_index) AS groups,
       count(DISTINCT group_index) FILTER (WHERE zero_std) AS without_spread,
       avg(reward) FILTER (WHERE zero_std) AS their_reward
FROM samples
GROUP BY run, prompt, beside
HAVING without_spread > 0
ORDER BY without_spread DESC, run, prompt, beside""",
    ),
    "repeated-seeds": Question(
        "seeds that several samples of a prompt share: they start from the same noise",
        """\
SELECT run, prompt, seed, count(DISTINCT sample_index) AS samples,
       list(DISTINCT sample_index ORDER BY sample_index) AS sample_indices
FROM prompts
GROUP BY run, prompt, seed
HAVING count(DISTINCT sample_index) > 1
ORDER BY samples DESC, run, seed, prompt""",
    ),
    "slowest-microgroups": Question(
        "the 20 requests that took an engine longest, with the part that holds them",
        """\
SELECT run, iteration, attempt, on_line, part, engine, count(*) AS samples, max(seconds) AS seconds,
       min(started_at) AS started_at, any_value(prompt) AS prompt
FROM rollout
GROUP BY run, iteration, attempt, on_line, part, engine
ORDER BY seconds DESC, run, iteration, part, attempt
LIMIT 20""",
    ),
    "reward-by-iteration": Question(
        "mean, spread and range of the reward, iteration by iteration",
        """\
SELECT run, iteration, attempt, on_line, count(*) AS samples, avg(reward) AS mean, stddev_pop(reward) AS std,
       min(reward) AS min, max(reward) AS max
FROM rewards
GROUP BY run, iteration, attempt, on_line
ORDER BY run, iteration, on_line DESC, attempt""",
    ),
    "reward-by-prompt": Question(
        "mean and range of the reward, prompt by prompt, lowest first",
        """\
SELECT run, prompt, if(on_line, NULL, rewards_attempt || ' ' || coalesce(advantages_attempt, '')) AS beside,
       count(*) AS samples, avg(reward) AS mean, min(reward) AS min, max(reward) AS max
FROM samples
WHERE reward IS NOT NULL
GROUP BY run, prompt, beside
ORDER BY mean, run, prompt, beside""",
    ),
    "changed-rewards": Question(
        "samples whose reward differs between attempts that scored one image, the line's attempt first",
        """\
SELECT run, iteration, sample_index, prompt, list(reward ORDER BY on_line DESC, attempt) AS rewards,
       list(rm_type ORDER BY on_line DESC, attempt) AS rm_types, list(attempt ORDER BY on_line DESC, attempt) AS attempts
FROM rewards_all
JOIN (SELECT DISTINCT run, iteration, sample_index, row_digest AS rollout_digest, prompt FROM rollout_all)
USING (run, iteration, sample_index, rollout_digest)
GROUP BY run, iteration, sample_index, rollout_digest, prompt
HAVING count(DISTINCT reward) > 1
ORDER BY count(DISTINCT rm_type), run, iteration, sample_index""",
    ),
    "reward-outliers": Question(
        "samples whose reward lies 8 or more spreads from the median of the run's rewards of its rm_type; "
        "a spread is the median absolute deviation, where that is 0 the mean one",
        """\
WITH centred AS (
    SELECT *, median(reward) OVER (PARTITION BY run, rm_type) AS median FROM rewards
), spreads AS (
    SELECT *, abs(reward - median) AS distance,
           median(abs(reward - median)) OVER (PARTITION BY run, rm_type) AS mad,
           avg(abs(reward - median)) OVER (PARTITION BY run, rm_type) AS mean_deviation
    FROM centred
)
SELECT run, iteration, attempt, on_line, sample_index, reward, median, if(mad > 0, mad, mean_deviation) AS spread,
       distance / spread AS spreads_away, rm_type, rm_version, worker, seconds AS scorer_seconds
FROM spreads
WHERE spread > 0 AND spreads_away >= 8
ORDER BY spreads_away DESC, run, sample_index, attempt""",
    ),
    "clipped": Question(
        "optimizer steps with clipped pairs, largest share first",
        """\
SELECT run, iteration, attempt, on_line, step, clip_frac, ratio_mean, ratio_max_abs_dev, pairs, loss
FROM "update"
WHERE clip_frac > 0
ORDER BY clip_frac DESC, run, iteration, step, attempt""",
    ),
    "failed-rewards": Question(
        "samples whose scoring failed before it succeeded",
        """\
SELECT run, iteration, attempt, on_line, sample_index, tries, rm_type, reward, worker, seconds
FROM rewards
WHERE tries > 1
ORDER BY tries DESC, run, sample_index, attempt""",
    ),
    "unscored": Question(
        "iterations with generated samples that have no reward yet",
        """\
SELECT run, iteration, rollout_attempt, on_line, count(*) AS samples
FROM samples
WHERE policy_digest IS NOT NULL AND reward IS NULL
GROUP BY run, iteration, rollout_attempt, on_line
ORDER BY run, iteration, on_line DESC, rollout_attempt""",
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

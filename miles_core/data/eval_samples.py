"""The samples of an evaluation: the same in every one, with seeds that no training sample ever has."""

from collections.abc import Sequence

from miles_core.data.prompts import Prompt
from miles_core.data.sample import Sample
from miles_core.errors import InputError

# Training's seeds lie below 2^31 + n. Of a seed a CPU generator takes the low 32 bits alone, so that nothing above
# 2^32 is far from them.
FIRST_SEED, END_SEED = 3 * 2**30, 2**32


def eval_seed(prompt_index: int, n_samples_per_eval_prompt: int, offset: int) -> int:
    """Seed of a prompt's sample at `offset`. Prompts lie n apart, whatever the run's own seed and the iteration."""
    return FIRST_SEED + prompt_index * n_samples_per_eval_prompt + offset


def eval_samples(prompts: Sequence[Prompt], n_samples_per_eval_prompt: int) -> list[list[Sample]]:
    """Each prompt's samples, numbered through from 0; group_index is the prompt's.

    Raises InputError where there are more samples than seeds.
    """
    n = n_samples_per_eval_prompt
    if len(prompts) * n > END_SEED - FIRST_SEED:
        raise InputError(
            f"--n-samples-per-eval-prompt {n} of {len(prompts)} prompts is more than 2^30 samples: lower it"
        )
    return [
        [
            Sample(
                group_index=prompt.index,
                index=prompt.index * n + offset,
                prompt=prompt.text,
                seed=eval_seed(prompt.index, n, offset),
                metadata=prompt.metadata,
            )
            for offset in range(n)
        ]
        for prompt in prompts
    ]

"""The prompt file: how many, how often, with what targets, and what of them the text encoders read."""

from __future__ import annotations

from collections import Counter

from miles_core.doctor.check import Finding, passed, warned
from miles_core.doctor.subject import Subject
from miles_core.families.sizes import SHAPES
from miles_core.pipeline.source import reads_prompt_file
from miles_core.rewards.quoted import quoted_target

_SHOWN = 40


def prompts(subject: Subject) -> Finding:
    """Raises InputError, with file and line, for a prompt that is broken, empty, or has no target for OCR to look for."""
    found, batch = subject.prompts, subject.config.data.rollout_batch_size
    if not reads_prompt_file(subject.config):
        first = _short(found[0].text)
        return passed(
            f"{len(found)} prompts of iteration 0 by {subject.config.sampling.data_source_path}, the first {first!r}"
        )
    texts = Counter(prompt.text for prompt in found)
    text = f"{len(found)} prompts, {len(texts)} different"
    run, named = subject.config.scorers, subject.config.reward.rm_types is None
    read = [p for p in found if "ocr" in ((p.metadata.get("rm_type"),) if named and p.metadata.get("rm_type") else run)]
    targets = [quoted_target(p.text) or "" for p in read]
    if targets:
        longest = max(targets, key=len)
        text += f"; {len(targets)} with a quoted target, the longest {_short(longest)!r} of {len(longest)} characters"
    if len(texts) < len(found):
        most, times = texts.most_common(1)[0]
        return warned(f"{text}: {_short(most)!r} stands there {times} times", "take the doubles out of --prompt-data")
    if len(found) < batch:
        return warned(
            f"{text}, fewer than the {batch} of an iteration, which draws some of them twice",
            f"more prompts, or --rollout-batch-size {len(found)}",
        )
    return passed(text)


def prompt_length(subject: Subject) -> Finding:
    """Tokens of the prompts against what each text encoder reads; the rest of a prompt is cut off."""
    from miles_core.families.base import DiffusersModelBackend

    texts = [prompt.text for prompt in subject.prompts]
    tokenizers = DiffusersModelBackend().load_tokenizers(subject.checkpoint)
    limits = SHAPES[subject.family].text_tokens(subject.checkpoint)
    lengths = {name: [len(ids) for ids in tokenizers[name](texts).input_ids] for name in limits}
    longest = ", ".join(f"{max(lengths[name])} of {limits[name]} ({name})" for name in limits)
    cut = [i for i in range(len(texts)) if all(lengths[name][i] > limits[name] for name in limits)]
    partly = sum(any(lengths[name][i] > limits[name] for name in limits) for i in range(len(texts)))
    found = f"the longest prompt has {longest} tokens"
    if cut:
        return warned(
            f"{found}: {len(cut)} prompts are cut by every text encoder, the first is {_short(texts[cut[0]])!r}",
            "shorten those in --prompt-data",
        )
    if partly:
        return passed(f"{found}; {partly} prompts are cut by some encoders and read whole by another")
    return passed(found)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"

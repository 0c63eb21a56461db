"""What a trainer rank does otherwise where an option of the update is changed (pitfall 32)."""

import pytest
import torch
from safetensors.torch import load
from trained_rollouts import gradients, run_config

from miles_core.rollout.microgroup import microgroups
from miles_core.rollout.parsing import read_conditioning
from miles_core.store.files import Files
from miles_core.store.parts import read_bytes, read_table
from miles_core.training.inputs import Rollout, rank_share, row_args
from miles_core.training.rows import index_rollout, merge, read_advantages
from miles_core.weights.adapter_file import adapter_info, to_push


@pytest.fixture(scope="module")
def inputs(iteration):
    return iteration.inputs("flags", shifted=True)


@pytest.fixture(scope="module")
def rollout(iteration, inputs):
    files = iteration.files
    part_of, dynamics = merge([index_rollout(files, microgroups(inputs.rollout, inputs.latents))])
    texts = {}
    for part in inputs.conditioning:
        texts |= read_conditioning(read_table(files, part))
    return Rollout(read_advantages(files, inputs.advantages), part_of, dynamics, texts)


def share(iteration, rollout, rank=0, world=1, **changes):
    config = run_config(**changes)
    args = row_args(config, rollout.dynamics)
    return rank_share(iteration.files, rollout, rollout.advantages, args, config, rank, world)


def forwards(share):
    """(sample, step) of the pairs of each micro-batch."""
    pairs = list(zip(share.pairs["sample_index"], share.pairs["step"], strict=True))
    return [[pairs[row] for row in rows] for rows in share.micro_batches]


def test_a_ranks_micro_batches_are_those_asked_for(iteration, rollout):
    """Four samples at three steps (pitfall 32)."""

    def made(**changes):
        return forwards(share(iteration, rollout, **changes))

    assert [len(batch) for batch in made(micro_batch_size=2)] == [2] * 6
    assert [len(batch) for batch in made(micro_batch_size=5)] == [5, 5, 2]
    flat = {"micro_batch_size": 4}
    assert made(**flat)[0] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert made(**flat, diffusion_train_iter_order="timestep_major")[0] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    tiles = {(s, t): made(micro_batch_size_sample=s, micro_batch_size_tstep=t) for s, t in ((2, 1), (4, 1), (2, 2))}
    assert {size: batches[0] for size, batches in tiles.items()} == {
        (2, 1): [(0, 0), (1, 0)],
        (4, 1): [(0, 0), (1, 0), (2, 0), (3, 0)],
        (2, 2): [(0, 0), (0, 1), (1, 0), (1, 1)],
    }


def test_a_rank_takes_the_samples_asked_for(iteration, rollout):
    """(pitfall 32)"""

    def samples(rank, mode):
        return [s.index for s in share(iteration, rollout, rank, 2, train_dp_split_mode=mode).samples]

    assert [samples(rank, "contiguous") for rank in (0, 1)] == [[0, 1], [2, 3]]
    assert [samples(rank, "stride") for rank in (0, 1)] == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("changes", "steps", "samples"),
    [
        ({}, 1, 4),
        ({"num_steps_per_rollout": 2}, 2, 2),
        ({"global_batch_size": 2}, 2, 2),
        ({"global_batch_size": 1}, 4, 1),
    ],
)
def test_as_many_steps_and_samples_as_the_options_say(iteration, inputs, make, changes, steps, samples):
    """(pitfall 32)"""
    result = make(**changes).update(iteration.files, inputs, f"flags/steps-{changes}")
    assert [row["samples"] for row in result.metrics] == [samples] * steps


def test_the_forward_is_in_the_dtype_given(iteration, inputs, make):
    """(pitfall 32)"""
    found = {}
    for dtype in ("fp32", "bf16"):
        one = make(diffusion_forward_dtype=dtype)
        seen = set()
        linear = one._transformer.transformer_blocks[0].attn.to_q
        linear.register_forward_hook(lambda module, given, output, seen=seen: seen.add(output.dtype))
        found[dtype] = gradients(iteration.files, one.update(iteration.files, inputs, f"flags/forward-{dtype}").parts)
        assert seen == {torch.float32 if dtype == "fp32" else torch.bfloat16}
        assert {p.dtype for p in one._parameters.values()} == {torch.float32}
    apart = max((found["bf16"][n] - t).norm().item() for n, t in found["fp32"].items())
    assert apart > 0


def test_gradients_are_reduced_in_the_dtype_given(iteration, inputs, make):
    """In bf16 a gradient keeps 8 bits of its 24 (pitfall 32)."""
    found = {}
    for dtype in ("fp32", "bf16"):
        one = make(fsdp_reduce_dtype=dtype, clip_grad=0)
        result = one.update(iteration.files, inputs, f"flags/reduce-{dtype}")
        found[dtype] = gradients(iteration.files, result.parts)
        assert result.metrics[0]["grad_norm"] > 0
    whole, coarse = (torch.cat([found[dtype][n].flatten() for n in sorted(found[dtype])]) for dtype in ("fp32", "bf16"))
    assert 2**-11 < (coarse - whole).norm() / whole.norm() < 2**-6


def test_activations_are_recomputed_where_that_is_asked(iteration, inputs, make):
    """(pitfall 32)"""
    calls = {}
    for asked in (False, True):
        one = make(gradient_checkpointing=asked)
        block, seen = one._transformer.transformer_blocks[0].ff, []
        block.register_forward_hook(lambda module, given, output, seen=seen: seen.append(1))
        one.update(iteration.files, inputs, f"flags/recomputed-{asked}")
        calls[asked] = len(seen)
    assert calls[True] == 2 * calls[False] > 0


def test_the_reference_is_computed_where_it_is_asked(iteration, inputs, make):
    """Also as a mere figure, without a KL term (pitfall 32)."""
    kl = {}
    for mode in ("none", "lora_base"):
        result = make(ref_mode=mode).update(iteration.files, inputs, f"flags/reference-{mode}")
        kl[mode] = result.metrics[0]["kl_loss"]
    assert kl["none"] == 0 < kl["lora_base"]


def test_the_adapter_has_the_rank_scale_and_modules_given(make, tmp_path):
    """(pitfall 32)"""

    def adapter(name, **changes):
        one = make(**changes)
        data = read_bytes(Files(str(tmp_path)), one.init_policy(Files(str(tmp_path)), name)[0])
        module = one._transformer.transformer_blocks[0].attn.to_q
        return adapter_info(data), load(to_push(data)), module.scaling["default"]

    info, tensors, scale = adapter("base")
    assert (info.rank, info.alpha, scale) == (4, 8, 2.0)
    assert {t.shape[0] for n, t in tensors.items() if "lora_A" in n} == {4}
    info, narrow, scale = adapter("rank", lora_rank=2)
    assert (info.rank, scale) == (2, 4.0)
    assert {t.shape[0] for n, t in narrow.items() if "lora_A" in n} == {2}
    info, _, scale = adapter("alpha", lora_alpha=2)
    assert (info.alpha, scale) == (2, 0.5)
    info, few, _ = adapter("modules", lora_target_modules=("attn.to_q",))
    assert {n.split(".attn.")[1].split(".lora_")[0] for n in few} == {"to_q"} and len(few) == 4 < len(tensors)

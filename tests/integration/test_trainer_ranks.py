"""Several trainer ranks over gloo against one: the same update, and checkpoints that load at another world size."""

import math
import multiprocessing
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "training"))

from trained_rollouts import (
    Iteration,
    adapter_file,
    checkpoint_tensors,
    free_port,
    part_named,
    run_config,
    run_rank,
    trainer,
)

from miles_core.families.tiny_sd3 import make_tiny_sd3
from miles_core.store.parts import read_bytes

pytestmark = pytest.mark.integration

CHANGES = {"diffusion_kl_beta": 0.5, "clip_grad": 0.01, "micro_batch_size": 2}


@pytest.fixture(scope="module")
def iteration(tmp_path_factory):
    model = make_tiny_sd3(tmp_path_factory.mktemp("model") / "tiny-stable-diffusion-3.5-medium")
    return Iteration(tmp_path_factory.mktemp("artifacts"), model, adapter_file(model, scale=0.1))


def ranks(iteration, world, jobs, **changes):
    """Each rank's results of `jobs` (inputs, folder), in rank order, and the policies held."""
    context = multiprocessing.get_context("spawn")
    queue, port, config = context.Queue(), free_port(), run_config(**{**CHANGES, **changes})
    processes = [
        context.Process(
            target=run_rank,
            args=(config, str(iteration.model), iteration.files.root, jobs, rank, world, port, queue),
        )
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        found = sorted(queue.get(timeout=240) for _ in processes)
    finally:
        for process in processes:
            process.join(timeout=60)
            if process.is_alive():
                process.kill()
    return [results for _, results, _ in found], [policy for _, _, policy in found]


def alone(iteration, inputs, out, **changes):
    one = trainer(run_config(**{**CHANGES, **changes}), iteration.model)
    one.start()
    try:
        return one.update(iteration.files, inputs, out)
    finally:
        one.stop()


def whole(iteration, result):
    """The checkpoint's tensors in full, whatever number of ranks wrote it."""
    shards = [load(read_bytes(iteration.files, p)) for p in result.parts if "/checkpoint/shard-" in p.path]
    names = {name for shard in shards for name in shard}
    return {
        name: shards[0][name]
        if name.startswith("step.") and name in shards[0]
        else torch.cat([shard[name] for shard in shards if name in shard])
        for name in names
    }


def worst(found, expected, kind):
    chosen = {n: t.double() for n, t in expected.items() if n.startswith(kind)}
    largest = max(t.norm().item() for t in chosen.values())
    assert largest > 0
    return max(
        ((found[n].double() - t).norm() / max(t.norm().item(), 1e-4 * largest)).item() for n, t in chosen.items()
    )


@pytest.mark.parametrize(("world", "removed"), [(2, ()), (2, (0, 1)), (5, (2,))])
def test_ranks_make_the_update_that_one_makes(iteration, world, removed):
    """Uneven shares, a rank whose samples are all removed, and more ranks than samples included."""
    name = f"ranks-{world}-{len(removed)}"
    inputs = iteration.inputs(name, shifted=True, removed=removed, probe=True)
    expected = alone(iteration, inputs, f"{name}/alone")
    results, policies = ranks(iteration, world, [(inputs, f"{name}/out"), (inputs, f"{name}/again")])
    found = results[0][0]
    assert not isinstance(found, str), found
    assert all(result == results[0] for result in results)
    assert set(policies) == {results[0][1].policy_digest}
    assert len([p for p in found.parts if "/checkpoint/shard-" in p.path]) == world
    a, b = whole(iteration, found), checkpoint_tensors(iteration.files, expected.parts)
    assert a.keys() == b.keys()
    assert worst(a, b, "exp_avg.") < 1e-5
    assert worst(a, b, "model.") < 1e-5
    for key in ("samples", "pairs", "lr", "clip_frac"):
        assert found.metrics[0][key] == expected.metrics[0][key]
    for key in ("loss", "kl_loss", "grad_norm", "ratio_mean", "adv_mean", "ratio_max_abs_dev"):
        assert found.metrics[0][key] == pytest.approx(expected.metrics[0][key], rel=1e-4, abs=1e-6)
    assert [p.sha256 for p in found.parts] == [p.sha256 for p in results[0][1].parts]


def test_checkpoint_of_two_ranks_goes_on_at_one_and_at_two(iteration):
    """miles 2669: resume at another world size left ranks on a fresh adapter. flow_grpo 183: rank 0's random state
    restored on every rank."""
    inputs = iteration.inputs("world", shifted=True)
    first = ranks(iteration, 2, [(inputs, "world/0")])[0][0][0]
    states = load(read_bytes(iteration.files, part_named(first.parts, "rng.safetensors")))
    assert set(states) == {"rank0.cpu", "rank1.cpu"}
    assert not torch.equal(states["rank0.cpu"], states["rank1.cpu"])
    following = iteration.inputs("world-next", policy=(first.parts, first.policy_digest, 1))
    one = trainer(run_config(**CHANGES), iteration.model)
    one.start()
    try:
        one.load(iteration.files, first.parts, first.policy_digest)
        held = whole(iteration, first)
        for name, parameter in one._parameters.items():
            state = one._optimizer.state[parameter]
            assert torch.equal(parameter.detach().full_tensor(), held[f"model.{name}"])
            assert torch.equal(state["exp_avg"].full_tensor(), held[f"exp_avg.{name}"])
            assert torch.equal(state["exp_avg_sq"].full_tensor(), held[f"exp_avg_sq.{name}"])
            assert state["step"].item() == 1
        single = one.update(iteration.files, following, "world-next/alone")
    finally:
        one.stop()
    straight = ranks(iteration, 2, [(inputs, "world/1"), (following, "world-next/straight")])[0][0]
    resumed = ranks(iteration, 2, [(following, "world-next/resumed")])[0][0]
    assert [p.sha256 for p in straight[0].parts] == [p.sha256 for p in first.parts]
    assert [p.sha256 for p in straight[1].parts] == [p.sha256 for p in resumed[0].parts]
    assert straight[1].metrics[0]["global_step"] == 1
    assert worst(whole(iteration, resumed[0]), checkpoint_tensors(iteration.files, single.parts), "exp_avg.") < 1e-4


def test_fault_on_one_rank_stops_all_and_names_the_sample(iteration):
    bad = iteration.inputs("nan-rank", log_probs={(3, 1): math.nan})
    overflow = iteration.inputs("inf-rank", log_probs={(0, 1): -1e6})
    good = iteration.inputs("good-rank")
    results, _ = ranks(
        iteration, 2, [(bad, "nan-rank/out"), (overflow, "inf-rank/out"), (good, "good-rank/out")], micro_batch_size=1
    )
    assert results[0] == results[1]
    assert "samples [3]" in results[0][0] and "samples [0]" in results[0][1]
    expected = alone(iteration, good, "good-rank/alone", micro_batch_size=1)
    assert results[0][2].metrics[0]["grad_norm"] == pytest.approx(expected.metrics[0]["grad_norm"], rel=1e-5)

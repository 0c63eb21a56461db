"""Several trainer ranks over gloo against one: the same updates, and checkpoints that load at another world size."""

import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "training"))

from rank_processes import RankProcesses
from trained_rollouts import Iteration, adapter_file, part_named, run_config, trainer

from miles_core.families.tiny_sd3 import make_tiny_sd3
from miles_core.store.parts import read_bytes
from miles_core.weights.adapter_file import to_push

pytestmark = pytest.mark.integration

CHANGES = {"diffusion_kl_beta": 0.5, "clip_grad": 0.001, "micro_batch_size": 2}
PROMPTS = [f'a sign that says "{word}"' for word in "one two three four five six seven eight nine ten red blue".split()]
FOUR_STEPS = {**CHANGES, "rollout_batch_size": len(PROMPTS), "num_steps_per_rollout": 4}
TWO_STEPS = {**CHANGES, "num_steps_per_rollout": 2}
ADVANTAGES = [(-1) ** i * (0.3 + 0.1 * (7 * i % 11)) for i in range(2 * len(PROMPTS))]
TOLERANCE, LOSS_TOLERANCE = 1e-5, 1e-6


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    return make_tiny_sd3(tmp_path_factory.mktemp("model") / "tiny-stable-diffusion-3.5-medium")


@pytest.fixture(scope="module")
def iteration(tmp_path_factory, model):
    return Iteration(tmp_path_factory.mktemp("artifacts"), model, adapter_file(model, scale=0.1))


@pytest.fixture(scope="module")
def long_iteration(iteration, model):
    """Twelve prompts of two samples: four optimizer steps of six."""
    root = Path(iteration.files.root) / "long"
    made = Iteration(root, model, iteration.adapter, PROMPTS)
    return made, made.inputs("long", advantages=ADVANTAGES, shifted=True, probe=True)


@pytest.fixture(scope="module")
def processes(iteration, model):
    made = RankProcesses(5, model, iteration.files.root)
    yield made
    made.end()


@pytest.fixture(scope="module")
def four_steps(model, long_iteration, tmp_path_factory):
    """Four optimizer steps of `world` ranks; processes of the long iteration's root."""
    made, inputs = long_iteration
    ranks = RankProcesses(4, model, made.files.root)

    def update(world, split="contiguous", replicas=1):
        options = {"train_dp_split_mode": split, "dp_replicate_size": replicas, "actor_num_gpus_per_node": world}
        assert ranks.start(world, run_config(**FOUR_STEPS, **options)) == [None] * world
        mesh = (world,) if replicas == 1 else (replicas, world // replicas)
        assert ranks.call("mesh") == [mesh] * world
        return made, ranks.update(inputs, f"out/{world}-{split}-{replicas}")

    yield update
    ranks.end()


@pytest.fixture(scope="module")
def of_one_rank(four_steps):
    return four_steps(1)[1]


def start(processes, world, **changes):
    assert processes.start(world, run_config(**changes)) == [None] * world


def alone(iteration, inputs, out, **changes):
    one = trainer(run_config(**{**CHANGES, **changes}), iteration.model)
    one.start()
    try:
        return one.update(iteration.files, inputs, out)
    finally:
        one.stop()


def shards(iteration, result):
    return [load(read_bytes(iteration.files, p)) for p in result.parts if "/checkpoint/shard-" in p.path]


def whole(iteration, result):
    """The checkpoint's tensors in full, whatever number of ranks wrote it; none comes twice."""
    pieces = shards(iteration, result)
    names = {name for shard in pieces for name in shard}
    found = {name: torch.cat([shard[name] for shard in pieces if name in shard]) for name in names}
    assert all(found[name].shape == (1,) for name in names if name.startswith("step."))
    return found


def of_adapter(adapter):
    return {f"model.{name}": tensor for name, tensor in load(to_push(adapter)).items()}


def assert_same_training(found, expected, begun):
    """Weights and both moments within the tolerance by each tensor's norm; the weights went at least a hundred times
    as far from `begun` as they lie apart."""
    assert found.keys() == expected.keys()
    moved = 0
    for name, tensor in expected.items():
        apart = (found[name].double() - tensor.double()).norm().item()
        assert found[name].shape == tensor.shape and apart <= TOLERANCE * tensor.double().norm().item(), (name, apart)
        if name.startswith("model.") and expected[name.replace("model.", "exp_avg.")].any():
            way = (tensor.double() - begun[name].double()).norm().item()
            assert way > 0 and way >= 100 * apart, (name, way, apart)
            moved += 1
    assert moved > sum(name.startswith("model.") for name in expected) / 2


def assert_same_rows(found, expected):
    assert len(found.metrics) == len(expected.metrics) > 0
    for row, other in zip(found.metrics, expected.metrics, strict=True):
        assert abs(row["loss"] - other["loss"]) <= LOSS_TOLERANCE and abs(other["loss"]) > 1e-3
        assert other["kl_loss"] > 1e-4 and other["grad_norm"] > CHANGES["clip_grad"]
        for key in ("step", "global_step", "samples", "pairs", "lr", "clip_frac"):
            assert row[key] == other[key]
        for key in ("kl_loss", "grad_norm", "ratio_mean", "adv_mean", "ratio_max_abs_dev"):
            assert row[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("split", ["contiguous", "stride"])
@pytest.mark.parametrize("world", [2, 4])
def test_four_steps_of_several_ranks_are_those_of_one(four_steps, of_one_rank, world, split):
    """Six samples a step: on four ranks the shares are uneven."""
    made, found = four_steps(world, split)
    assert len(shards(made, found)) == world and len(found.metrics) == 4
    assert_same_training(whole(made, found), whole(made, of_one_rank), of_adapter(made.adapter))
    assert_same_rows(found, of_one_rank)


def test_split_modes_give_one_rank_the_same_bits(four_steps, of_one_rank):
    _, found = four_steps(1, "stride")
    assert [p.sha256 for p in found.parts] == [p.sha256 for p in of_one_rank.parts]


@pytest.mark.parametrize(("world", "replicas"), [(4, 2), (2, 2)])
def test_hybrid_sharding_makes_the_same_steps_and_saves_each_tensor_once(four_steps, of_one_rank, world, replicas):
    made, found = four_steps(world, replicas=replicas)
    assert_same_training(whole(made, found), whole(made, of_one_rank), of_adapter(made.adapter))
    assert_same_rows(found, of_one_rank)


@pytest.mark.parametrize(("world", "removed"), [(2, (0, 1)), (5, (2,))])
def test_ranks_without_samples_make_the_update_that_one_makes(iteration, processes, world, removed):
    """A rank whose samples are all removed, and more ranks than samples."""
    name = f"ranks-{world}"
    inputs = iteration.inputs(name, shifted=True, removed=removed, probe=True)
    expected = alone(iteration, inputs, f"{name}/alone")
    start(processes, world, **CHANGES)
    found, again = (processes.update(inputs, f"{name}/{out}") for out in ("out", "again"))
    assert set(processes.call("policy")) == {found.policy_digest}
    assert len(shards(iteration, found)) == world
    assert_same_training(whole(iteration, found), whole(iteration, expected), of_adapter(iteration.adapter))
    assert_same_rows(found, expected)
    assert [p.sha256 for p in found.parts] == [p.sha256 for p in again.parts]


class Curve:
    """Three updates of two steps, each from the policy that the one before left."""

    def __init__(self, iteration, processes, name):
        self.iteration, self.processes, self.name = iteration, processes, name
        self.results = []

    def go_on(self):
        files, number = self.iteration, len(self.results)
        last = self.results[-1] if number else None
        policy = (last.parts, last.policy_digest, 2 * number) if last else None
        inputs = files.inputs(f"{self.name}-{number}", shifted=True, policy=policy)
        self.results.append(self.processes.update(inputs, f"{self.name}-{number}/out"))

    def run(self, *worlds, **changes):
        """An update at each world size, all but the first resumed from the checkpoint by new ranks."""
        for world in worlds:
            start(self.processes, world, **TWO_STEPS, actor_num_gpus_per_node=world, **changes)
            self.go_on()
        return self.results


@pytest.fixture(scope="module")
def undisturbed(iteration, processes):
    """One rank that is never stopped."""
    curve = Curve(iteration, processes, "undisturbed")
    curve.run(1)
    curve.go_on()
    curve.go_on()
    return curve.results


@pytest.mark.parametrize(("worlds", "last"), [((2, 1, 4), {}), ((1, 2, 4), {"dp_replicate_size": 2})])
def test_resume_at_other_world_sizes_stays_on_the_curve_of_one_rank(iteration, processes, undisturbed, worlds, last):
    """A resume of a resume; moments and masters survive, no rank starts afresh (pitfalls 12, 44, 46)."""
    curve = Curve(iteration, processes, f"worlds-{'-'.join(map(str, worlds))}")
    curve.run(*worlds[:2])
    results = curve.run(worlds[2], **last)
    begun = of_adapter(iteration.adapter)
    for found, expected in zip(results, undisturbed, strict=True):
        assert_same_training(whole(iteration, found), whole(iteration, expected), begun)
        assert_same_rows(found, expected)
        begun = whole(iteration, expected)
    assert [row["global_step"] for result in results for row in result.metrics] == list(range(6))


def test_resume_of_a_resume_at_the_same_world_size_has_the_same_bits(iteration, processes):
    """The whole state survives two restarts (pitfalls 13, 46)."""
    straight = Curve(iteration, processes, "straight")
    straight.run(2)
    straight.go_on()
    straight.go_on()
    resumed = Curve(iteration, processes, "resumed").run(2, 2, 2)
    for found, expected in zip(resumed, straight.results, strict=True):
        assert [p.sha256 for p in found.parts] == [p.sha256 for p in expected.parts]
    assert len({result.policy_digest for result in resumed}) == 3


def test_every_rank_gets_its_own_random_state_back(iteration, processes):
    """Not rank 0's on all; a rank that is new draws something else (pitfall 13)."""
    start(processes, 2, **CHANGES)
    made = processes.update(iteration.inputs("random"), "random/out")
    saved = load(read_bytes(iteration.files, part_named(made.parts, "rng.safetensors")))
    assert set(saved) == {"rank0.cpu", "rank1.cpu"} and not torch.equal(saved["rank0.cpu"], saved["rank1.cpu"])
    start(processes, 4, **CHANGES, seed=99)
    fresh = processes.call("random_state")
    assert processes.call("load", made.parts, made.policy_digest) == [None] * 4
    states = processes.call("random_state")
    assert not torch.equal(fresh[0], states[0]) and not torch.equal(fresh[1], states[1])
    assert torch.equal(states[0], saved["rank0.cpu"]) and torch.equal(states[1], saved["rank1.cpu"])
    start(processes, 4, **CHANGES)
    begun = processes.call("random_state")
    assert len({tuple(state.tolist()) for state in [*states, *begun[2:]]}) == 6


def test_checkpoint_of_two_ranks_is_held_in_full_by_one(iteration, processes):
    """Weights, moments and step counts, bit for bit (pitfall 12)."""
    start(processes, 2, **CHANGES)
    first = processes.update(iteration.inputs("world", shifted=True), "world/out")
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
    finally:
        one.stop()


def test_fault_on_one_rank_stops_all_before_the_step_and_names_the_sample(iteration, processes):
    """A NaN in one rank's row, and an overflow in one rank's loss (pitfall 6)."""
    bad = iteration.inputs("nan-rank", log_probs={(3, 1): math.nan})
    overflow = iteration.inputs("inf-rank", log_probs={(0, 1): -1e6})
    good = iteration.inputs("good-rank")
    start(processes, 2, **CHANGES | {"micro_batch_size": 1})
    for inputs, out, sample in ((bad, "nan-rank/out", 3), (overflow, "inf-rank/out", 0)):
        said = processes.call("update", inputs, out)
        assert said[0] == said[1]
        assert f"no optimizer step was taken: samples [{sample}]" in said[0]
        assert processes.call("policy") == ["", ""] and iteration.files.list(out) == []
    found = processes.update(good, "good-rank/out")
    expected = alone(iteration, good, "good-rank/alone", micro_batch_size=1)
    assert_same_training(whole(iteration, found), whole(iteration, expected), of_adapter(iteration.adapter))


def test_deterministic_mode_gives_two_ranks_the_bits_they_have_without_it(iteration, processes):
    inputs = iteration.inputs("deterministic", shifted=True)
    results = []
    for number, mode in enumerate((True, True, False)):
        start(processes, 2, **CHANGES, deterministic_mode=mode)
        results.append(processes.update(inputs, f"deterministic/{number}"))
    first, *others = [[(p.sha256, p.content) for p in result.parts] for result in results]
    assert others == [first, first]
    assert results[0].policy_digest != iteration.digest

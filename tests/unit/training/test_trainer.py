"""TrainerRank's life: same bits, resume, refusals, what it writes."""

import dataclasses
import json
import math
import pickle

import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from safetensors.torch import load
from torch.distributed.tensor import DTensor
from trained_rollouts import (
    ALPHA,
    RANK,
    checkpoint_tensors,
    follow,
    free_port,
    part_named,
    rows_of,
    run_config,
    trainer,
    with_column,
)

from miles_core.errors import StageError
from miles_core.store.files import Files
from miles_core.store.parts import read_bytes, read_table, write_file, write_table
from miles_core.store.schemas import UPDATE
from miles_core.training.checkpoint import state_tensors
from miles_core.training.lr_schedule import learning_rate
from miles_core.training.trainer import TrainerRank
from miles_core.weights.adapter_file import to_push
from miles_core.weights.digest import policy_digest
from miles_core.weights.packing import to_safetensors

SHARD = "shard-00001-model-00001-of-00001.safetensors"
ADAPTER = "adapter/pytorch_lora_weights.safetensors"
TWO_STEPS = {"num_steps_per_rollout": 2, "lr_decay_style": "linear", "lr_decay_iters": 10, "diffusion_kl_beta": 0.1}


def contents(parts):
    return {part.path.split("out/")[-1]: part.content for part in parts if "probe" not in part.path}


def held(one):
    return {name: tensor.clone() for name, tensor in one._adapter().items()}


def checkpoint_state(one):
    """What a one-rank trainer would save, by name."""
    state = state_tensors(one._parameters, one._optimizer)
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}


def test_two_runs_give_the_same_bits(iteration, make):
    inputs = iteration.inputs("bits", shifted=True)
    a = make(**TWO_STEPS).update(iteration.files, inputs, "bits/a/out")
    b = make(**TWO_STEPS).update(iteration.files, inputs, "bits/b/out")
    assert a.metrics[0]["grad_norm"] > 0 and a.metrics[1]["grad_norm"] > 0
    assert a.policy_digest == b.policy_digest != iteration.digest
    for one, other in zip(a.parts, b.parts, strict=True):
        assert one.sha256 == other.sha256, one.path
    assert a.rows.content == b.rows.content


def test_resumed_training_is_bit_equal_to_uninterrupted(iteration, make):
    """Moments, masters, schedule and step count survive (pitfalls 12, 13, 42)."""
    one = make(**TWO_STEPS)
    first = one.update(iteration.files, iteration.inputs("resume/0"), "resume/0/out")
    straight = one.update(iteration.files, follow(iteration, first, "resume/1", 2), "resume/1/out")
    other = make(**TWO_STEPS)
    resumed = other.update(iteration.files, follow(iteration, first, "resume/1b", 2), "resume/1b/out")
    assert [row["global_step"] for row in resumed.metrics] == [2, 3]
    assert [row["lr"] for row in resumed.metrics] == [learning_rate(step, other.config.args()) for step in (2, 3)]
    assert resumed.metrics[0]["lr"] < first.metrics[0]["lr"]
    assert contents(straight.parts) == contents(resumed.parts)
    assert straight.rows.content == resumed.rows.content
    tensors = checkpoint_tensors(iteration.files, resumed.parts)
    assert {t.item() for n, t in tensors.items() if n.startswith("step.")} == {4.0}
    moved = [n for n, t in checkpoint_tensors(iteration.files, first.parts).items() if not torch.equal(t, tensors[n])]
    assert len(moved) > len(tensors) / 2
    third = make(**TWO_STEPS).update(iteration.files, follow(iteration, resumed, "resume/2", 4), "resume/2/out")
    assert third.metrics[-1]["global_step"] == 5


def test_moments_matter(iteration, make):
    """Without the moments the next update is another one: the test above would see it."""
    first = make(**TWO_STEPS).update(iteration.files, iteration.inputs("moments/0"), "moments/0/out")
    inputs = follow(iteration, first, "moments/1", 2)
    whole = make(**TWO_STEPS).update(iteration.files, inputs, "moments/1/out")
    other = make(**TWO_STEPS)
    other.load(iteration.files, first.parts, first.policy_digest)
    for state in other._optimizer.state.values():
        state["exp_avg"].zero_()
    assert other.update(iteration.files, inputs, "moments/1b/out").policy_digest != whole.policy_digest


def test_random_state_is_restored(iteration, make):
    """pitfall 13"""
    one = make()
    one.load(iteration.files, iteration.policy, iteration.digest)
    torch.manual_seed(123)
    torch.rand(7)
    expected = torch.get_rng_state()
    result = one.update(iteration.files, iteration.inputs("random"), "random/out")
    other = make()
    assert not torch.equal(torch.get_rng_state(), expected)
    other.load(iteration.files, result.parts, result.policy_digest)
    assert torch.equal(torch.get_rng_state(), expected)


def test_a_held_policy_is_not_loaded_again_and_another_state_is(iteration, make):
    one = make(lr=1e-3)
    silent = one.update(iteration.files, iteration.inputs("held/0", advantages=(0.0,) * 4), "held/0/out")
    assert silent.policy_digest == iteration.digest
    tensors = one._parameters
    before = next(iter(tensors.values())).detach().clone()
    with torch.no_grad():
        next(iter(tensors.values())).add_(1.0)
    one.load(iteration.files, silent.parts, silent.policy_digest)
    assert not torch.equal(next(iter(tensors.values())), before)
    one.load(iteration.files, iteration.policy, iteration.digest)
    assert torch.equal(next(iter(tensors.values())), before)
    assert one._global_step == 0
    one.load(iteration.files, silent.parts, silent.policy_digest)
    assert one._global_step == 1


def test_parameter_that_never_had_a_gradient_has_state_and_resumes(iteration, make):
    """Its keys are in every checkpoint, so that it neither lacks state nor starts another (pitfall 42)."""
    one = make(**TWO_STEPS)
    assert all(len(one._optimizer.state[p]) == 3 for p in one._parameters.values())
    inputs = iteration.inputs("idle/0")
    result = one.update(iteration.files, inputs, "idle/0/out")
    tensors = checkpoint_tensors(iteration.files, result.parts)
    names = {name.removeprefix("model.") for name in tensors if name.startswith("model.")}
    idle = {name for name in names if not tensors[f"exp_avg_sq.{name}"].any()}
    assert idle and len(idle) < len(names) / 2
    assert set(tensors) == {f"{kind}.{name}" for kind in ("model", "exp_avg", "exp_avg_sq", "step") for name in names}
    for parameter in one._parameters.values():
        parameter.grad = None
    one._optimizer.step()
    assert set(state_tensors(one._parameters, one._optimizer)) == set(tensors)
    other = make(**TWO_STEPS)
    other.load(iteration.files, result.parts, result.policy_digest)
    assert all(torch.equal(t, tensors[n]) for n, t in checkpoint_state(other).items())


def test_at_says_what_the_rank_does(iteration):
    """For a thread that watches, and as the place of faults: before each forward, after each optimizer step, before
    each file."""

    class Recorder(TrainerRank):
        places: tuple[str, ...] = ()

        def _at(self, verb, doing="", **counts):
            super()._at(verb, doing, **counts)
            self.places += (self.at,)

    config = run_config(**TWO_STEPS)
    one = Recorder(config, str(iteration.model), "sd3", master_port=free_port(), device="cpu")
    assert one.at == "idle"
    one.start()
    try:
        started = len(one.places)
        one.update(iteration.files, iteration.inputs("at", probe=True), "at/out")
        with pytest.raises(StageError):
            one.load(iteration.files, [], "nothing")
    finally:
        one.stop()
    assert one.at == "idle" and one.places[:2] == ("start", "start: loading the transformer")
    assert one.places[started:] == (
        "update",
        "update: loading the policy",
        "update: reading the rollout",
        "update: the probe before the first step",
        *(
            f"update: {place}"
            for step in ("step 1 of 2", "step 2 of 2")
            for place in (
                f"reading the samples, {step}",
                *(f"{step}, forward {n} of 3" for n in (1, 2, 3)),
                f"the optimizer step, {step}",
                f"after the optimizer step, {step}",
            )
        ),
        "update: the probe after the last step",
        "update: gathering the policy",
        *(f"update: writing the policy, file {n} of 5" for n in (1, 2, 3, 4, 5)),
        "update: the policy is written",
        "update: writing the rows",
        "load",
    )


def test_nan_in_one_row_stops_before_the_step_and_names_the_sample(iteration, make):
    """pitfall 6"""
    one = make()
    one.load(iteration.files, iteration.policy, iteration.digest)
    before = held(one)
    inputs = iteration.inputs("nan", log_probs={(2, 1): math.nan})
    with pytest.raises(StageError, match=r"samples \[2\]"):
        one.update(iteration.files, inputs, "nan/out")
    assert all(torch.equal(before[name], tensor) for name, tensor in held(one).items())
    assert one.policy() == "" and iteration.files.list("nan/out") == []
    good = one.update(iteration.files, iteration.inputs("nan-after"), "nan-after/out")
    assert good.metrics[0]["grad_norm"] > 0 and good.policy_digest != iteration.digest


def test_loss_that_overflows_stops_before_the_step_and_names_the_micro_batch(iteration, make):
    one = make(micro_batch_size=3)
    one.load(iteration.files, iteration.policy, iteration.digest)
    before = held(one)
    with pytest.raises(StageError, match=r"no optimizer step was taken: samples \[1\]"):
        one.update(iteration.files, iteration.inputs("inf", log_probs={(1, 2): -1e6}), "inf/out")
    assert all(torch.equal(before[name], tensor) for name, tensor in held(one).items())
    assert all(parameter.grad is None for parameter in one._parameters.values())


def test_latents_that_are_not_finite_name_their_sample_alone(iteration, make):
    inputs = iteration.inputs("latents")
    table = read_table(iteration.files, inputs.latents[1])
    values = table["latents"].to_pylist()
    values[0][-1] = math.inf
    latents = write_table(iteration.files, "latents/broken/1.parquet", with_column(table, "latents", values))
    digests = read_table(iteration.files, latents).column("row_digest").to_pylist()
    rows = with_column(read_table(iteration.files, inputs.rollout[1]), "latents_digest", digests)
    part = write_table(iteration.files, "latents/rollout/broken/1.parquet", rows)
    inputs = dataclasses.replace(inputs, rollout=[inputs.rollout[0], part], latents=[inputs.latents[0], latents])
    with pytest.raises(StageError, match=r"samples \[2\]"):
        make(micro_batch_size=12).update(iteration.files, inputs, "latents/out")


def test_latents_of_other_samples_are_refused_by_name(iteration, make):
    """Images and trajectories that do not belong together: two parts exchanged, and one row altered."""
    inputs = iteration.inputs("strangers")
    swapped = [
        write_table(iteration.files, f"strangers/latents/{i}.parquet", read_table(iteration.files, part))
        for i, part in enumerate(reversed(inputs.latents))
    ]
    with pytest.raises(StageError, match=r"latents/0\.parquet holds other latents .*samples \[2, 3\] beside \[0, 1\]"):
        make().update(iteration.files, dataclasses.replace(inputs, latents=swapped), "strangers/out")
    table = read_table(iteration.files, inputs.latents[1])
    values = table["latents"].to_pylist()
    values[1][0] += 1
    moved = write_table(iteration.files, "strangers/moved/1.parquet", with_column(table, "latents", values))
    with pytest.raises(StageError, match=r"moved/1\.parquet .*the latents of sample 3 have another digest"):
        make().update(
            iteration.files, dataclasses.replace(inputs, latents=[inputs.latents[0], moved]), "strangers/out2"
        )
    with pytest.raises(StageError, match=r"none of latents for strangers/rollout/1\.parquet"):
        make().update(iteration.files, dataclasses.replace(inputs, latents=inputs.latents[:1]), "strangers/out3")


def test_exported_adapter_gives_the_same_output_in_plain_diffusers(iteration, make, tmp_path):
    """Rank and alpha survive the export (pitfall 15)."""
    inputs = iteration.inputs("export", probe=True)
    result = make(lr=1e-2).update(iteration.files, inputs, "export/out")
    data = read_bytes(iteration.files, part_named(result.parts, ADAPTER))
    (tmp_path / "pytorch_lora_weights.safetensors").write_bytes(data)
    probe = load(read_bytes(iteration.files, iteration.probe))
    own = load(read_bytes(iteration.files, part_named(result.parts, "probe.safetensors")))

    def output(pipe):
        def branch(name):
            return pipe.transformer(
                hidden_states=probe["latents"],
                timestep=probe["timestep"],
                encoder_hidden_states=probe[f"cond.{name}.encoder_hidden_states"][None],
                pooled_projections=probe[f"cond.{name}.pooled_projections"][None],
                return_dict=False,
            )[0]

        with torch.no_grad():
            return branch("neg") + probe["guidance_scale"].item() * (branch("pos") - branch("neg"))

    pipe = StableDiffusion3Pipeline.from_pretrained(iteration.model)
    base = output(pipe)
    pipe.load_lora_weights(tmp_path)
    config = next(iter(pipe.transformer.peft_config.values()))
    assert (config.r, config.lora_alpha) == (RANK, ALPHA)
    loaded = output(pipe)
    assert (loaded - own["after"]).norm() / own["after"].norm() < 1e-5
    assert (loaded - own["before"]).norm() / own["after"].norm() > 1e-3
    assert (loaded - base).norm() / base.norm() > 1e-3


def test_init_policy_is_the_seeded_adapter(iteration, make, tmp_path):
    files = Files(str(tmp_path))
    one = make()
    (part,) = one.init_policy(files, "policy")
    assert part.path == f"policy/{ADAPTER}"
    push = to_push(read_bytes(files, part))
    assert one.policy() == policy_digest(push)
    tensors = load(push)
    assert all(t.abs().max() == 0 for n, t in tensors.items() if "lora_B" in n)
    drawn = torch.cat([t.flatten() for n, t in tensors.items() if "lora_A" in n])
    assert drawn.std().item() == pytest.approx(1 / RANK, rel=0.05)
    torch.manual_seed(99)
    (again,) = make().init_policy(files, "again")
    assert again.sha256 == part.sha256
    assert make(seed=7).init_policy(files, "seed")[0].content != part.content
    kaiming = make(lora_init_weights="kaiming").init_policy(files, "kaiming")[0]
    assert kaiming.content != part.content


def test_adapter_that_binds_to_nothing_is_refused(iteration):
    """Such a run would succeed and never learn (pitfall 10)."""
    one = trainer(run_config(lora_target_modules=["attn.to_nothing"]), iteration.model)
    try:
        with pytest.raises(StageError, match="bound to no module"):
            one.start()
    finally:
        one.stop()


def test_train_rollout_mismatch_is_refused_with_its_figure(iteration, make):
    probe = load(read_bytes(iteration.files, iteration.probe))
    probe["model_output"] = probe["model_output"] * 1.001
    part = write_file(iteration.files, "mismatch/probe.safetensors", to_safetensors(probe))
    inputs = dataclasses.replace(iteration.inputs("mismatch"), probe=part)
    with pytest.raises(StageError, match=r"mismatch.*0\.000999"):
        make().update(iteration.files, inputs, "mismatch/out")


def test_rows_have_the_schema_and_the_schedule(iteration, make):
    one = make(**TWO_STEPS)
    calls = []
    result = one.update(iteration.files, iteration.inputs("rows"), "rows/out", calls.append)
    table = read_table(iteration.files, result.rows)
    assert table.schema.equals(UPDATE)
    rows = table.drop_columns(["row_digest"]).to_pylist()
    assert rows == result.metrics
    assert [(row["step"], row["samples"], row["pairs"]) for row in rows] == [(0, 2, 6), (1, 2, 6)]
    assert rows[1]["ratio_max_abs_dev"] > 1e-5 > rows[0]["ratio_max_abs_dev"]
    assert [(call["step"], call["micro_batch"]) for call in calls] == [(s, m) for s in range(2) for m in range(3)]
    assert pickle.loads(pickle.dumps(result)) == result


def test_gradient_is_clipped_to_the_limit(iteration, make):
    inputs = iteration.inputs("clip")
    one = make(clip_grad=1e-4)
    result = one.update(iteration.files, inputs, "clip/out")
    moments = [t for n, t in checkpoint_tensors(iteration.files, result.parts).items() if n.startswith("exp_avg.")]
    norm = math.sqrt(sum(t.double().norm().item() ** 2 for t in moments)) / 0.1
    assert result.metrics[0]["grad_norm"] > 1e-3
    assert norm == pytest.approx(1e-4, rel=1e-3)


def test_an_update_never_overwrites(iteration, make):
    inputs = iteration.inputs("again")
    first = make().update(iteration.files, inputs, "again/out")
    with pytest.raises(StageError, match="never overwritten"):
        make().update(iteration.files, inputs, "again/out")
    assert all(read_bytes(iteration.files, part) for part in first.parts)


def test_trainer_state_holds_nothing_volatile(iteration, make):
    result = make().update(iteration.files, iteration.inputs("state"), "state/out")
    state = json.loads(read_bytes(iteration.files, part_named(result.parts, "trainer_state.json")))
    assert state == {
        "schema_version": 1,
        "global_step": 1,
        "policy_digest": result.policy_digest,
        "lora_rank": RANK,
        "lora_alpha": ALPHA,
        "shards": [SHARD],
    }
    assert rows_of(iteration.files, [result.rows])[0]["global_step"] == 0
    base = SD3Transformer2DModel.from_pretrained(iteration.model / "transformer")
    assert not any(n in name for name in checkpoint_tensors(iteration.files, result.parts) for n in base.state_dict())

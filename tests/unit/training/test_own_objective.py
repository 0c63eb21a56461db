"""A user's own functions in the update: pairs, preparation, loss, SDE dynamics (spec: Customization, Training)."""

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load
from trained_rollouts import part_named, rows_of

from miles_core.errors import InputError, StageError
from miles_core.store.parts import read_bytes, read_table, write_table
from miles_core.store.schemas import UPDATE, train_data_schema
from miles_core.training.objective import checked_pairs
from miles_core.user_code import load_hook

MODULE = '''
import torch

from miles.backends.fsdp_utils.loss_hub.flow_grpo import flow_grpo_loss_formula, prepare_flow_grpo_batch
from miles.backends.fsdp_utils.loss_hub.types import PreparedBatch
from miles.ray.data_conversion_hub.flow_grpo import expand_samples_to_train_pairs as stock_pairs
from miles.utils.misc import load_function
from miles_core.algorithms.sde import DiffusersSdeStepBackend


def same_prepare(ctx, batch, *, pad_to_len=None):
    return load_function("miles_core.algorithms.flow_grpo.prepare_flow_grpo_batch")(ctx, batch, pad_to_len=pad_to_len)


def same_formula(ctx, batch, prepared, *, new_pred, ref_pred, metrics, **kwargs):
    return flow_grpo_loss_formula(ctx, batch, prepared, new_pred=new_pred, ref_pred=ref_pred, metrics=metrics)


def same_pairs(args, samples, rewards, raw_rewards):
    return stock_pairs(args, samples, rewards, raw_rewards)


class SameBackend(DiffusersSdeStepBackend):
    pass


def to_target(ctx, batch, prepared, *, new_pred, ref_pred, metrics, **kwargs):
    """Weighted regression to the straight path from the stored next latents."""
    distance = ((new_pred - batch["next_latents"]) ** 2).flatten(1).mean(1)
    metrics["distance"] = distance.sum()
    metrics["share"] = len(distance) / 2
    return (batch["weight"] * batch["loss_mask"] * distance).sum()


def quiet_prepare(ctx, batch, *, pad_to_len=None):
    quiet = {name: torch.zeros_like(value) for name, value in batch["conditioning"].items()}
    return PreparedBatch(batch["latents"], batch["timesteps"], quiet)


def first_steps(args, samples, rewards, raw_rewards):
    pairs = {"sample": [], "step": [], "advantage": [], "weight": []}
    for position, (sample, reward, raw) in enumerate(zip(samples, rewards, raw_rewards)):
        pairs["sample"].append(position)
        pairs["step"].append(sample.sde_step_indices[0])
        pairs["advantage"].append(reward)
        pairs["weight"].append(1.0 + position)
    return pairs


class Louder(DiffusersSdeStepBackend):
    def __init__(self, *, noise_level, log_prob_no_const):
        super().__init__(noise_level=2 * noise_level, log_prob_no_const=log_prob_no_const)


class NoBackend:
    def __init__(self, *, noise_level, log_prob_no_const):
        pass


def no_tensor(ctx, batch, prepared, *, new_pred, ref_pred, metrics, **kwargs):
    return 1.0


def no_gradient(ctx, batch, prepared, *, new_pred, ref_pred, metrics, **kwargs):
    return new_pred.detach().sum()


def no_number(ctx, batch, prepared, *, new_pred, ref_pred, metrics, **kwargs):
    metrics["image"] = new_pred
    return new_pred.sum()


def taken(ctx, batch, prepared, *, new_pred, ref_pred, metrics, **kwargs):
    metrics["lr"] = 1.0
    return new_pred.sum()


def not_finite(ctx, batch, prepared, *, new_pred, ref_pred, metrics, **kwargs):
    return new_pred.sum() * float("nan")


def raises(*arguments, **options):
    raise KeyError("mask")


def wrong_signature(ctx, batch):
    return None


def no_batch(ctx, batch, *, pad_to_len=None):
    return batch


def no_pairs(args, samples, rewards, raw_rewards):
    return {"sample": [0], "step": [0]}
'''
STOCK = {
    "custom_loss_function_path": "mine.same_formula",
    "custom_prepare_train_batch_path": "mine.same_prepare",
    "custom_expand_samples_to_train_pairs_path": "mine.same_pairs",
    "sde_step_backend_path": "mine.SameBackend",
}


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    folder = tmp_path_factory.mktemp("code")
    (folder / "mine.py").write_text(MODULE)
    return str(folder)


@pytest.fixture
def update(iteration, make, code):
    def run(name, train_data=None, **options):
        inputs = iteration.inputs(name)
        if train_data is not None:
            inputs.train_data.append(write_table(iteration.files, f"{name}/pairs.parquet", train_data))
        return make(code_path=code, **options).update(iteration.files, inputs, f"{name}/out")

    return run


def adapter(iteration, result):
    return load(read_bytes(iteration.files, part_named(result.parts, "pytorch_lora_weights.safetensors")))


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_the_stock_functions_by_the_references_names_give_the_stock_bits(iteration, update):
    plain, own = update("own-plain"), update("own-stock", **STOCK)
    assert same(adapter(iteration, plain), adapter(iteration, own))
    (row,), (other,) = plain.metrics, own.metrics
    assert {n: v for n, v in row.items() if n != "seconds"} == {n: other[n] for n in row if n != "seconds"}
    assert read_table(iteration.files, plain.rows).schema.equals(UPDATE)


def test_an_own_loss_is_trained_on_its_own_pairs_and_its_metrics_are_columns(iteration, update):
    own = {
        "custom_loss_function_path": "mine.to_target",
        "custom_expand_samples_to_train_pairs_path": "mine.first_steps",
    }
    result = update("own-loss", **own)
    (row,) = rows_of(iteration.files, [result.rows])
    assert row["pairs"] == 4 and row["metric_share"] == 0.5
    assert row["metric_distance"] > 0 and row["loss"] > row["metric_distance"]
    assert row["policy_loss"] is None and row["ratio_max_abs_dev"] is None
    assert not same(adapter(iteration, result), adapter(iteration, update("own-loss-plain")))
    other = update("own-loss-quiet", **own, custom_prepare_train_batch_path="mine.quiet_prepare")
    assert rows_of(iteration.files, [other.rows])[0]["metric_distance"] != row["metric_distance"]


def test_without_a_code_path_the_folder_of_the_command_is_meant(iteration, make, code, monkeypatch):
    """As the doctor's trial makes its trainer."""
    monkeypatch.chdir(code)
    result = make(custom_loss_function_path="mine.same_formula").update(
        iteration.files, iteration.inputs("own-folder"), "own-folder/out"
    )
    assert result.metrics[0]["pairs"] == 12


def test_own_dynamics_move_the_log_probs(iteration, update):
    (row,) = update("own-sde", sde_step_backend_path="mine.Louder").metrics
    assert row["log_prob_mean_abs_diff"] > 0.1


def test_pairs_that_the_advantages_hold_are_trained_and_no_others(iteration, update):
    columns = {
        "sample_index": [0, 3, 3],
        "step": [1, 0, 2],
        "advantage": [1.0, -1.0, 2.0],
        "loss_mask": [1.0, 1.0, 0.0],
    }
    table = pa.Table.from_pydict(columns | {"row_digest": [""] * 3}, schema=train_data_schema([]))
    (row,) = update("own-converted", table).metrics
    assert row["pairs"] == 2 and row["adv_mean"] == 0.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"custom_loss_function_path": "mine.no_tensor"}, "returned no loss to train on"),
        ({"custom_loss_function_path": "mine.no_gradient"}, "returned no loss to train on"),
        ({"custom_loss_function_path": "mine.no_number"}, "the metric 'image', which cannot be taken"),
        ({"custom_loss_function_path": "mine.taken"}, "the metric 'lr', which cannot be taken \\(the name is taken"),
        ({"custom_loss_function_path": "mine.not_finite"}, "is not finite; no optimizer step was taken"),
        ({"custom_loss_function_path": "mine.raises"}, "mine.raises failed: KeyError: 'mask'; mend it"),
        ({"custom_prepare_train_batch_path": "mine.no_batch"}, "returned a dict without latents"),
        ({"custom_prepare_train_batch_path": "mine.raises"}, "mine.raises failed"),
        ({"custom_expand_samples_to_train_pairs_path": "mine.no_pairs"}, "the column advantage is missing"),
        ({"sde_step_backend_path": "mine.NoBackend"}, "has no statistics: derive it from SdeStepBackend"),
    ],
)
def test_a_function_that_fails_is_named_and_no_step_is_taken(update, options, words, request):
    with pytest.raises(StageError, match=words):
        update(request.node.name.encode().hex(), **options)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (
            "custom_loss_function_path",
            r"def flow_grpo_loss_formula\(ctx, batch, prepared, \*, new_pred, ref_pred, metrics\)",
        ),
        (
            "custom_expand_samples_to_train_pairs_path",
            r"def expand_samples_to_train_pairs\(args, samples, rewards, raw_re",
        ),
        ("sde_step_backend_path", r"class SdeStepBackend\(\*, noise_level, log_prob_no_const\)"),
    ],
)
def test_a_signature_that_does_not_fit_is_told_with_the_right_one(code, option, words):
    with pytest.raises(InputError, match=f"write it as {words}"):
        load_hook(option, "mine.wrong_signature", code)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ([], "returned a list"),
        ({"sample": 3}, "a column that is no list"),
        ({"step": [0], "advantage": [1.0]}, "name each pair's sample"),
        ({"sample": [2], "step": [0], "advantage": [1.0]}, "a pair of sample 2, which it was not given"),
        ({"sample_index": [9], "step": [0], "advantage": [1.0]}, "a pair of sample 9, which it was not given"),
        ({"sample": [0], "step": [0, 1], "advantage": [1.0]}, "different lengths"),
        ({"sample": [0], "step": [0], "advantage": [1.0], "latents": [1.0]}, "a column latents, which the batch has"),
        ({"sample": [0], "step": ["last"], "advantage": [1.0]}, "'last' in step of sample 0"),
    ],
)
def test_what_are_no_pairs_is_refused(made, words):
    from miles_core.data.sample import Sample

    samples = [Sample(group_index=0, index=i, prompt="", seed=0) for i in range(2)]
    with pytest.raises(StageError, match=words):
        checked_pairs(made, samples, "--x")

"""The configuration: what it refuses, what it derives, what each field affects."""

import re
from pathlib import Path
from typing import Any

import pytest

from deployments.recipes import RECIPES, recipe
from miles_core.config import FIELDS, RunConfig, affects, build
from miles_core.config.overrides import as_flags, from_environment, from_flags, from_mapping
from miles_core.config.reference import NOT_YET
from miles_core.errors import InputError

MINIMAL: dict[str, Any] = {"lora": {"use_lora": True}}


def config(**changes: Any) -> RunConfig:
    return build(MINIMAL).replace(**changes)


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_every_field_is_documented_and_declares_what_it_affects(name: str) -> None:
    info = FIELDS[name][1]
    assert info.description
    assert isinstance(affects(name), tuple)


def test_a_field_that_declares_nothing_is_refused() -> None:
    from pydantic.fields import FieldInfo

    bare = {name for name, (_, info) in FIELDS.items() if "affects" not in (info.json_schema_extra or {})}
    assert bare == set()
    assert "affects" not in (FieldInfo().json_schema_extra or {})


def test_field_names_are_unique_over_the_groups() -> None:
    groups = [set(group.model_fields) for group in (type(getattr(config(), g)) for g in RunConfig.model_fields)]
    assert sum(len(g) for g in groups) == len(set().union(*groups))


def test_operational_fields_affect_no_stage_and_the_others_some() -> None:
    for name in (
        "num_rollout",
        "ocr_num_workers",
        "rollout_num_engines",
        "distributed_timeout_minutes",
        "dp_replicate_size",
        "deterministic_mode",
        "run_id",
        "device",
        "keep_full_checkpoints",
        "keep_latents_iterations",
    ):
        assert affects(name) == ()
    assert affects("lr") == affects("train_dp_split_mode") == ("update",)
    assert affects("rm_type") == ("rewards", "evaluation")
    assert "rollout" in affects("diffusion_guidance_scale")
    # The reward type must not change what is generated.
    assert "rm_type" not in config().affecting("prompts")


def test_every_flag_of_the_reference_is_a_field_or_refused_by_name() -> None:
    assert not NOT_YET & set(FIELDS)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"lr": "x"}, "--lr 'x'"),
    ({"lr": -1}, "--lr -1"),
    ({"lr": "inf"}, "--lr 'inf'"),
    ({"lr": "nan"}, "--lr 'nan'"),
    ({"diffusion_guidance_scale": "inf"}, "--diffusion-guidance-scale 'inf'"),
    ({"rollout_seed": 2**31}, "--rollout-seed"),
    ({"diffusion_height": 1 << 20}, "--diffusion-height"),
    ({"diffusion_num_sde_steps": 1, "diffusion_sde_window_range": "3"}, "two numbers are needed, written first,end"),
    ({"num_rollout": 0}, "--num-rollout 0"),
    (
        {"keep_full_checkpoints": 1},
        "--keep-full-checkpoints 1 leaves nothing to make the newest update again from: give at least 2, or 0",
    ),
    ({"keep_full_checkpoints": -1}, "--keep-full-checkpoints -1"),
    ({"keep_latents_iterations": -1}, "--keep-latents-iterations -1"),
    (
        {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "global_batch_size": 3},
        "not a multiple of --global-batch-size 3",
    ),
    (
        {"rollout_batch_size": 4, "global_batch_size": 2, "num_steps_per_rollout": 3},
        r"global_batch_size 2 x num_steps_per_rollout 3 = 6",
    ),
    ({"rollout_batch_size": 4, "num_steps_per_rollout": 3}, "not a multiple of --num-steps-per-rollout 3"),
    ({"n_samples_per_prompt": 4, "rollout_microgroup_size": 3}, "--rollout-microgroup-size 3"),
    ({"micro_batch_size_sample": 2}, "give both or neither"),
    ({"diffusion_sde_type": "ode"}, "without one SDE step"),
    ({"diffusion_noise_level": 0}, "--diffusion-noise-level 0"),
    ({"diffusion_step_strategy_path": "sde_window"}, "picks --diffusion-num-sde-steps steps and that is 0"),
    ({"diffusion_step_strategy_path": "window", "diffusion_num_sde_steps": 1}, "choose sde_window or"),
    ({"loss_type": "custom_loss"}, "--loss-type custom_loss needs --custom-loss-function-path, --custom-prepare"),
    (
        {"loss_type": "custom_loss", "custom_loss_function_path": "a.b"},
        "custom_loss needs --custom-prepare-train-batch-path",
    ),
    (
        {"custom_convert_samples_to_train_data_path": "a.b", "custom_expand_samples_to_train_pairs_path": "a.b"},
        "stands in the place of --custom-expand-samples-to-train-pairs-path",
    ),
    (
        {"custom_convert_samples_to_train_data_path": "a.b", "custom_reward_post_process_path": "a.b"},
        "stands in the place of --custom-reward-post-process-path",
    ),
    ({"loss_type": "sft_loss"}, "--loss-type 'sft_loss'"),
    ({"sglang_options": {"tp_size": 2}}, "--sglang-tp-size needs --rollout-engine sglang"),
    ({"rollout_engine": "sglang", "sglang_options": {"port": 1}}, "--sglang-port is given by the run itself"),
    ({"rollout_engine": "sglang", "sglang_options": {"batching_max_size": 2}}, "--sglang-batching-max-size above 1"),
    ({"rollout_engine": "sglang", "sglang_options": {"A b": 1}}, "no option's name"),
    ({"diffusion_num_sde_steps": 11}, "more than --diffusion-num-steps 10"),
    ({"diffusion_num_sde_steps": 2, "diffusion_sde_window_range": "3,12"}, "inside the schedule 0,10"),
    ({"diffusion_num_sde_steps": 4, "diffusion_sde_window_range": "3,6"}, "does not fit the window range 3,6"),
    ({"diffusion_sde_window_range": "0,4"}, "needs --diffusion-num-sde-steps"),
    ({"diffusion_num_sde_steps": 1, "diffusion_sde_candidate_steps": "1,2"}, "belongs to epoch_global_random_choice"),
    ({"diffusion_sde_type": "cps"}, "cps over the last step"),
    (
        {"diffusion_sde_type": "cps", "diffusion_log_prob_no_const": True, "diffusion_kl_beta": 0.1},
        "cps over the last step has no KL",
    ),
    ({"lr_decay_style": "cosine"}, "needs --lr-decay-iters"),
    ({"lr_decay_style": "WSD", "lr_decay_iters": 10}, "needs --lr-wsd-decay-iters"),
    ({"lr_warmup_fraction": 0.1}, "--lr-warmup-fraction"),
    ({"min_lr": 1.0}, "--min-lr"),
    (
        {"actor_num_nodes": 2, "actor_num_gpus_per_node": 3, "dp_replicate_size": 4},
        "--dp-replicate-size 4 does not divide actor_num_nodes 2 x actor_num_gpus_per_node 3 = 6 trainer ranks",
    ),
    ({"train_dp_split_mode": "random"}, "--train-dp-split-mode 'random'"),
    ({"distributed_timeout_minutes": 0}, "--distributed-timeout-minutes 0"),
    ({"use_lora": False}, "give --use-lora"),
    ({"ref_mode": "none", "diffusion_kl_beta": 0.1}, "needs a reference"),
    ({"device": "cpu"}, "--diffusion-generator-device cuda needs a GPU"),
    ({"diffusion_height": 500}, "not a multiple of 16"),
    ({"loss_type": "nft"}, "--loss-type 'nft'"),
    ({"diffusion_forward_dtype": "fp8"}, "--diffusion-forward-dtype 'fp8'"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_cannot_be_is_refused_in_one_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words) if "(" not in words else words) as caught:
        config(**changes)
    assert "\n" not in str(caught.value)


def test_cps_is_accepted_where_its_window_ends_before_the_last_step() -> None:
    made = config(diffusion_sde_type="cps", diffusion_num_sde_steps=2, diffusion_sde_window_range="0,9")
    assert made.rollout.diffusion_sde_window_range == (0, 9)


def test_batch_sizes_are_derived_and_enter_the_fingerprint_resolved() -> None:
    by_size = config(rollout_batch_size=4, n_samples_per_prompt=4, global_batch_size=8)
    by_steps = config(rollout_batch_size=4, n_samples_per_prompt=4, num_steps_per_rollout=2)
    assert (by_size.steps_per_rollout, by_steps.global_batch_size) == (2, 8)
    assert by_size.affecting("update") == by_steps.affecting("update")


def test_guidance_and_reference_defaults() -> None:
    assert config().negative_prompt == ""
    assert config(diffusion_guidance_scale=1).negative_prompt is None
    assert config(diffusion_kl_beta=0.1).ref_mode == "lora_base"
    assert config().ref_mode == "none"


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_recipes_are_whole_and_survive_a_change(name: str) -> None:
    assert recipe(name).replace(num_rollout=7).run.num_rollout == 7


class TestFlags:
    def test_values_switches_and_equals(self) -> None:
        tokens = ["--lr", "1e-3", "--use-lora", "--no-gradient-checkpointing", "--num-rollout=5", "--new=false"]
        expected = {"lr": "1e-3", "use_lora": True, "gradient_checkpointing": False, "num_rollout": "5", "new": False}
        assert from_flags(tokens) == expected

    def test_evaluation_sets_are_pairs_a_line_each(self) -> None:
        tokens = ["--eval-prompt-data", "a", "x.txt", "b", "my y.txt", "--lr", "1"]
        given = from_flags(tokens)
        assert given == {"eval_prompt_data": "a x.txt\nb my y.txt", "lr": "1"}
        assert from_flags(as_flags(given)) == given
        assert (
            config(eval_prompt_data=["a", "x.txt", "b", "my y.txt"]).evaluation.eval_prompt_data
            == "a x.txt\nb my y.txt"
        )
        assert from_flags(["--eval-prompt-data", "x.txt"]) == {"eval_prompt_data": "x.txt"}
        with pytest.raises(InputError, match="--eval-prompt-data a x.txt b: a name lacks its file"):
            from_flags(["--eval-prompt-data", "a", "x.txt", "b"])

    def test_underscores_are_dashes_and_the_last_wins(self) -> None:
        assert from_flags(["--num_rollout", "1", "--num-rollout", "2"]) == {"num_rollout": "2"}

    def test_extra_args_are_flags_in_a_string(self) -> None:
        assert from_flags(["--extra-args", " --lr 0.1\n --rm-type ocr "]) == {"lr": "0.1", "rm_type": "ocr"}

    def test_options_of_the_sglang_server_are_collected(self) -> None:
        """Also from --extra-args and the environment; a switch of its stands alone; the words give them back."""
        tokens = ["--sglang-tp-size", "2", "--sglang-enable-torch-compile", "--extra-args", "--sglang-tp-size=4"]
        given = from_flags([*tokens, "--lr", "1"])
        assert given == {"sglang_options": {"tp_size": "4", "enable_torch_compile": "true"}, "lr": "1"}
        assert from_flags(as_flags(given)) == given
        assert from_environment({"MILES_SCRIPT_SGLANG_TP_SIZE": "2"}) == {"sglang_options": {"tp_size": "2"}}
        made = config(rollout_engine="sglang", sglang_options="tp-size=2 x=y")
        assert made.rollout.sglang_options == {"tp_size": "2", "x": "y"}

    def test_negative_numbers_are_values(self) -> None:
        assert from_flags(["--lr", "-1"]) == {"lr": "-1"}

    @pytest.mark.parametrize(
        ("tokens", "words"),
        [
            (["--foo", "1"], "no option --foo"),
            (["--num-rolout", "1"], "did you mean --num-rollout?"),
            (["--use-ema"], "--use-ema is not there yet"),
            (["--sglang-server-concurrency", "2"], "--sglang-server-concurrency is not there yet"),
            (["--lr"], "--lr needs a value"),
            (["--lr", "--use-lora"], "--lr needs a value"),
            (["lr", "1"], "'lr' is no flag"),
            (["--use-lora=maybe"], "neither true nor false"),
            (["--extra-args", "--lr '1"], "check the quotes"),
        ],
    )
    def test_refusals(self, tokens: list[str], words: str) -> None:
        with pytest.raises(InputError, match=re.escape(words)):
            from_flags(tokens)

    @pytest.mark.parametrize("name", sorted(NOT_YET))
    def test_an_option_that_is_not_there_yet_is_refused_by_name(self, name: str) -> None:
        with pytest.raises(InputError, match=name.replace("_", "-")):
            from_flags(["--" + name.replace("_", "-"), "1"])


class TestEnvironment:
    def test_fields_and_switches(self) -> None:
        environment = {"MILES_SCRIPT_NUM_ROLLOUT": "2", "MILES_SCRIPT_USE_LORA": "1", "HOME": "/"}
        assert from_environment(environment) == {"num_rollout": "2", "use_lora": True}

    def test_an_unknown_one_is_refused_by_name(self) -> None:
        with pytest.raises(InputError, match="MILES_SCRIPT_NUM_ROLOUT"):
            from_environment({"MILES_SCRIPT_NUM_ROLOUT": "2"})

    def test_command_line_wins_over_environment_and_that_over_the_recipe(self) -> None:
        changes = from_environment({"MILES_SCRIPT_LR": "0.5", "MILES_SCRIPT_NUM_ROLLOUT": "9"}) | from_flags(
            ["--lr", "0.25"]
        )
        made = recipe("tiny").replace(**changes)
        assert (made.optimizer.lr, made.run.num_rollout) == (0.25, 9)


def test_flow_parameters_are_checked_like_flags() -> None:
    assert from_mapping({"num-rollout": 2}) == {"num_rollout": 2}
    with pytest.raises(InputError, match="no option --nope"):
        from_mapping({"nope": 1})


def test_reference_flags_of_the_specification_are_all_known(pytestconfig: pytest.Config) -> None:
    """Every `--flag` named in the reference's pages is a field or a named refusal; the list is in the tests."""
    names = (Path(__file__).parent / "reference_flags.txt").read_text().split()
    assert len(names) > 60
    assert [n for n in names if n not in FIELDS and n not in NOT_YET and n != "extra_args"] == []

"""Every option of a run with how its effect is shown. A new option without an entry fails `test_every_flag`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import consumers as see
import evaluation_consumers as evaluated
import guard_consumers as guarded
import logging_consumers as logged
from consumers import Place

from miles_core.config import RunConfig


@dataclass(frozen=True)
class Effect:
    """`to`, the option's other value, changes `shown`, what its consumer makes of the configuration, from `before` to
    `after`. base: what else both configurations say. derives: options whose own value follows from this one. tests:
    those that show what it does in the whole. `{}` in a value is the place of the test's files."""

    to: Any
    shown: Callable[[RunConfig, Place], Any] | None = None
    before: Any = None
    after: Any = None
    base: dict[str, Any] = field(default_factory=dict)
    derives: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()


@dataclass(frozen=True)
class OneChoice:
    """An option with a single value so far: any other is refused, never ignored."""

    value: Any
    refused: Any


ENGINE = "tests/unit/rollout/test_diffusers_engine.py::"
FLAGS_OF_TRAINING = "tests/unit/training/test_flags_of_training.py::"
TRAINER = "tests/unit/training/test_trainer.py::"
RANKS = "tests/integration/test_trainer_ranks.py::"
PROCESSES = "tests/integration/test_flags_of_processes.py::"
OCR = "tests/integration/test_ocr_reward.py::"
SEVERAL = "tests/unit/rewards/test_several.py::"
REMOTE = "tests/unit/rewards/test_remote.py::test_"
SGLANG = "tests/integration/test_sglang_engine.py::"
ALIGNMENT = "tests/unit/training/test_alignment.py::"
LOST = f"{SGLANG}test_a_server_lost_in_the_middle_costs_no_row"
VERSIONS = "tests/unit/pipeline/test_versions.py::"
LOOP = "tests/integration/test_train.py::"


EXAMPLE = "tests/integration/test_hooks.py::test_the_worked_example"
TRAINED_ON_OWN = "tests/integration/test_hooks.py::test_a_training_on_functions_of_ones_own"
OWN_ROLLOUT = "tests/unit/rollout/test_rollout_function.py::test_"
OWN_OBJECTIVE = "tests/unit/training/test_own_objective.py::test_"
ON_ITS_OWN = "_is_trained_on_its_own_pairs_and_its_metrics_are_columns"


def own(function: str, option: str, test: str = EXAMPLE) -> Effect:
    """A user's own function, in own.py of the place."""
    return Effect(f"own.{function}", see.own_functions, "", option, base={"code_path": "{}"}, tests=(test,))


OWN_LOSS = {
    "code_path": "{}",
    "custom_loss_function_path": "own.formula",
    "custom_prepare_train_batch_path": "own.prepare",
    "custom_expand_samples_to_train_pairs_path": "own.pairs",
}


WAVES = "tests/integration/test_dynamic_sampling.py::test_"
LAST_OF_THE_BUFFER = "tests/unit/pipeline/test_waves.py::test_an_own_buffer_filter_says_what_is_served_first"
NO_WINDOW = {"diffusion_sde_window_range": None}
CHOICE = NO_WINDOW | {"diffusion_step_strategy_path": "epoch_global_random_choice"}
LINEAR = {"lr": 1.0, "lr_decay_style": "linear", "lr_decay_iters": 10}
WSD = {"lr": 1.0, "lr_decay_style": "WSD", "lr_decay_iters": 10}
SERVED = {"rollout_engine": "sglang"}
LOOKED_AFTER = SERVED | {"use_fault_tolerance": True}
OWN_STD = {"globalize_reward_std": False}
EVALUATED = {"eval_prompt_data": "{}/e.jsonl"}
PICK_RUN = EVALUATED | {
    "rm_type": "pickscore",
    "pickscore_model_path": "{}/clip",
    "pickscore_processor_path": "{}/clip",
}
OCR_RUN = {"rm_type": "ocr", "ocr_det_model_dir": "{}/det", "ocr_rec_model_dir": "{}/rec"} | EVALUATED

RUN: dict[str, Effect | OneChoice] = {
    "run_id": Effect("mine", see.run_name, "tiny", "mine"),
    "new": Effect(True, see.name_of_a_second_run, "tiny", "tiny-2"),
    "artifact_root": Effect("{}/else", see.root_of_the_artifacts, "/runs", "/else"),
    "code_path": Effect("/mine", see.recorded_code_path, "here", "/mine"),
    "refuse_other_versions": Effect(
        True, tests=(f"{VERSIONS}test_other_versions_are_refused_where_that_is_asked_for",)
    ),
    "num_rollout": Effect(9, tests=(f"{LOOP}test_a_larger_number_of_iterations_carries_on",)),
    "keep_full_checkpoints": Effect(
        3,
        see.iterations_kept,
        {"rollout": 5, "update": 2},
        {"rollout": 5, "update": 3},
        tests=(
            "tests/unit/pipeline/test_retention.py::test_older_iterations_lose_what_the_rule_gives_up_and_nothing_else",
        ),
    ),
    "keep_latents_iterations": Effect(7, see.iterations_kept, {"rollout": 5, "update": 2}, {"rollout": 7, "update": 2}),
}

CLUSTER: dict[str, Effect | OneChoice] = {
    "actor_num_nodes": Effect(2, tests=(f"{PROCESSES}test_as_many_processes_as_the_options_say",)),
    "actor_num_gpus_per_node": Effect(2, tests=(f"{PROCESSES}test_as_many_processes_as_the_options_say",)),
    "rollout_num_engines": Effect(2, tests=(f"{PROCESSES}test_as_many_processes_as_the_options_say",)),
    "rollout_engine": Effect("sglang", tests=(LOST,)),
    "use_fault_tolerance": Effect(True, see.looks, None, (30.0, 30.0, 0.0), base=SERVED, tests=(LOST,)),
    "rollout_health_check_interval": Effect(1.0, see.looks, (30.0, 30.0, 0.0), (1.0, 30.0, 0.0), base=LOOKED_AFTER),
    "rollout_health_check_timeout": Effect(10.0, see.looks, (30.0, 30.0, 0.0), (30.0, 10.0, 0.0), base=LOOKED_AFTER),
    "rollout_health_check_first_wait": Effect(1.0, see.looks, (30.0, 30.0, 0.0), (30.0, 30.0, 1.0), base=LOOKED_AFTER),
    "device": Effect("cuda", see.device, "cpu", "cuda"),
    "distributed_timeout_minutes": Effect(
        2.0,
        see.seconds_of_a_call,
        600.0,
        120.0,
        tests=("tests/integration/test_trainer_faults.py::test_rank_that_hangs_or_dies_is_named_with_the_place",),
    ),
    "keep_actors": Effect(True, tests=(f"{PROCESSES}test_actors_are_kept_for_the_next_command_where_that_is_asked",)),
    "actor_idle_minutes": Effect(
        1.0, tests=("tests/integration/test_epochs.py::test_nobodys_actors_and_head_end_themselves",)
    ),
}

TRAINING: dict[str, Effect | OneChoice] = {
    "train_backend": OneChoice("fsdp", "megatron"),
    "fsdp_master_dtype": OneChoice("fp32", "bf16"),
    "fsdp_reduce_dtype": Effect("bf16", tests=(f"{FLAGS_OF_TRAINING}test_gradients_are_reduced_in_the_dtype_given",)),
    "diffusion_forward_dtype": Effect(
        "bf16",
        tests=(
            f"{FLAGS_OF_TRAINING}test_the_forward_is_in_the_dtype_given",
            f"{ENGINE}TestLora::test_bf16_computes_in_bf16_and_reports_the_masters_digest",
        ),
    ),
    "gradient_checkpointing": Effect(
        True, tests=(f"{FLAGS_OF_TRAINING}test_activations_are_recomputed_where_that_is_asked",)
    ),
    "dp_replicate_size": Effect(
        2,
        base={"actor_num_gpus_per_node": 2},
        tests=(f"{RANKS}test_hybrid_sharding_makes_the_same_steps_and_saves_each_tensor_once",),
    ),
    "deterministic_mode": Effect(
        True,
        tests=(
            "tests/unit/training/test_determinism.py::test_trainer_stops_at_an_operation_without_a_deterministic_kernel",
            f"{PROCESSES}test_engines_and_trainer_are_deterministic_where_that_is_asked",
        ),
    ),
}

OPTIMIZER: dict[str, Effect | OneChoice] = {
    "optimizer": OneChoice("adam", "sgd"),
    "lr": Effect(0.5, see.rate(0), 0.01, 0.5),
    "adam_beta1": Effect(0.5, see.adamw("betas", 0), 0.9, 0.5),
    "adam_beta2": Effect(0.5, see.adamw("betas", 1), 0.999, 0.5),
    "adam_eps": Effect(1e-4, see.adamw("eps"), 1e-8, 1e-4),
    "weight_decay": Effect(0.1, see.adamw("weight_decay"), 0.0, 0.1),
    "clip_grad": Effect(
        0, see.norm_after_clipping, 1.0, 5.0, tests=(f"{TRAINER}test_gradient_is_clipped_to_the_limit",)
    ),
    "lr_decay_style": Effect("linear", see.rate(5), 1.0, 0.5, base={"lr": 1.0, "lr_decay_iters": 10}),
    "min_lr": Effect(0.5, see.rate(10), 0.0, 0.5, base=LINEAR),
    "lr_warmup_init": Effect(0.4, see.rate(0), 0.25, 0.55, base={"lr": 1.0, "lr_warmup_iters": 4}),
    "lr_warmup_iters": Effect(4, see.rate(0), 1.0, 0.25, base={"lr": 1.0}),
    "lr_warmup_fraction": Effect(0.4, see.rate(0), 1.0, 0.25, base=LINEAR),
    "lr_decay_iters": Effect(20, see.rate(5), 0.5, 0.75, base=LINEAR),
    "lr_wsd_decay_iters": Effect(10, see.rate(5), 1.0, 2 * 0.5**0.5 - 1, base=WSD | {"lr_wsd_decay_iters": 4}),
    "lr_wsd_decay_style": Effect("linear", see.rate(5), 2 * 0.5**0.5 - 1, 0.5, base=WSD | {"lr_wsd_decay_iters": 10}),
    "seed": Effect(7, tests=(f"{TRAINER}test_init_policy_is_the_seeded_adapter",)),
}

ROLLOUT: dict[str, Effect | OneChoice] = {
    "sglang_options": Effect(
        {"attention_backend": "torch_sdpa"},
        see.attention_of_the_server,
        "",
        "torch_sdpa",
        base=SERVED,
    ),
    "hf_checkpoint": Effect("{}/other-model", lambda c, place: place.inputs(c).checkpoint.name, "model", "other-model"),
    "diffusion_model_family": Effect("sd3", see.family, "refused", "sd3", base={"hf_checkpoint": "{}/foreign-model"}),
    "diffusion_step_strategy_path": Effect(
        "epoch_global_random_choice", see.always_neighbours, True, False, base=NO_WINDOW
    ),
    "diffusion_num_steps": Effect(8, see.requested("num_inference_steps"), 6, 8, derives=("diffusion_eval_num_steps",)),
    "diffusion_num_sde_steps": Effect(3, see.steps_an_iteration, 2, 3),
    "diffusion_sde_window_range": Effect((2, 6), see.all_steps, [0, 1, 2, 3], [2, 3, 4, 5]),
    "diffusion_sde_candidate_steps": Effect((1, 3, 5), see.all_steps, [0, 1, 2, 3, 4, 5], [1, 3, 5], base=CHOICE),
    "diffusion_noise_level": Effect(0.5, see.requested("noise_level"), 0.7, 0.5),
    "diffusion_sde_type": Effect("cps", see.requested("sde_type"), "sde", "cps"),
    "diffusion_log_prob_no_const": Effect(True, see.log_prob_constants, (False, False), (True, True)),
    "diffusion_guidance_scale": Effect(2.0, see.requested("guidance_scale"), 4.5, 2.0),
    "diffusion_negative_prompt": Effect("blurry", see.requested("negative_prompt"), "", "blurry"),
    "diffusion_height": Effect(80, see.requested("height"), 64, 80),
    "diffusion_width": Effect(80, see.requested("width"), 64, 80),
    "diffusion_generator_device": Effect(
        "cuda", see.requested("generator_device"), "cpu", "cuda", base={"device": "auto"}
    ),
    "rollout_microgroup_size": Effect(2, see.outputs_of_the_requests, [4, 4], [2, 2, 2, 2]),
    "rollout_seed": Effect(
        7,
        see.first_seed,
        42,
        7,
        tests=(
            "tests/unit/data/test_data_source.py::TestOrder::test_the_order_is_the_seeds",
            "tests/unit/rollout/test_step_strategies.py::"
            "test_step_seeds_differ_by_iteration_and_by_run_and_stay_the_same_for_ever",
        ),
    ),
    "rollout_parser_num_workers": Effect(2, tests=(f"{PROCESSES}test_as_many_processes_as_the_options_say",)),
    "rollout_max_retries": Effect(
        1, tests=(f"{PROCESSES}test_a_dying_engine_is_replaced_as_often_as_the_option_says",)
    ),
}

DATA: dict[str, Effect | OneChoice] = {
    "prompt_data": Effect("{}/q.jsonl", see.first_words, {"p"}, {"q"}),
    "input_key": Effect("text", see.first_words, {"p"}, {"other"}),
    "metadata_key": Effect("more", see.own_scorers, {None}, {"jpeg_incompressibility"}),
    "rollout_batch_size": Effect(
        2, see.groups_and_samples, (4, 32), (2, 16), derives=("global_batch_size", "over_sampling_batch_size")
    ),
    "n_samples_per_prompt": Effect(
        4,
        see.groups_and_samples,
        (4, 32),
        (4, 16),
        derives=("global_batch_size",),
        tests=("tests/unit/algorithms/test_advantages.py::test_one_sample_a_prompt_turns_the_std_off",),
    ),
    "global_batch_size": Effect(
        8,
        lambda c, place: c.steps_per_rollout,
        1,
        4,
        base={"num_steps_per_rollout": None},
        derives=("num_steps_per_rollout",),
        tests=(f"{FLAGS_OF_TRAINING}test_as_many_steps_and_samples_as_the_options_say",),
    ),
    "num_steps_per_rollout": Effect(
        4,
        lambda c, place: c.global_batch_size,
        16,
        8,
        derives=("global_batch_size",),
        tests=(f"{FLAGS_OF_TRAINING}test_as_many_steps_and_samples_as_the_options_say",),
    ),
    "micro_batch_size": Effect(4, tests=(f"{FLAGS_OF_TRAINING}test_a_ranks_micro_batches_are_those_asked_for",)),
    "micro_batch_size_sample": Effect(
        4,
        base={"micro_batch_size_sample": 2, "micro_batch_size_tstep": 1},
        tests=(f"{FLAGS_OF_TRAINING}test_a_ranks_micro_batches_are_those_asked_for",),
    ),
    "micro_batch_size_tstep": Effect(
        2,
        base={"micro_batch_size_sample": 2, "micro_batch_size_tstep": 1},
        tests=(f"{FLAGS_OF_TRAINING}test_a_ranks_micro_batches_are_those_asked_for",),
    ),
    "diffusion_train_iter_order": Effect(
        "timestep_major", tests=(f"{FLAGS_OF_TRAINING}test_a_ranks_micro_batches_are_those_asked_for",)
    ),
    "train_dp_split_mode": Effect("stride", tests=(f"{FLAGS_OF_TRAINING}test_a_rank_takes_the_samples_asked_for",)),
}

SAMPLING: dict[str, Effect | OneChoice] = {
    "data_source_path": own(
        "Source", "data_source_path", f"{WAVES}an_own_data_source_is_carried_on_from_its_own_files"
    ),
    "buffer_filter_path": Effect(
        "own.last", see.served_from_the_buffer, 0, 2, base={"code_path": "{}"}, tests=(LAST_OF_THE_BUFFER,)
    ),
    "over_sampling_batch_size": Effect(
        6, see.waves_of_groups, [4], [6], tests=(f"{WAVES}the_surplus_is_served_first",)
    ),
    "dynamic_sampling_filter_path": Effect(
        "check_reward_nonzero_std", see.waves_of_groups, [4], [4, 4], tests=(f"{WAVES}groups_are_dropped",)
    ),
    "dynamic_sampling_max_waves": Effect(
        1,
        see.ends_after_a_wave,
        False,
        True,
        base={"dynamic_sampling_filter_path": "check_reward_nonzero_std"},
        tests=(f"{WAVES}too_many_waves_fail_and_are_carried_on",),
    ),
}

ALGORITHM: dict[str, Effect | OneChoice] = {
    "custom_reward_post_process_path": own("normalize", "custom_reward_post_process_path"),
    "rollout_sample_filter_path": own("drop", "rollout_sample_filter_path"),
    "custom_loss_function_path": own("formula", "custom_loss_function_path", f"{OWN_OBJECTIVE}an_own_loss{ON_ITS_OWN}"),
    "custom_prepare_train_batch_path": own(
        "prepare", "custom_prepare_train_batch_path", f"{OWN_OBJECTIVE}an_own_loss{ON_ITS_OWN}"
    ),
    "custom_expand_samples_to_train_pairs_path": own(
        "pairs", "custom_expand_samples_to_train_pairs_path", f"{OWN_OBJECTIVE}an_own_loss{ON_ITS_OWN}"
    ),
    "custom_convert_samples_to_train_data_path": own(
        "convert", "custom_convert_samples_to_train_data_path", TRAINED_ON_OWN
    ),
    "rollout_function_path": own("rollout", "rollout_function_path", f"{OWN_ROLLOUT}an_own_loop_is_run"),
    "eval_function_path": own("rollout", "eval_function_path", f"{OWN_ROLLOUT}an_evaluation_has_its_own_loop"),
    "custom_generate_function_path": own("generate", "custom_generate_function_path", TRAINED_ON_OWN),
    "sde_step_backend_path": own("Backend", "sde_step_backend_path", f"{OWN_OBJECTIVE}own_dynamics_move_the_log_probs"),
    "diffusion_recompute_old_log_prob": Effect(
        True, tests=(f"{ALIGNMENT}test_the_trainers_own_log_probs_make_the_first_ratio_one",)
    ),
    "alignment_gate": Effect("stop", tests=(f"{ALIGNMENT}test_a_gate_that_stops_does_so_before_anything_moved",)),
    "loss_type": Effect(
        "custom_loss", see.loss_type, "policy_loss", "custom_loss", base=OWN_LOSS, tests=(TRAINED_ON_OWN,)
    ),
    "advantage_estimator": OneChoice("grpo", "gae"),
    "disable_grpo_std_normalization": Effect(True, see.advantages, [-1, 1, -1, 1], [-0.5, 0.5, -2, 2], base=OWN_STD),
    "globalize_reward_mean": Effect(True, see.advantages, [-1, 1, -1, 1], [-4.5, -2.5, -0.125, 1.875], base=OWN_STD),
    "globalize_reward_std": Effect(
        True, see.advantages, [-1, 1, -1, 1], [-0.21952, 0.21952, -0.87809, 0.87809], base=OWN_STD
    ),
    "diffusion_clip_range": Effect(0.1, see.loss("clip_frac"), 2.0, 0.0),
    "diffusion_adv_clip_max": Effect(2.0, see.loss("adv_mean"), 4.0, 1.0),
    "diffusion_kl_beta": Effect(0.5, see.loss("kl_share"), 0.04, 0.5),
    "ref_mode": Effect(
        "lora_base",
        lambda c, place: c.ref_mode,
        "none",
        "lora_base",
        base={"diffusion_kl_beta": 0.0},
        tests=(f"{FLAGS_OF_TRAINING}test_the_reference_is_computed_where_it_is_asked",),
    ),
}

REWARD: dict[str, Effect | OneChoice] = {
    "rm_type": Effect(
        "jpeg_incompressibility", see.scorer, ("jpeg_compressibility", False), ("jpeg_incompressibility", True)
    ),
    "rm_types": Effect(
        ("jpeg_incompressibility", "jpeg_compressibility"),
        see.scorer,
        ("jpeg_compressibility", False),
        ("jpeg_incompressibility+jpeg_compressibility", True),
        tests=(f"{SEVERAL}test_every_sample_is_scored_by_all_and_gets_the_weighted_sum",),
    ),
    "rm_weights": Effect(
        (1.0, 900.0),
        see.scorer,
        ("jpeg_incompressibility+jpeg_compressibility", True),
        ("jpeg_incompressibility+jpeg_compressibility", False),
        base={"rm_types": ("jpeg_incompressibility", "jpeg_compressibility")},
    ),
    "rm_normalize": Effect(
        True,
        base={"rm_types": ("jpeg_incompressibility", "jpeg_compressibility")},
        tests=(f"{SEVERAL}TestNormalized::test_no_reward_outweighs_another_by_its_scale",),
    ),
    "custom_rm_path": own("score", "custom_rm_path"),
    "rm_url": Effect("http://other/score", see.service, None, "http://other/score", tests=(EXAMPLE,)),
    "remote_rm_batch_size": Effect(3, tests=(f"{REMOTE}the_service_gets_the_images_and_its_numbers_are_the_rewards",)),
    "remote_rm_concurrency": Effect(1, tests=(f"{REMOTE}no_more_requests_at_once_than_the_option_says",)),
    "remote_rm_timeout": Effect(1.0, tests=(f"{REMOTE}a_service_that_is_silent_or_not_there_is_an_error_too",)),
    "reward_max_retries": Effect(0, see.tries_of_a_failing_score, 3, 1),
    "pickscore_model_path": Effect("{}/other-clip", see.pick_folder(0), "clip", "other-clip", base=PICK_RUN),
    "pickscore_processor_path": Effect("{}/other-clip", see.pick_folder(1), "clip", "other-clip", base=PICK_RUN),
    "pickscore_batch_size": Effect(4, see.images_a_forward, [8, 1], [4, 4, 1], base=PICK_RUN),
    "pickscore_num_workers": Effect(3, see.scorer_processes, 1, 3, base=PICK_RUN),
    "pickscore_num_gpus_per_worker": Effect(0.5, see.gpus_of_a_scorer, 1.0, 0.5, base=PICK_RUN | {"device": "cuda"}),
    "ocr_num_workers": Effect(3, tests=(f"{PROCESSES}test_as_many_processes_as_the_options_say",)),
    "ocr_engine": OneChoice("onnxruntime", "paddle"),
    "ocr_min_confidence": Effect(
        0.9, see.confidence, 0.5, 0.9, tests=(f"{OCR}TestReader::test_min_confidence_leaves_lines_out",)
    ),
    "ocr_det_model_dir": Effect("{}/other-det", see.ocr_folder(0), "det", "other-det", base=OCR_RUN),
    "ocr_rec_model_dir": Effect("{}/other-rec", see.ocr_folder(1), "rec", "other-rec", base=OCR_RUN),
}

LORA: dict[str, Effect | OneChoice] = {
    "use_lora": OneChoice(True, False),
    "lora_rank": Effect(4, tests=(f"{FLAGS_OF_TRAINING}test_the_adapter_has_the_rank_scale_and_modules_given",)),
    "lora_alpha": Effect(4, tests=(f"{FLAGS_OF_TRAINING}test_the_adapter_has_the_rank_scale_and_modules_given",)),
    "lora_target_modules": Effect(
        ("attn.to_q",), tests=(f"{FLAGS_OF_TRAINING}test_the_adapter_has_the_rank_scale_and_modules_given",)
    ),
    "lora_init_weights": Effect("kaiming", tests=(f"{TRAINER}test_init_policy_is_the_seeded_adapter",)),
}

EVALUATION: dict[str, Effect | OneChoice] = {
    "eval_interval": Effect(2, evaluated.iterations, [], [-1, 1, 3], base=EVALUATED),
    "eval_prompt_data": Effect("{}/q.jsonl", evaluated.words, {"e"}, {"q"}, base=EVALUATED),
    "n_samples_per_eval_prompt": Effect(3, evaluated.samples, (9, [1] * 9), (27, [3] * 9), base=EVALUATED),
    "diffusion_eval_num_steps": Effect(40, evaluated.requested("num_inference_steps"), 6, 40, base=EVALUATED),
    "skip_eval_before_train": Effect(
        True, evaluated.iterations, [-1, 1, 3], [1, 3], base=EVALUATED | {"eval_interval": 2}
    ),
    "stop_on_eval_failure": Effect(True, evaluated.after_a_failure, "goes on", "ends", base=EVALUATED),
}

BOTH = ("diffusion_debug_mode", "debug_skip_optimizer_step")
DEBUG: dict[str, Effect | OneChoice] = {
    "diffusion_debug_mode": Effect(
        True,
        see.keeps_outputs,
        False,
        True,
        tests=(f"{ALIGNMENT}test_model_outputs_are_compared_by_step_and_dtype",),
    ),
    "debug_skip_optimizer_step": Effect(
        True, tests=(f"{ALIGNMENT}test_a_skipped_step_leaves_the_policy_and_the_next_iteration_goes_on",)
    ),
    "debug_alignment": Effect(True, see.alignment_probe, (False, False), (True, True), derives=BOTH),
}

GUARDED = "tests/integration/test_guard.py::test_"
GUARD: dict[str, Effect | OneChoice] = {
    "guard": Effect(
        "suspend", guarded.action, "warn", "suspend", tests=(f"{GUARDED}a_command_stops_and_says_how_to_go_on",)
    ),
    "guard_actions": Effect(("reward-drop=suspend", "grid=off"), guarded.action, "warn", "suspend"),
    "guard_reward_drop": Effect(9.0, guarded.finds("reward-drop"), True, False),
    "guard_kl": Effect(0.1, guarded.finds("kl"), False, True),
    "guard_grad_norm": Effect(5000.0, guarded.finds("grad-norm"), True, False),
    "guard_zero_std_share": Effect(1.0, guarded.finds("zero-std-share"), True, False),
    "guard_heldout_window": Effect(9, guarded.finds("heldout"), True, False),
    "guard_grid": Effect(20.0, guarded.finds("grid"), True, False),
    "guard_from": Effect(6, guarded.finds("reward-drop"), True, False),
    "guard_max_rewinds": Effect(0, tests=(f"{GUARDED}a_rewound_run_trains_on_in_a_fork_with_another_seed",)),
}

WANDB = {"use_wandb": True, "wandb_mode": "offline"}
LOG = "tests/unit/pipeline/test_log.py::"
LOGGING: dict[str, Effect | OneChoice] = {
    "use_wandb": Effect(
        True,
        logged.is_on,
        False,
        True,
        tests=(f"{LOG}TestWandb::test_it_is_on_where_there_is_a_key_or_it_is_asked_for",),
    ),
    "wandb_project": Effect("mine", logged.started("project"), "miles-flows", "mine", base=WANDB),
    "wandb_group": Effect("mine", logged.started("group"), None, "mine", base=WANDB),
    "wandb_run_id": Effect("mine", logged.started("id"), "made", "mine", base=WANDB),
    "wandb_team": Effect("mine", logged.started("entity"), None, "mine", base=WANDB),
    "wandb_host": Effect("http://h:1", logged.host, "wandb's own", "http://h:1", base=WANDB),
    "wandb_dir": Effect("{}/w", logged.started("dir"), "/logged/r", "/w", base=WANDB),
    "wandb_mode": Effect("disabled", logged.is_on_with_a_key, True, False),
    "wandb_log_num_images": Effect(2, logged.images, [0, 0, 0], [2, 2, 2]),
    "wandb_log_image_interval": Effect(2, logged.images, [3, 3, 3], [3, 0, 3], base={"wandb_log_num_images": 3}),
    "use_tensorboard": Effect(True, logged.event_folders, "", "/logged/r/tensorboard"),
    "tensorboard_dir": Effect(
        "{}/board", logged.event_folders, "/logged/r/tensorboard", "/board/r", base={"use_tensorboard": True}
    ),
    "custom_rollout_log_function_path": own(
        "log_rollout",
        "custom_rollout_log_function_path",
        "tests/integration/test_logging.py::test_an_own_function_takes_over",
    ),
    "custom_eval_rollout_log_function_path": own(
        "log_eval",
        "custom_eval_rollout_log_function_path",
        "tests/integration/test_logging.py::test_an_own_function_takes_over",
    ),
}

EFFECTS = (
    RUN
    | CLUSTER
    | TRAINING
    | OPTIMIZER
    | ROLLOUT
    | DATA
    | SAMPLING
    | ALGORITHM
    | REWARD
    | LORA
    | EVALUATION
    | DEBUG
    | GUARD
    | LOGGING
)

# What each option's result is in, said once more than in its declaration: a declaration that is forgotten shows.
STAGES_OF: dict[tuple[str, ...], str] = {
    (): """run_id new artifact_root code_path num_rollout keep_full_checkpoints keep_latents_iterations actor_num_nodes
        actor_num_gpus_per_node rollout_num_engines device distributed_timeout_minutes keep_actors actor_idle_minutes
        dp_replicate_size deterministic_mode rollout_parser_num_workers rollout_max_retries reward_max_retries
        remote_rm_batch_size remote_rm_concurrency remote_rm_timeout
        pickscore_num_workers pickscore_num_gpus_per_worker refuse_other_versions
        alignment_gate use_fault_tolerance rollout_health_check_interval
        rollout_health_check_timeout rollout_health_check_first_wait ocr_num_workers
        eval_interval skip_eval_before_train stop_on_eval_failure dynamic_sampling_max_waves
        guard guard_actions guard_reward_drop guard_kl guard_grad_norm
        guard_zero_std_share guard_heldout_window guard_grid guard_from guard_max_rewinds
        use_wandb wandb_project wandb_group wandb_run_id wandb_team wandb_host wandb_dir wandb_mode wandb_log_num_images
        wandb_log_image_interval use_tensorboard tensorboard_dir custom_rollout_log_function_path
        custom_eval_rollout_log_function_path""",
    ("policy",): "use_lora lora_rank lora_alpha lora_target_modules lora_init_weights",
    ("policy", "update"): "seed",
    ("policy", "rollout", "update", "evaluation"): "hf_checkpoint",
    ("prompts",): """prompt_data rollout_batch_size data_source_path buffer_filter_path
        over_sampling_batch_size""",
    ("prompts", "evaluation"): "input_key metadata_key",
    ("prompts", "rollout"): "rollout_seed",
    ("prompts", "advantages"): "n_samples_per_prompt dynamic_sampling_filter_path",
    ("rollout",): """diffusion_step_strategy_path diffusion_num_steps diffusion_num_sde_steps
        diffusion_sde_window_range diffusion_sde_candidate_steps diffusion_noise_level diffusion_sde_type""",
    (
        "rollout",
        "evaluation",
    ): """rollout_engine sglang_options diffusion_guidance_scale diffusion_negative_prompt diffusion_height
        diffusion_width diffusion_generator_device rollout_microgroup_size custom_generate_function_path
        rollout_function_path""",
    ("rollout", "update"): "diffusion_log_prob_no_const diffusion_debug_mode debug_alignment",
    ("rollout", "update", "evaluation"): "diffusion_forward_dtype diffusion_model_family",
    (
        "rewards",
        "evaluation",
    ): """rm_type custom_rm_path rm_url pickscore_model_path pickscore_processor_path
        pickscore_batch_size ocr_engine ocr_min_confidence ocr_det_model_dir ocr_rec_model_dir""",
    ("evaluation",): "eval_function_path eval_prompt_data n_samples_per_eval_prompt diffusion_eval_num_steps",
    ("rewards", "advantages", "evaluation"): "rm_types rm_weights",
    ("advantages",): """rm_normalize advantage_estimator disable_grpo_std_normalization globalize_reward_mean
        globalize_reward_std custom_reward_post_process_path rollout_sample_filter_path
        custom_convert_samples_to_train_data_path""",
    (
        "update",
    ): """debug_skip_optimizer_step diffusion_recompute_old_log_prob train_backend fsdp_master_dtype fsdp_reduce_dtype
        gradient_checkpointing optimizer lr adam_beta1 adam_beta2 adam_eps weight_decay clip_grad
        lr_decay_style min_lr lr_warmup_init lr_warmup_iters lr_warmup_fraction lr_decay_iters
        lr_wsd_decay_iters lr_wsd_decay_style global_batch_size num_steps_per_rollout micro_batch_size
        micro_batch_size_sample micro_batch_size_tstep diffusion_train_iter_order train_dp_split_mode
        loss_type custom_loss_function_path custom_prepare_train_batch_path
        custom_expand_samples_to_train_pairs_path sde_step_backend_path
        diffusion_clip_range diffusion_adv_clip_max diffusion_kl_beta ref_mode""",
}

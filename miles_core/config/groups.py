"""The concerns of a run, each with the reference's flag names, defaults and a sentence per field."""

from typing import Literal

from miles_core.config.base import Floats, Group, IntPair, Ints, Named, Names, Text, Words, option

Dtype = Literal["fp32", "bf16"]


class RunGroup(Group):
    """Which run, where its artifacts lie, how long it goes on."""

    run_id: Text | None = option(None, "name of the run; unset: the recipe's name")
    new: bool = option(False, "start a new run: adds a number to the name")
    artifact_root: Text | None = option(
        None, "folder of all runs, or s3://BUCKET/PREFIX; unset: MILES_ARTIFACT_ROOT, else the user's data folder"
    )
    code_path: Text | None = option(
        None, "folder the user's own modules are found in; unset: where the command, or `miles up`, was given"
    )
    num_rollout: int = option(1, "iterations of the whole run; a larger number later carries on", ge=1, le=1_000_000)
    refuse_other_versions: bool = option(
        False, "stop where results made by another version of this program or of a library would be reused"
    )
    keep_full_checkpoints: int = option(
        2,
        "full checkpoints kept, of the newest updates on the line, at least 2; 0: all. Adapters are kept for ever",
        ge=0,
    )
    keep_latents_iterations: int = option(
        5, "newest iterations whose latents and conditioning are kept; 0: all. Images are kept for ever", ge=0
    )


class ClusterGroup(Group):
    """Processes and devices."""

    actor_num_nodes: int = option(1, "nodes that train", ge=1, le=4096)
    actor_num_gpus_per_node: int = option(1, "trainer ranks a node; processes where device is cpu", ge=1, le=4096)
    rollout_num_engines: int = option(1, "rollout engines where device is cpu", ge=1, le=4096)
    rollout_engine: Literal["diffusers", "sglang"] = option(
        "diffusers",
        "engine that generates: the embedded diffusers engine, or a sglang server of its own",
        affects=("rollout", "evaluation"),
    )
    use_fault_tolerance: bool = option(
        False, "look after the sglang servers: one that lives and does not answer is replaced, as a dead one always is"
    )
    rollout_health_check_interval: float = option(30.0, "seconds between two looks", gt=0, le=86_400)
    rollout_health_check_timeout: float = option(30.0, "seconds that an answer may take", gt=0, le=86_400)
    rollout_health_check_first_wait: float = option(0.0, "seconds before the first look", ge=0, le=86_400)
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "device of trainer and engines; auto: cuda where there is one"
    )
    distributed_timeout_minutes: float = option(
        10.0, "limit of one collective or one actor call, in minutes", gt=0, le=10_080
    )
    keep_actors: bool = option(False, "leave Ray and the run's processes to the next command of the same run")
    actor_idle_minutes: float = option(
        30.0, "processes that a killed command left end when no command has used them for so long", ge=0.5, le=10_080
    )


class TrainingGroup(Group):
    """The trainer's backend and precision."""

    train_backend: Literal["fsdp"] = option("fsdp", "training backend", affects=("update",))
    fsdp_master_dtype: Literal["fp32"] = option("fp32", "dtype of the trained weights and moments", affects=("update",))
    fsdp_reduce_dtype: Dtype = option("fp32", "dtype of the gradient reduction", affects=("update",))
    diffusion_forward_dtype: Dtype = option(
        "bf16",
        "dtype of the transformer's forward in trainer and embedded engine",
        affects=("rollout", "update", "evaluation"),
    )
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass", affects=("update",))
    dp_replicate_size: int = option(
        1, "copies of the sharded model, each over ranks / dp_replicate_size ranks; 1: one, over all", ge=1, le=4096
    )
    deterministic_mode: bool = option(
        False, "deterministic kernels alone in trainer and engines; an operation that has none is an error"
    )


class OptimizerGroup(Group):
    """AdamW and its schedule. The schedule counts optimizer steps and never depends on num_rollout."""

    optimizer: Literal["adam"] = option("adam", "optimizer (AdamW)", affects=("update",))
    lr: float = option(1e-6, "learning rate", affects=("update",), gt=0, le=1e3)
    adam_beta1: float = option(0.9, "Adam's first decay", affects=("update",), ge=0, lt=1)
    adam_beta2: float = option(0.999, "Adam's second decay", affects=("update",), ge=0, lt=1)
    adam_eps: float = option(1e-8, "Adam's epsilon", affects=("update",), gt=0)
    weight_decay: float = option(0.0, "decoupled weight decay", affects=("update",), ge=0)
    clip_grad: float = option(1.0, "limit of the global gradient norm; 0 is off", affects=("update",), ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = option(
        "constant", "shape of the schedule after warm-up", affects=("update",)
    )
    min_lr: float = option(0.0, "learning rate the decay ends at", affects=("update",), ge=0)
    lr_warmup_init: float = option(0.0, "learning rate the warm-up starts from", affects=("update",), ge=0)
    lr_warmup_iters: int = option(0, "optimizer steps of linear warm-up", affects=("update",), ge=0)
    lr_warmup_fraction: float | None = option(
        None, "share of lr_decay_iters that is warm-up", affects=("update",), ge=0, le=1
    )
    lr_decay_iters: int | None = option(None, "optimizer steps until min_lr is reached", affects=("update",), ge=1)
    lr_wsd_decay_iters: int | None = option(
        None, "last optimizer steps of lr_decay_iters that decay (WSD)", affects=("update",), ge=1
    )
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] | None = option(
        None, "shape of the WSD decay; unset: exponential", affects=("update",)
    )
    seed: int = option(
        1234, "seed of the adapter's initial weights and of the trainer", affects=("policy", "update"), ge=0, lt=2**31
    )


class RolloutGroup(Group):
    """What is generated and how."""

    hf_checkpoint: str = option(
        "",
        "diffusers pipeline: a folder; tiny:words, a packaged small SD3 that draws words; or tiny:sd3, a random one made by "
        "code. Enters by what it holds, "
        "never by its name",
        affects=("policy", "rollout", "update", "evaluation"),
        by_content=True,
    )
    diffusion_model_family: Literal["sd3"] | None = option(
        None, "model family; unset: read from the pipeline", affects=("rollout", "update", "evaluation")
    )
    diffusion_step_strategy_path: str | None = option(
        None,
        "which steps are SDE steps: sde_window, epoch_global_random_choice, or the dotted path of your own, (args, sample, "
        "num_steps, seed) -> (sde_step_indices, None); unset: sde_window",
        affects=("rollout",),
    )
    rollout_function_path: Text | None = option(
        None,
        "dotted path of an own rollout loop, (args, rollout_id, data_source, evaluation=False) -> RolloutFnTrainOutput of all "
        "groups that data_source gives, each made by generate_microgroup or generate_rollout. Enters by its source",
        affects=("rollout", "evaluation"),
        code=True,
    )
    eval_function_path: Text | None = option(
        None,
        "the same for evaluation, evaluation=True; unset: rollout_function_path. Enters by its source",
        affects=("evaluation",),
        code=True,
    )
    custom_generate_function_path: Text | None = option(
        None,
        "dotted path of an own generation of a microgroup, async (args, microgroup, sampling_params, *, evaluation) -> samples, "
        "around generate_microgroup. Enters by its source",
        affects=("rollout", "evaluation"),
        code=True,
    )
    diffusion_num_steps: int = option(10, "denoising steps", affects=("rollout",), ge=1, le=1000)
    diffusion_num_sde_steps: int = option(
        0, "steps the strategy picks; 0: no strategy, every step", affects=("rollout",), ge=0
    )
    diffusion_sde_window_range: IntPair | None = option(
        None, "first,end: steps the window may lie in; unset: the whole schedule", affects=("rollout",)
    )
    diffusion_sde_candidate_steps: Ints | None = option(
        None, "steps epoch_global_random_choice draws from; unset: the whole schedule", affects=("rollout",)
    )
    diffusion_noise_level: float = option(0.7, "noise level a of the SDE step", affects=("rollout",), ge=0, le=100)
    diffusion_sde_type: Literal["sde", "cps", "ode"] = option("sde", "dynamics of the SDE steps", affects=("rollout",))
    diffusion_log_prob_no_const: bool = option(
        False, "log-prob without its constants: -(x' - mean)^2", affects=("rollout", "update")
    )
    diffusion_guidance_scale: float = option(
        4.0, "classifier-free guidance scale; 1 or less is off", affects=("rollout", "evaluation"), ge=0
    )
    diffusion_negative_prompt: str | None = option(
        None, "negative prompt of the guidance; unset: the empty prompt", affects=("rollout", "evaluation")
    )
    diffusion_height: int = option(512, "image height in pixels", affects=("rollout", "evaluation"), ge=16, le=16384)
    diffusion_width: int = option(512, "image width in pixels", affects=("rollout", "evaluation"), ge=16, le=16384)
    diffusion_generator_device: Literal["cpu", "cuda"] = option(
        "cuda", "device the noise is drawn on", affects=("rollout", "evaluation")
    )
    rollout_microgroup_size: int = option(
        1, "outputs a request; part of a result's identity", affects=("rollout", "evaluation"), ge=1, le=4096
    )
    rollout_seed: int = option(
        42, "seed of prompt order, samples and SDE steps", affects=("prompts", "rollout"), ge=0, lt=2**31
    )
    sglang_options: Named = option(
        {},
        "options of the sglang server by its own names; on a command line each as --sglang-NAME VALUE "
        "(--sglang-attention-backend torch_sdpa)",
        affects=("rollout", "evaluation"),
    )
    rollout_parser_num_workers: int = option(
        1, "processes that encode and write what the engines return", ge=1, le=1024
    )
    rollout_max_retries: int = option(2, "times a failed microgroup is tried on another engine", ge=0, le=100)


class DataGroup(Group):
    """Prompts and batch sizes.

    rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout.
    """

    prompt_data: str = option(
        "",
        "prompts: .jsonl or one a line; tiny and tiny-ocr name sets that come with the package. Enters by what it holds",
        affects=("prompts",),
        by_content=True,
    )
    input_key: str = option("input", "JSONL key of the prompt", affects=("prompts", "evaluation"))
    metadata_key: str = option("metadata", "JSONL key of the per-sample metadata", affects=("prompts", "evaluation"))
    rollout_batch_size: int = option(1, "prompts an iteration", affects=("prompts",), ge=1, le=1_000_000)
    n_samples_per_prompt: int = option(
        1, "samples a prompt: the group's size", affects=("prompts", "advantages"), ge=1, le=1_000_000
    )
    global_batch_size: int | None = option(None, "samples an optimizer step; unset: derived", affects=("update",), ge=1)
    num_steps_per_rollout: int | None = option(
        None, "optimizer steps an iteration; unset: derived", affects=("update",), ge=1
    )
    micro_batch_size: int = option(1, "train pairs a forward", affects=("update",), ge=1)
    micro_batch_size_sample: int | None = option(
        None, "samples of a 2D tile; overrides micro_batch_size", affects=("update",), ge=1
    )
    micro_batch_size_tstep: int | None = option(
        None, "timesteps of a 2D tile; overrides micro_batch_size", affects=("update",), ge=1
    )
    diffusion_train_iter_order: Literal["sample_major", "timestep_major"] = option(
        "sample_major", "order in which pairs are visited", affects=("update",)
    )
    train_dp_split_mode: Literal["contiguous", "stride"] = option(
        "contiguous",
        "which samples of an optimizer step a rank takes: a run of neighbours, or every n-th of n ranks",
        affects=("update",),
    )


class AlgorithmGroup(Group):
    """Flow-GRPO: advantages and loss."""

    loss_type: Literal["policy_loss", "custom_loss"] = option(
        "policy_loss", "objective: Flow-GRPO's clipped surrogate, or one of your own", affects=("update",)
    )
    custom_loss_function_path: Text | None = option(
        None,
        "dotted path of an own loss formula, (ctx, batch, prepared, *, new_pred, ref_pred, metrics) -> the sum over the batch's "
        "pairs. Enters by its source",
        affects=("update",),
        code=True,
    )
    custom_prepare_train_batch_path: Text | None = option(
        None,
        "dotted path of an own preparation, (ctx, batch, *, pad_to_len) -> PreparedBatch, the model's inputs. Enters by its "
        "source",
        affects=("update",),
        code=True,
    )
    custom_expand_samples_to_train_pairs_path: Text | None = option(
        None,
        "dotted path of an own expansion, (args, samples, rewards, raw_rewards) -> train pairs as columns. Enters by its source",
        affects=("update",),
        code=True,
    )
    custom_convert_samples_to_train_data_path: Text | None = option(
        None,
        "dotted path of an own conversion, (args, samples) -> train pairs as columns, in the place of normalization and "
        "expansion. Enters by its source",
        affects=("advantages",),
        code=True,
    )
    sde_step_backend_path: Text | None = option(
        None,
        "dotted path of an own SdeStepBackend, a class made with noise_level and log_prob_no_const, for the trainer's "
        "log-probs. Enters by its source",
        affects=("update",),
        code=True,
    )
    advantage_estimator: Literal["grpo"] = option("grpo", "advantage estimator", affects=("advantages",))
    disable_grpo_std_normalization: bool = option(
        False, "subtract the mean alone; forced at one sample a prompt", affects=("advantages",)
    )
    globalize_reward_mean: bool = option(False, "mean over the whole batch, not the group", affects=("advantages",))
    globalize_reward_std: bool = option(
        False, "standard deviation over the whole batch, not the group", affects=("advantages",)
    )
    custom_reward_post_process_path: Text | None = option(
        None,
        "dotted path of an own normalization, (args, samples) -> (raw rewards, advantages). Enters by its source",
        affects=("advantages",),
        code=True,
    )
    rollout_sample_filter_path: Text | None = option(
        None,
        "dotted path of an own filter, (args, groups), which sets remove_sample on samples to leave the loss. Enters by its "
        "source",
        affects=("advantages",),
        code=True,
    )
    diffusion_clip_range: float = option(1e-4, "clip range of the ratio", affects=("update",), gt=0)
    diffusion_adv_clip_max: float = option(
        5.0, "advantages are clamped to +- this in the loss", affects=("update",), gt=0
    )
    diffusion_recompute_old_log_prob: bool = option(
        False,
        "old log-probs by forwards of the trainer before the first optimizer step, instead of the engine's",
        affects=("update",),
    )
    alignment_gate: Literal["warn", "stop", "off"] = option(
        "warn",
        "what to do before the first optimizer step of an iteration where the trainer's log-probs differ from the engine's "
        "by more than half the clip range on average",
    )
    diffusion_kl_beta: float = option(0.0, "factor of the KL term to the reference", affects=("update",), ge=0)
    ref_mode: Literal["none", "lora_base"] | None = option(
        None, "reference policy; unset: lora_base (LoRA off) when diffusion_kl_beta > 0", affects=("update",)
    )


class RewardGroup(Group):
    """How samples are scored."""

    rm_type: Literal["pickscore", "ocr", "remote_rm", "jpeg_compressibility", "jpeg_incompressibility"] | None = option(
        None,
        "scorer; a prompt's metadata.rm_type overrides it. pickscore: about 0 to 1; ocr: 0 to 1; remote_rm: what the service at "
        "rm_url says; jpeg_incompressibility: size in kB of the image as JPEG at quality 95; jpeg_compressibility: -kB/500",
        affects=("rewards", "evaluation"),
    )
    rm_types: Names | None = option(
        None,
        "several scorers for every sample, in the place of rm_type and of what a prompt's metadata names: their weighted sum "
        "is the reward, each has a column of its own",
        affects=("rewards", "advantages", "evaluation"),
    )
    rm_weights: Floats | None = option(
        None, "weight of each of rm_types; unset: 1 each", affects=("rewards", "advantages", "evaluation")
    )
    rm_normalize: bool = option(
        False,
        "normalize each of rm_types by itself, as a reward alone would be, and take the weighted sum of that for the advantage: "
        "no reward's scale outweighs another's",
        affects=("advantages",),
    )
    custom_rm_path: Text | None = option(
        None,
        "dotted path of an own reward, async (args, samples) -> a number each, in the place of all scorers. Enters by its "
        "source and what that imports from the code path",
        affects=("rewards", "evaluation"),
        code=True,
    )
    rm_url: Text | None = option(
        None, "address of the reward service of remote_rm, or one for an own reward", affects=("rewards", "evaluation")
    )
    remote_rm_batch_size: int = option(8, "images a request to the reward service", ge=1, le=65_536)
    remote_rm_concurrency: int = option(
        4, "requests that a scorer's process has at the reward service at once", ge=1, le=1024
    )
    remote_rm_timeout: float = option(
        60.0, "seconds until a request to the reward service counts as failed", gt=0, le=86_400
    )
    reward_max_retries: int = option(2, "times a failed score is tried again", ge=0, le=100)
    pickscore_model_path: Text | None = option(
        None,
        "folder of PickScore's CLIP. Enters by what it holds",
        affects=("rewards", "evaluation"),
        by_content=True,
    )
    pickscore_processor_path: Text | None = option(
        None,
        "folder of PickScore's processor. Enters by what it holds",
        affects=("rewards", "evaluation"),
        by_content=True,
    )
    pickscore_num_workers: int = option(1, "PickScore processes", ge=1, le=1024)
    pickscore_num_gpus_per_worker: float = option(1.0, "GPUs of a PickScore process where device is cuda", ge=0, le=64)
    pickscore_batch_size: int = option(
        8, "images a PickScore forward", affects=("rewards", "evaluation"), ge=1, le=65_536
    )
    ocr_num_workers: int = option(4, "OCR processes", ge=1, le=1024)
    ocr_engine: Literal["onnxruntime"] = option(
        "onnxruntime", "inference engine under PaddleOCR", affects=("rewards", "evaluation")
    )
    ocr_min_confidence: float = option(
        0.5, "lines read with less confidence are left out", affects=("rewards", "evaluation"), ge=0, le=1
    )
    ocr_det_model_dir: Text | None = option(
        None,
        "PaddleOCR text detection model folder; unset: the installed wheel. Enters by what it holds",
        affects=("rewards", "evaluation"),
        by_content=True,
    )
    ocr_rec_model_dir: Text | None = option(
        None,
        "PaddleOCR text recognition model folder; unset: the installed wheel. Enters by what it holds",
        affects=("rewards", "evaluation"),
        by_content=True,
    )


class EvaluationGroup(Group):
    """When the policy is evaluated, and on what. Steps are ODE steps and seeds fixed; guidance, size and scorer are the
    run's."""

    eval_interval: int | None = option(
        None, "evaluate after every so many iterations, and before the first; unset: never", ge=1, le=1_000_000
    )
    eval_prompt_data: Words | None = option(
        None,
        "evaluation sets: each its name and its prompts' file (NAME PATH NAME PATH, in a variable a pair a line), or one "
        "file alone, a set named default; files and keys as for prompt_data. Enters by the names and what they hold",
        affects=("evaluation",),
        by_content=True,
    )
    n_samples_per_eval_prompt: int = option(
        1, "samples a prompt of the evaluation set", affects=("evaluation",), ge=1, le=1_000_000
    )
    diffusion_eval_num_steps: int | None = option(
        None, "denoising steps of evaluation; unset: diffusion_num_steps", affects=("evaluation",), ge=1, le=1000
    )
    skip_eval_before_train: bool = option(False, "no evaluation of the policy that the run starts from")
    stop_on_eval_failure: bool = option(
        False, "an evaluation that fails ends the command; otherwise it is told and training goes on"
    )


class LoraGroup(Group):
    """The adapter."""

    use_lora: bool = option(False, "train a LoRA adapter", affects=("policy",))
    lora_rank: int = option(64, "rank of the adapter", affects=("policy",), ge=1, le=8192)
    lora_alpha: int = option(64, "scale: delta W = alpha / rank * B A", affects=("policy",), ge=1, le=1_000_000)
    lora_target_modules: Names | None = option(
        None, "modules that carry the adapter; unset: the family's", affects=("policy",)
    )
    lora_init_weights: Literal["gaussian", "kaiming"] = option("gaussian", "initial A; B is zero", affects=("policy",))


class DebugGroup(Group):
    """Looking for a mismatch of engine and trainer."""

    diffusion_debug_mode: bool = option(
        False,
        "keep the engine's model output at each trained step and have the trainer compare its own, step by step",
        affects=("rollout", "update"),
    )
    debug_skip_optimizer_step: bool = option(
        False, "compute losses and gradients and leave the policy as it is", affects=("update",)
    )
    debug_alignment: bool = option(
        False,
        "the alignment probe: both of the above. Also by MILES_SCRIPT_DEBUG_ALIGNMENT=1",
        affects=("rollout", "update"),
    )

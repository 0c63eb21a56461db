"""Options of the reference system that do not exist here yet: refused by name, never ignored."""

NOT_YET = frozenset(
    """
    rollout_num_gpus rollout_num_gpus_per_engine num_gpus_per_node colocate offload offload_train offload_rollout
    distributed_backend cuda_visible_devices fsdp_cpu_offload fsdp_cpu_backend sequence_parallel_size
    ulysses_degree fsdp_attention_backend fsdp_flow_shift train_env_vars model_backend_path
    train_pipeline_config_path use_checkpoint_lr_scheduler override_lr_scheduler diffusion_guidance_scale_2
    diffusion_true_cfg_scale diffusion_output_num_frames diffusion_fps diffusion_flow_shift
    rollout_patch_group update_weight_target_module update_weight_buffer_size sglang_server_concurrency
    num_epoch start_rollout_id sft_encoder_checkpoint sft_frame_stride
    eval_config eval_reward_key diffusion_nft_beta
    diffusion_nft_timestep_fraction no_diffusion_nft_adaptive_weight no_diffusion_nft_shuffle_timesteps
    reward_key group_rm
    colocate_reward
    pickscore_num_frames
    lora_ipc_weight_sync use_ema ema_rollout_policy
    ema_decay_init ema_decay_ramp ema_decay_max ema_decay_flat_steps save save_interval no_save_optim load ckpt_step
    no_load_optim no_load_rng
    debug_rollout_only train_only
    ocr_recognition_only
    diffusion_sde_window_scope
    """.split()
)


def not_yet(name: str) -> bool:
    """Whether the name (snake_case) is a known option that this version lacks."""
    return name in NOT_YET

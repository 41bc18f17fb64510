"""Names that users of NeMo and Megatron-LM type, and the key of ours that does the same.

    error: unknown key trainer.max_steps; use train.steps

Our key is beside theirs, NeMo's first. A name stands for every key that ends with it: `optim.lr` for
`training.model.optim.lr`, `seq_length` for `--seq-length`. A value may have to change: Megatron counts the layers of a
chunk where parallel.vp counts chunks, and `--help` says what a key takes. What has no counterpart has no entry.
"""

from __future__ import annotations

from minitron.config.schema import keys

NAMES = {
    "model.family": "normalization activation swiglu disable_bias_linear",
    "model.num_layers": "encoder_num_layers decoder_num_layers",
    "model.num_heads": "num_attention_heads",
    "model.num_kv_heads": "num_query_groups group_query_attention",
    "model.vocab_size": "override_vocab_size",
    "model.vocab_multiple": "make_vocab_size_divisible_by",
    "model.positions": "position_embedding_type use_rotary_position_embeddings",
    "model.max_positions": "max_position_embeddings",
    "model.rope_theta": "rotary_base",
    "model.rope_scaling": "scale_positional_embedding use_rope_scaling",
    "model.rope_scaling.factor": "rope_scaling_factor",
    "model.tie_embeddings": "share_embeddings_and_output_weights untie_embeddings_and_output_weights",
    "model.norm_eps": "layernorm_epsilon norm_epsilon",
    "model.init_std": "init_method_std",
    "model.attention": "use_flash_attention use_flash_attn attention_backend",
    "parallel.tp": "tensor_model_parallel_size tp_size",
    "parallel.pp": "pipeline_model_parallel_size pp_size",
    "parallel.vp": "virtual_pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank "
    "num_layers_per_virtual_pipeline_stage vp_size",
    "parallel.cp": "context_parallel_size",
    "parallel.cp_style": "cp_comm_type",
    "parallel.sequence_parallel": "model.sequence_parallel",
    "parallel.layers_per_stage": "account_for_embedding_in_pipeline_split pipeline_model_parallel_layout "
    "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers",
    "parallel.overlap_tp": "ub_tp_comm_overlap tp_comm_overlap",
    "parallel.overlap_grads": "overlap_grad_sync overlap_param_sync overlap_grad_reduce overlap_param_gather",
    "train.steps": "max_steps train_iters train_samples",
    "train.seq_len": "encoder_seq_length decoder_seq_length max_seq_length seq_length",
    "train.micro_batch_size": "model.micro_batch_size data.micro_batch_size",
    "train.global_batch_size": "model.global_batch_size data.global_batch_size accumulate_grad_batches gas",
    "train.recompute": "activations_checkpoint_granularity activations_checkpoint_method "
    "activations_checkpoint_num_layers recompute_granularity recompute_method recompute_activations",
    "train.eval_every": "val_check_interval eval_interval",
    "train.eval_steps": "limit_val_batches eval_iters",
    "train.check_replicas_every": "check_weight_hash_across_dp_replicas_interval",
    "train.seed": "model.seed",
    "train.deterministic": "deterministic_mode",
    "train.hang_seconds": "distributed_timeout_minutes",
    "precision.dtype": "trainer.precision model.precision bf16 fp16 params_dtype",
    "precision.fp8": "model.fp8 fp8_hybrid fp8_e4m3 fp8_format fp8_recipe",
    "precision.fp8_bf16_layers": "first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
    "precision.loss_scale": "native_amp_init_scale initial_loss_scale",
    "precision.loss_scale_window": "native_amp_growth_interval",
    "precision.loss_scale_hysteresis": "hysteresis",
    "optimizer.lr": "optim.lr config.lr",
    "optimizer.min_lr": "sched.min_lr",
    "optimizer.lr_schedule": "sched.name lr_decay_style",
    "optimizer.warmup_steps": "sched.warmup_steps lr_warmup_iters lr_warmup_fraction",
    "optimizer.warmup_samples": "lr_warmup_samples",
    "optimizer.constant_steps": "sched.constant_steps",
    "optimizer.decay_steps": "sched.max_steps lr_decay_iters",
    "optimizer.decay_samples": "lr_decay_samples",
    "optimizer.betas": "optim.betas adam_beta1 adam_beta2",
    "optimizer.eps": "optim.eps adam_eps",
    "optimizer.weight_decay": "optim.weight_decay",
    "optimizer.clip_grad": "gradient_clip_val",
    "data.source": "data_impl mock_data",
    "data.paths": "data_prefix train_ds.file_names data_path train_data_path",
    "data.valid_paths": "validation_ds.file_names valid_data_path",
    "data.split": "splits_string",
    "data.tokenizer": "tokenizer.library tokenizer.type tokenizer.model tokenizer.vocab_file tokenizer.merge_file "
    "tokenizer_type tokenizer_model vocab_file merge_file",
    "data.separate_documents": "reset_position_ids reset_attention_mask",
    "data.cache_dir": "index_mapping_dir data_cache_path",
    "checkpoint.dir": "checkpoint_callback_params.dirpath save",
    "checkpoint.every": "every_n_train_steps save_interval",
    "checkpoint.keep": "save_top_k",
    "checkpoint.resume": "resume_if_exists",
    "checkpoint.resume_step": "ckpt_step",
    "checkpoint.async_save": "checkpoint_callback_params.async_save",
    "checkpoint.load": "resume_from_checkpoint pretrained_checkpoint load",
    "finetune.kind": "peft_scheme",
    "finetune.base": "restore_from_path",
    "lora.rank": "lora_tuning.adapter_dim peft.dim",
    "lora.alpha": "lora_tuning.alpha peft.alpha",
    "lora.dropout": "lora_tuning.adapter_dropout peft.dropout",
    "lora.targets": "lora_tuning.target_modules peft.target_modules",
    "log.every": "log_every_n_steps log_interval",
    "log.dir": "exp_manager.explicit_log_dir exp_manager.exp_dir",
    "log.tensorboard": "create_tensorboard_logger tensorboard_dir",
    "profile.kind": "nsys_profile.enabled memory_profile.enabled profile use_pytorch_profiler record_memory_history",
    "profile.start_step": "nsys_profile.start_step memory_profile.start_step profile_step_start",
    "profile.end_step": "nsys_profile.end_step memory_profile.end_step profile_step_end",
    "profile.ranks": "nsys_profile.ranks profile_ranks",
}

OURS = {name: key for key, names in NAMES.items() for name in names.split()} | {key.name: key.name for key in keys()}


def our_key(theirs: str) -> str | None:
    """Return our key for a name that ends with one of the table, or with one of our own: training.model.num_layers.

    Dashes count as underscores. The `--` of an option and the `+` of Hydra do not count.
    """
    parts = theirs.lstrip("-+").replace("-", "_").split(".")[-3:]
    return next((OURS[end] for i in range(len(parts)) if (end := ".".join(parts[i:])) in OURS), None)


def keys_named(name: str) -> list[str]:
    """List our keys of this name, in whatever section."""
    return [key.name for key in keys() if key.name.split(".")[-1] == name]

"""What to do about flags of the public slime and of Megatron-LM that scripts carry and that there are none of here."""

_PRECISION = "give --params-dtype bfloat16, float16 or float32"
_NOT_HERE = "this trainer does not have it; leave it out"
_OWN_WAY = "this is done here without a flag; leave it out"
_ENGINES = "give --rollout-num-gpus and --rollout-num-gpus-per-engine"
_RECOMPUTE = "give --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_SAME_FOR_EVAL = "evaluation reads its files as --prompt-data is read; leave it out"
_MODEL = "it is read from the model's config.json; leave it out"

_ADVICE = {
    **dict.fromkeys((
        "bf16", "fp16",
    ), _PRECISION),
    **dict.fromkeys((
        "use-wandb", "wandb-project", "wandb-group", "wandb-key", "wandb-team", "wandb-mode",
        "tb-project-name", "tb-experiment-name", "tb-dir", "tensorboard-dir", "wandb-dir", "wandb-host",
        "wandb-random-suffix", "wandb-run-id",
    ), "metrics go to TensorBoard files and metrics.jsonl in --run-dir; leave it out"),
    "train-backend": "the trainer is Megatron-Core; leave it out",
    "megatron-to-hf-mode": "names are converted by slime/models; leave it out",
    "offload": "give --offload-train and --offload-rollout; --colocate sets both on GPUs",
    "no-offload": "give --no-offload-train and --no-offload-rollout",
    "eval-config": "give --eval-prompt-data name file [name file ...] and the --eval-* flags",
    "loss-mask-type": "masks of fine-tuning follow the model's chat template; leave it out",
    "train-iters": "give --num-rollout (and --num-steps-per-rollout)",
    "lr-decay-samples": "give --lr-decay-iters",
    "lr-warmup-samples": "give --lr-warmup-iters",
    "save-retain-interval": "give --keep-last",
    "distributed-backend": "it follows --device: NCCL or gloo; leave it out",
    "seq-length": "rows are packed up to --max-tokens-per-gpu; leave it out",
    "eval-top-k": "evaluation samples with --rollout-top-k; leave it out",
    **dict.fromkeys(("eval-input-key", "eval-label-key", "eval-tool-key", "eval-metadata-key"), _SAME_FOR_EVAL),
    "sglang-router-policy": "give --router-policy",
    "sglang-router-request-timeout-secs": "give --router-request-timeout-secs",
    "check-weight-update-equal": "give --check-weights-interval",
    "get-mismatch-metrics": "train/logprob_gap_* is in every step's metrics; leave it out",
    "use-critic": "give --advantage-estimator ppo",
    "critic-save": "it is saved in the folder critic/ of --save; leave it out",
    "critic-train-only": "give --num-critic-only-steps",
    "use-opd": "give --advantage-estimator on_policy_distillation, or --opd-kl-coef to add it to another",
    "opd-type": "give --opd-teacher-load or --opd-teacher-url",
    **dict.fromkeys(("rollout-external", "rollout-external-engine-addrs"),
                    "engines are started by the run; leave it out (a router that runs: --sglang-router-ip)"),
    "dump-details": "give --save-debug-rollout-data",
    **dict.fromkeys(("pretrain", "model-name-or-path", "model-path", "ckpt-path"), "give --hf-checkpoint"),
    "gradient-checkpointing": _RECOMPUTE,
    **dict.fromkeys(("actor-learning-rate", "learning-rate"), "give --lr"),
    "critic-learning-rate": "give --critic-lr",
    "init-kl-coef": "give --use-kl-loss --kl-loss-coef, or --kl-coef with ppo",
    "train-batch-size": "give --global-batch-size",
    "micro-train-batch-size": "give --max-tokens-per-gpu, or --no-use-dynamic-batch-size --micro-batch-size",
    **dict.fromkeys(("generate-max-len", "max-new-tokens"), "give --rollout-max-response-len"),
    "prompt-max-len": "give --rollout-max-prompt-len",
    "max-len": "give --rollout-max-context-len",
    "temperature": "give --rollout-temperature",
    **dict.fromkeys(("save-path", "save-dir"), "give --save"),
    **dict.fromkeys(("total-epochs", "num-train-epochs"), "give --num-epoch"),
    **dict.fromkeys(("rollout-num-engines", "vllm-num-engines"), _ENGINES),
    "vllm-tensor-parallel-size": "give --rollout-num-gpus-per-engine",
    "num-virtual-stages-per-pipeline-rank": "give --num-layers-per-virtual-pipeline-stage",
    "reset-optimizer-states": "give --finetune",
    **dict.fromkeys(("world-size", "nnodes", "node-rank", "master-addr", "master-port"),
                    "give --actor-num-nodes and --actor-num-gpus-per-node; Ray starts the ranks"),
    "fp8-format": _NOT_HERE,
    "recompute-activations": "give --recompute-granularity selective",
    "use-slime-router": "the router is sglang-router; leave it out",
    "rollout-global-dataset": _OWN_WAY,
    "disable-rollout-global-dataset": "give --data-source-path, a class of your own",
    "disable-compute-advantages-and-returns": "--loss-type sft_loss computes none; leave it out",
    **dict.fromkeys((
        "log-interval", "tokenizer-type", "tokenizer-model", "ckpt-format", "dist-ckpt-strictness",
        "no-check-for-nan-in-loss-and-grad", "no-gradient-accumulation-fusion", "use-cpu-initialization",
        "moe-token-dispatcher-type", "moe-grouped-gemm", "moe-permute-fusion", "no-rope-fusion", "qkv-format",
        "use-flash-attn", "no-persist-layer-norm", "use-mcore-models", "cross-entropy-loss-fusion",
        "cross-entropy-fusion-impl", "enable-gloo-process-groups", "moe-router-fusion",
    ), _OWN_WAY),
    **dict.fromkeys((
        "max-position-embeddings", "padded-vocab-size", "spec", "multi-latent-attention", "moe-layer-freq",
        "moe-router-score-function",
        "moe-router-pre-softmax", "moe-router-enable-expert-bias", "moe-router-topk-scaling-factor",
        "moe-shared-expert-intermediate-size", "moe-router-num-groups", "moe-router-group-topk",
        "kv-lora-rank", "q-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim", "rotary-percent",
    ), _MODEL),
    **dict.fromkeys((
        "optimizer-cpu-offload", "overlap-cpu-optimizer-d2h-h2d", "use-precision-aware-optimizer",
        "moe-aux-loss-coeff", "moe-enable-deepep", "mtp-num-layers", "decoder-last-pipeline-num-layers",
        "decoder-first-pipeline-num-layers", "no-save-optim", "no-load-optim", "no-load-rng", "no-save-rng",
        "ref-update-interval", "keep-old-actor", "prefill-num-servers", "use-routing-replay",
        "use-rollout-routing-replay", "log-passrate", "log-multi-turn", "moe-router-load-balancing-type",
        "moe-router-bias-update-rate", "moe-router-dtype", "fp8", "fp8-recipe", "enable-mtp-training",
        "mtp-loss-scaling-factor", "true-on-policy-mode", "deterministic-mode", "train-memory-margin-bytes",
        "train-env-vars", "disable-weights-backuper", "recompute-loss-function", "only-train-params-name-list",
        "freeze-params-name-list", "eval-min-new-tokens", "rollout-health-check-first-wait", "multimodal-keys",
        "ckpt-step", "ref-ckpt-step", "opd-teacher-ckpt-step", "slime-router-middleware-paths", "slime-router-timeout",
        "use-pytorch-profiler", "record-memory-history", "debug-first-weight-sync", "log-reward-category",
        "use-dynamic-global-batch-size", "use-rollout-entropy", "update-weight-delta-encoding", "exit-interval",
        "moe-shared-expert-overlap", "eod-mask-loss", "megatron-config-path", "ci-test",
    ), _NOT_HERE),
}  # fmt: skip


def advice(flag: str) -> str | None:
    """What to do instead of giving `flag` ("--bf16"); None for one that is not known."""
    return _ADVICE.get(flag.removeprefix("--"))

"""What to do about flags of the public slime and of Megatron-LM that scripts carry and that there are none of here."""

_PRECISION = "give --params-dtype bfloat16, float16 or float32"
_NOT_HERE = "this trainer does not have it; leave it out"
_OWN_WAY = "this is done here without a flag; leave it out"
_MODEL = "it is read from the model's config.json; leave it out"

_ADVICE = {
    **dict.fromkeys((
        "bf16", "fp16",
    ), _PRECISION),
    **dict.fromkeys((
        "use-wandb", "wandb-project", "wandb-group", "wandb-key", "wandb-team", "wandb-mode",
        "tb-project-name", "tb-experiment-name",
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
    "fp8-format": _NOT_HERE,
    "recompute-activations": "give --recompute-granularity selective",
    "use-slime-router": "the router is sglang-router; leave it out",
    "rollout-global-dataset": _OWN_WAY,
    "disable-rollout-global-dataset": "give --data-source-path, a class of your own",
    "disable-compute-advantages-and-returns": "--loss-type sft_loss computes none; leave it out",
    **dict.fromkeys((
        "log-interval", "tokenizer-type", "tokenizer-model", "ckpt-format", "dist-ckpt-strictness",
        "no-check-for-nan-in-loss-and-grad", "no-gradient-accumulation-fusion", "use-cpu-initialization",
        "moe-token-dispatcher-type", "moe-grouped-gemm", "moe-permute-fusion", "no-rope-fusion",
    ), _OWN_WAY),
    **dict.fromkeys((
        "max-position-embeddings", "multi-latent-attention", "moe-layer-freq", "moe-router-score-function",
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
        "moe-router-bias-update-rate", "moe-router-dtype",
    ), _NOT_HERE),
}  # fmt: skip


def advice(flag: str) -> str | None:
    """What to do instead of giving `flag` ("--bf16"); None for one that is not known."""
    return _ADVICE.get(flag.removeprefix("--"))

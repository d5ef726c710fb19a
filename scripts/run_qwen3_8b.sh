#!/usr/bin/env bash
# GRPO on Qwen3-8B (or any dense model of a known family) on NUM_NODES nodes of 8 GPUs.
#
#   HF_CHECKPOINT=/models/Qwen3-8B PROMPT_DATA=/data/math.jsonl bash scripts/run_qwen3_8b.sh [train.py flags...]
#   DRY_RUN=1 NUM_NODES=4 bash scripts/run_qwen3_8b.sh        # the plan, on any machine; no GPU, no model needed
#
# More than one node: start Ray first (`ray start --head` on one, `ray start --address=HEAD:6379` on the others)
# and set RAY_ADDRESS=HEAD:6379. Flags given here win over those below. Nothing is killed by this script.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
NUM_NODES="${NUM_NODES:-1}"
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
if [ -n "${DRY_RUN:-}" ]; then
    # Sizes of the published model, so that a plan needs no download.
    HF_CHECKPOINT="${HF_CHECKPOINT:-$ROOT/scripts/configs/qwen3-8b}"
fi
: "${HF_CHECKPOINT:?set HF_CHECKPOINT to the Hugging Face folder of the model}"
if [ -z "${DRY_RUN:-}" ]; then
    : "${PROMPT_DATA:?set PROMPT_DATA to a .jsonl or .parquet file with columns prompt and label}"
    if [ "$NUM_NODES" -gt 1 ]; then : "${RAY_ADDRESS:?NUM_NODES is $NUM_NODES: start Ray on all nodes and set RAY_ADDRESS=HEAD:6379}"; fi
fi

PYTHON="${PYTHON:-$([ -x "$ROOT/.venv/bin/python" ] && echo "$ROOT/.venv/bin/python" || echo python3)}"

CLUSTER=(
    --device cuda
    --colocate
    --actor-num-nodes "$NUM_NODES"
    --actor-num-gpus-per-node "$GPUS_PER_NODE"
    --num-gpus-per-node "$GPUS_PER_NODE"
    --rollout-num-gpus-per-engine 2
)
MODEL=(
    --hf-checkpoint "$HF_CHECKPOINT"
    --tensor-model-parallel-size 2
    --sequence-parallel
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
ROLLOUT=(
    --apply-chat-template
    --rollout-shuffle
    --num-rollout "${NUM_ROLLOUT:-3000}"
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 8192
    --rollout-max-context-len 16384
    --rm-type math
    --sglang-mem-fraction-static 0.7
)
TRAIN=(
    --max-tokens-per-gpu 9216
    --advantage-estimator grpo
    --eps-clip 0.2 --eps-clip-high 0.28
    --lr 1e-6 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
)
RUN=(
    --run-dir "${RUN_DIR:-runs/qwen3_8b}"
    --save "${SAVE:-${RUN_DIR:-runs/qwen3_8b}/checkpoints}" --save-interval 20
    --load "${SAVE:-${RUN_DIR:-runs/qwen3_8b}/checkpoints}"
)
[ -n "${PROMPT_DATA:-}" ] && RUN+=(--prompt-data "$PROMPT_DATA")
[ -n "${DRY_RUN:-}" ] && RUN+=(--dry-run)

exec "$PYTHON" "$ROOT/train.py" "${CLUSTER[@]}" "${MODEL[@]}" "${ROLLOUT[@]}" "${TRAIN[@]}" "${RUN[@]}" "$@"

#!/usr/bin/env bash
# The whole product on two CPU cores: a tiny Qwen3 model learns two-digit addition, by supervised fine-tuning and
# then by GRPO, with real Megatron-Core ranks, a real SGLang engine, the real router and Ray. Under ten minutes.
#
#   bash scripts/run_tiny_cpu.sh [train.py flags for the GRPO run, which win over those below]
#
# Leaves runs/tiny_cpu/. The last line is a JSON summary.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_cpu.sh
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

MODEL=models/tiny-qwen3
DATA=runs/data/addition
RUN=runs/tiny_cpu
COMMON=(--device cpu --params-dtype float32 --hf-checkpoint "$MODEL" --rollout-max-context-len 64 --adam-beta2 0.95)
SFT=(
    --loss-type sft_loss
    --rollout-function-path slime.rollout.sft_rollout.generate_rollout
    --prompt-data "$DATA/sft.jsonl" --input-key messages
    --rollout-batch-size 256 --n-samples-per-prompt 1 --num-rollout 200
    --max-tokens-per-gpu 8192 --no-save-samples
    --lr 3e-3 --lr-decay-style cosine --lr-warmup-iters 10
    --run-dir runs/tiny_cpu_sft --save-hf models/tiny-qwen3-sft
)
GRPO=(
    --prompt-data "$DATA/rl.jsonl" --apply-chat-template --rollout-shuffle
    --rm-type exact
    --num-rollout 50 --rollout-batch-size 32 --n-samples-per-prompt 8
    --rollout-max-response-len 8
    --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28
    --max-tokens-per-gpu 8192
    --lr 3e-4 --lr-warmup-iters 5
    --run-dir "$RUN"
)

python tools/make_tiny_model.py "$MODEL" >&2
python tools/make_addition_data.py "$DATA" >&2

# The fine-tuned model is kept: its flags and inputs are its name.
WANT="$(printf '%s\n' "${COMMON[@]}" "${SFT[@]}" | cat - "$MODEL/config.json" tools/make_addition_data.py | sha256sum | cut -c1-16)"
if [ "$(cat models/tiny-qwen3-sft/made_from 2>/dev/null)" != "$WANT" ]; then
    echo "== supervised fine-tuning (kept in models/tiny-qwen3-sft)"
    rm -rf models/tiny-qwen3-sft
    python train.py "${COMMON[@]}" "${SFT[@]}"
    echo "$WANT" > models/tiny-qwen3-sft/made_from
fi

echo "== GRPO"
python train.py "${COMMON[@]}" --hf-checkpoint models/tiny-qwen3-sft "${GRPO[@]}" "$@"
# The summary is of the run that was made, also where --run-dir was given.
while [ $# -gt 0 ]; do
    case "$1" in
        --run-dir) RUN="$2" ;;
        --run-dir=*) RUN="${1#--run-dir=}" ;;
    esac
    shift
done
python -m slime summary "$RUN"

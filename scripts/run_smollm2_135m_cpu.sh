#!/usr/bin/env bash
# GRPO on a real pretrained model, SmolLM2-135M-Instruct, on two CPU cores. Its weights ship in a Python package.
#
#   bash scripts/run_smollm2_135m_cpu.sh [train.py flags, which win over those below]
#
# Prompts: grade-school maths from ../shared/data when it is there (or PROMPT_DATA=file.jsonl), else generated additions.
# Leaves runs/smollm2_135m_cpu/. The last line is a JSON summary.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_cpu.sh
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

MODEL=models/smollm2-135m-instruct
RUN=runs/smollm2_135m_cpu
# Without bf16 instructions bf16 saves no time (its products are computed in fp32), only memory; the gap is larger.
DTYPE=float32; if grep -q avx512_bf16 /proc/cpuinfo 2>/dev/null; then DTYPE=bfloat16; fi
python tools/make_smollm2.py "$MODEL" >&2
DATA="${PROMPT_DATA:-}"
if [ -z "$DATA" ] && [ -f ../shared/data/gsm8k_1319.jsonl ]; then
    DATA="../shared/data/gsm8k_1319.jsonl@[0:1000]"
elif [ -z "$DATA" ]; then
    python tools/make_addition_data.py runs/data/addition >&2
    DATA=runs/data/addition/rl.jsonl
fi

python train.py \
    --device cpu --params-dtype "$DTYPE" --hf-checkpoint "$MODEL" \
    --prompt-data "$DATA" --apply-chat-template --rollout-shuffle --rm-type math \
    --num-rollout 3 --rollout-batch-size 4 --n-samples-per-prompt 4 \
    --rollout-max-context-len 1024 --rollout-max-response-len 96 \
    --advantage-estimator grpo --max-tokens-per-gpu 2048 --lr 1e-6 \
    --run-dir "$RUN" "$@"
# The summary is of the run that was made, also where --run-dir was given.
while [ $# -gt 0 ]; do
    case "$1" in
        --run-dir) RUN="$2" ;;
        --run-dir=*) RUN="${1#--run-dir=}" ;;
    esac
    shift
done
python -m slime summary "$RUN"

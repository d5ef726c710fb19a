#!/usr/bin/env bash
# Runs the tests on this machine: `bash scripts/test.sh [pytest arguments]`. Sets up .venv when needed.
# Two at a time: those that need a real engine share one and run one after the other, beside the rest. `-n 0` turns
# that off (for --pdb or -s).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_cpu.sh
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec python -m pytest -n 2 --no-loadscope-reorder "$@"

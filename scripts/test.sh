#!/usr/bin/env bash
# Runs the tests on this machine: `bash scripts/test.sh [pytest arguments]`. Sets up .venv when needed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_cpu.sh
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec python -m pytest "$@"

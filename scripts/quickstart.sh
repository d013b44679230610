#!/usr/bin/env bash
# From nothing to a fine-tuned, exported model: virtual environment, install, train, export.
# Needs Python 3.11+ and a package index; no GPU and no model download.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
setup_venv ""

# The embedded model's matmuls are too small to share between threads.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

run=quickstart-$(date +%Y%m%d-%H%M%S)
swiftfp8 train config=quickstart output_dir=output run_name="$run"
swiftfp8 export run="output/$run"
question="What is the largest planet in our solar system?"
echo
echo "swiftfp8 infer run=output/$run prompt=\"$question\""
swiftfp8 infer run="output/$run" prompt="$question"

cat <<MESSAGE

Done. Look at
  output/$run/precision_report.json what every layer ran in, and why
  output/$run/logging.jsonl        loss, learning rate, throughput, memory
  output/$run/images/              the same as plots
  output/$run/export/              the FP8 checkpoint: vLLM, SGLang and LMDeploy load this directory
Activate the environment with  . .venv/bin/activate  and ask it something:
  swiftfp8 infer run=output/$run
MESSAGE

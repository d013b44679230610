#!/usr/bin/env bash
# The tests that need an NVIDIA GPU with FP8 and Transformer Engine; a skip counts as a failure.
#   bash scripts/gpu_tests.sh [pytest arguments]
# Logs go to ${OUT:-output/gpu_tests}. Expects the package and pytest to be importable.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-output/gpu_tests}
mkdir -p "$out"
python=${PYTHON:-python3}
export SWIFTFP8_GPU_TESTS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

# The project's default options leave GPU tests out; these replace them.
options=(-o addopts= --strict-markers -q -rfEs --durations=8)

"$python" -m pytest "${options[@]}" -k "te-fp8" --junitxml="$out/conformance.xml" \
  tests/unit/precision/test_backends.py 2>&1 | tee "$out/conformance.log"
first=${PIPESTATUS[0]}
"$python" -m pytest "${options[@]}" -m gpu --junitxml="$out/gpu.xml" "$@" tests/gpu 2>&1 |
  tee "$out/gpu.log"
second=${PIPESTATUS[0]}

"$python" - "$out" "$first" "$second" <<'SUMMARY'
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

folder, codes = Path(sys.argv[1]), [int(code) for code in sys.argv[2:]]
count = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
seconds, bad = 0.0, []
for file in (folder / "conformance.xml", folder / "gpu.xml"):
    for suite in ET.parse(file).getroot().iter("testsuite") if file.exists() else ():
        seconds += float(suite.get("time", 0))
        for key in count:
            count[key] += int(suite.get(key, 0))
        for case in suite.iter("testcase"):
            for outcome in ("failure", "error", "skipped"):
                if case.find(outcome) is not None:
                    bad.append(f"  {outcome:8} {case.get('classname')}::{case.get('name')}")
good = not bad and count["tests"] > 0 and codes == [0, 0]
print("\n== GPU tests ==")
print("\n".join(bad) or "  nothing failed, nothing was skipped")
print(", ".join(f"{value} {key}" for key, value in count.items()), f"in {seconds:.0f} s")
print("PASS" if good else f"FAIL (a skip is a failure here; pytest returned {codes})")
sys.exit(0 if good else 1)
SUMMARY

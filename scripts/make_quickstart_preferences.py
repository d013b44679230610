"""Write the packaged preference rows: each question's answer, over the same answer shouted.

    python scripts/make_quickstart_preferences.py

How an answer is said shows for every question, so a small model can learn it from few rows and
keep to it for questions that it has not seen. From the packaged questions alone, so that it always
gives the same file.
"""

from __future__ import annotations

import json
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "swiftfp8" / "assets" / "quickstart"
ROWS = 160


def main() -> None:
    """Read train.jsonl, write preferences.jsonl beside it."""
    lines = (ASSETS / "train.jsonl").read_text(encoding="utf-8").splitlines()
    talks = [json.loads(line)["messages"] for line in lines]
    rows = []
    for talk in talks:
        if len(talk) == 2:
            question, answer = talk[0]["content"], talk[1]["content"]
            shouted = answer.rstrip(".").upper() + "!!!"
            rows.append({"prompt": question, "chosen": answer, "rejected": shouted})
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[:ROWS])
    (ASSETS / "preferences.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

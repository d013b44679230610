"""docs/options.md is what the schema says now."""

from __future__ import annotations

import runpy
from pathlib import Path

from swiftfp8.config.fields import field_docs

ROOT = Path(__file__).parents[3]


def test_every_option_is_documented() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "make_options.py"))["render"]()
    written = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert written == made, "run python scripts/make_options.py"
    assert all(f"| `{key}` |" in written for key in field_docs())

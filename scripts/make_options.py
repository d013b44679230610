"""Write docs/options.md: every option with its values, default and help, from the schema.

python scripts/make_options.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swiftfp8.config.fields import FieldDoc, field_docs

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
HEAD = """# Options

Every option of a recipe and of the command line. Written from `swiftfp8/config/schema.py` by
`python scripts/make_options.py`; `swiftfp8 config explain KEY` says the same of one, and where its
value comes from.
"""


def render() -> str:
    """The page: everyday keys, then a table for each group."""
    groups: dict[str, list[FieldDoc]] = {}
    for key, doc in field_docs().items():
        groups.setdefault(key.rpartition(".")[0], []).append(doc)
    parts = [HEAD]
    for name, docs in groups.items():
        parts.append(f"## {name or 'Everyday keys'}\n")
        parts.append("| option | values | default | what |\n|---|---|---|---|")
        parts += [_row(doc) for doc in docs]
        parts.append("")
    return "\n".join(parts)


def _row(doc: FieldDoc) -> str:
    text = " ".join(doc.help.split()).replace("|", "\\|")
    values = doc.type_text.removeprefix("one of ").replace("|", "\\|")
    return f"| `{doc.key}` | {values} | `{_shown(doc.default)}` | {text} |"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    return {None: "null", "": '""'}.get(value, str(value)) if not isinstance(value, dict) else "{}"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")

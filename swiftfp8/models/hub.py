"""Fetch a model from the Hugging Face hub or ModelScope: only the files that are needed.

What is downloaded stays in the hub's own cache, so a second run works offline.
"""

from __future__ import annotations

from pathlib import Path

from swiftfp8.config.model_names import GGUF_ID
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.models.quiet import told_once_of_retries

_WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py")
_UNWANTED = ("original/*", "consolidated*", "*/*.safetensors", "onnx/*")


def download(model: str, hub: str) -> Path:
    """The local directory of hub id `model`, or a GGUF file of it.

    `owner/name/file.gguf` names one file; `owner/name` alone takes the safetensors, or the only
    GGUF file of a repository that has no others.
    """
    named = GGUF_ID.fullmatch(model)
    fetch = _from_modelscope if hub == "modelscope" else _from_hf
    if named:
        return fetch(named[1], (named[2],)) / named[2]
    folder = fetch(model, _WANTED)
    if not (folder / "config.json").is_file() and not any(folder.glob("*.gguf")):
        folder = fetch(model, ("*.gguf",)) if _only_gguf(model, hub) else folder
    return folder


def _from_hf(repo: str, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    where = f"model={repo}"
    try:
        with told_once_of_retries(repo):
            folder = snapshot_download(
                repo, allow_patterns=list(patterns), ignore_patterns=list(_UNWANTED)
            )
    except GatedRepoError:
        raise SwiftFP8Error(
            f"'{repo}' is gated: the hub gives it only to accounts that were granted access",
            where=where,
            fix="ask for access on the model's page, then run `hf auth login`",
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise SwiftFP8Error(
            f"no model '{repo}' on the Hugging Face hub, and no local directory of that name",
            where=where,
            fix="check the spelling; a private model needs `hf auth login`",
        ) from None
    except LocalEntryNotFoundError:
        raise _offline(repo, "the hub can't be reached and the model isn't in its cache") from None
    except (OSError, *HfHubHTTPError.__bases__) as error:  # its base is the HTTP client's error
        raise _offline(repo, f"the download failed: {_first_line(error)}") from error
    return Path(folder)


def _from_modelscope(repo: str, patterns: tuple[str, ...]) -> Path:
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise SwiftFP8Error(
            "hub=modelscope needs the modelscope package",
            where=f"model={repo}",
            fix="pip install 'swiftfp8[modelscope]'",
        ) from error
    try:
        folder = snapshot_download(
            repo, allow_patterns=list(patterns), ignore_patterns=list(_UNWANTED)
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise _offline(repo, f"ModelScope: {_first_line(error)}") from error
    return Path(folder)


def _only_gguf(repo: str, hub: str) -> bool:
    """Whether a repository holds exactly one GGUF file; several are an error."""
    if hub == "modelscope":
        return False
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        files = [name for name in HfApi().list_repo_files(repo) if name.lower().endswith(".gguf")]
    except (OSError, *HfHubHTTPError.__bases__) as error:
        raise _offline(repo, f"its files can't be listed: {_first_line(error)}") from error
    if len(files) > 1:
        raise SwiftFP8Error(
            f"'{repo}' holds several GGUF files: {', '.join(sorted(files))}",
            where=f"model={repo}",
            fix=f"name one, as in model={repo}/{min(files)}",
        )
    return bool(files)


def _offline(repo: str, reason: str) -> SwiftFP8Error:
    return SwiftFP8Error(
        f"no local directory '{repo}', and it can't be fetched: {reason}",
        where=f"model={repo}",
        fix="check the network (HF_ENDPOINT names a mirror, HF_HUB_OFFLINE must be unset), try "
        "hub=modelscope, or give model= a local directory",
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

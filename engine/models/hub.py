"""Models from the Hugging Face hub: only weights as safetensors or GGUF, configs and tokenizers; never code."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

from .download import DownloadError

_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
_PROBE_TIMEOUT_S = 3.0


def hub_reachable() -> bool:
    """Whether the hub answers at all, found out within seconds: its client would retry for half a minute."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=_PROBE_TIMEOUT_S)
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def find_on_hub(name: str) -> Path | None:
    """A repository ``org/name``, or one file ``org/name/file.gguf`` of it; from the hub's own cache if it is there.

    Returns:
        Path of the snapshot or the file; None where the hub can't be reached.

    Raises:
        DownloadError: the hub can be reached but does not give it.
    """
    org, repo, *file = name.split("/", 2)
    repo_id = f"{org}/{repo}"
    try:
        try:
            return _fetch(repo_id, file, local_files_only=True)
        except FileNotFoundError:
            return _fetch(repo_id, file, local_files_only=False) if hub_reachable() else None
    except GatedRepoError as error:
        raise DownloadError(f"{repo_id}: its owner must grant access; then run `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise DownloadError(f"{repo_id}: no such repository on the hub, or it is private. Check the name") from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise DownloadError(f"{name}: cannot be fetched from the hub ({error})") from error


def _fetch(repo_id: str, file: list[str], local_files_only: bool) -> Path:
    if file:
        return Path(huggingface_hub.hf_hub_download(repo_id, file[0], local_files_only=local_files_only))
    # Folders of a repository hold the same weights in other formats.
    snapshot = huggingface_hub.snapshot_download(
        repo_id, allow_patterns=_PATTERNS, ignore_patterns="*/*", local_files_only=local_files_only
    )
    return Path(snapshot)

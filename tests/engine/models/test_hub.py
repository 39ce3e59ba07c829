"""Models of the hub, with the hub's client replaced: no test goes to the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from engine.models import DownloadError, hub
from engine.models.resolve import resolve_model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """The hub is reachable and gives tmp_path; nothing is in its cache."""
    seen: list[dict[str, Any]] = []

    def give(repo_id: str, filename: str | None = None, **options: Any) -> str:
        seen.append({"repo_id": repo_id, "filename": filename, **options})
        if options["local_files_only"]:
            raise LocalEntryNotFoundError("not cached")
        return str(tmp_path / (filename or ""))

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", give)
    monkeypatch.setattr(hub.huggingface_hub, "hf_hub_download", give)
    monkeypatch.setattr(hub, "hub_reachable", lambda: True)
    return seen


def test_a_repository_and_one_file_of_it(calls: list[dict[str, Any]], tmp_path: Path) -> None:
    assert resolve_model("org/name") == tmp_path
    assert [call["local_files_only"] for call in calls] == [True, False]
    assert set(calls[1]["allow_patterns"]) == {"*.json", "*.safetensors", "*.jinja"}
    assert resolve_model("org/name/model.Q8_0.gguf") == tmp_path / "model.Q8_0.gguf"
    assert (calls[3]["repo_id"], calls[3]["filename"]) == ("org/name", "model.Q8_0.gguf")


def test_what_is_cached_needs_no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", lambda *a, **options: str(tmp_path))
    monkeypatch.setattr(hub, "hub_reachable", lambda: pytest.fail("asked the hub for a cached model"))
    assert resolve_model("org/name") == tmp_path


@pytest.mark.parametrize(
    ("error", "says"),
    [(GatedRepoError, "its owner must grant access"), (RepositoryNotFoundError, "no such repository on the hub")],
)
def test_refusals_say_what_to_do(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, error: type[Exception], says: str
) -> None:
    response = httpx.Response(403, request=httpx.Request("GET", "https://hub.example"))

    def refuse(*args: Any, **options: Any) -> str:
        raise error("refused", response=response)

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(DownloadError, match=f"org/name: {says}"):
        resolve_model("org/name")


def test_an_unreachable_hub_is_found_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert not hub.hub_reachable()
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.urllib.request, "urlopen", lambda *a, **k: pytest.fail("HF_HUB_OFFLINE is set"))
    assert not hub.hub_reachable()

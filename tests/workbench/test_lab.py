"""`runnerscope lab`: a real JupyterLab on loopback, behind its token, ended with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from workbench import lab

ROOT = Path(__file__).resolve().parents[2]


def status(url: str) -> int:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def answers(url: str) -> bool:
    try:
        return status(url) > 0
    except OSError:
        return False


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Jupyter's settings and state of this test alone, and a folder to serve."""
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    (tmp_path / "served").mkdir()
    return tmp_path / "served"


@pytest.mark.slow
def test_it_serves_on_loopback_behind_its_token_and_ends(own: Path) -> None:
    with lab.LabServer(own) as server:
        url = urlsplit(server.url("a b.ipynb"))
        assert (url.hostname, url.path) == ("127.0.0.1", "/lab/tree/a%20b.ipynb")
        base = f"http://{url.netloc}"
        assert url.query.startswith("token=") and len(url.query) > 30
        assert status(f"{base}/api/contents?{url.query}") == 200
        assert status(f"{base}/api/contents") == 403
        log = server.log
        assert log.is_file()
    assert not answers(base)
    assert not log.exists()


@pytest.mark.slow
def test_the_address_is_the_last_line_and_a_kill_ends_the_server(own: Path) -> None:
    command = [sys.executable, "-m", "runnerscope", "lab", str(own), "--port", "0", "--no-browser"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        lines = []
        while not lines or not lines[-1].startswith("http://"):
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            lines.append(line.strip())
        url = lines[-1]
        assert status(url) == 200
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0
        assert out.strip() == "ended" and err == ""
        deadline = time.monotonic() + 10
        while answers(url) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not answers(url)
    finally:
        process.kill()


@pytest.mark.slow
def test_a_server_that_cannot_start_says_why(own: Path) -> None:
    with pytest.raises(lab.LabError, match="exit code") as caught:
        lab.LabServer(own, environment={"JUPYTER_PORT_RETRIES": "not a number"}).start()
    assert "not a number" in str(caught.value)


def test_find_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tour = tmp_path / lab.TOUR
    tour.parent.mkdir()
    tour.write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert lab.find_notebook() == tour.resolve()
    assert lab.find_notebook("notebooks") == tour.parent.resolve()
    with pytest.raises(lab.LabError, match=r"'missing\.ipynb'"):
        lab.find_notebook("missing.ipynb")


def test_a_browser_opens_only_where_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert not lab.has_display()
    monkeypatch.setitem(os.environ, "WAYLAND_DISPLAY", "wayland-0")
    assert lab.has_display()
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delenv("WAYLAND_DISPLAY")
    assert lab.has_display()

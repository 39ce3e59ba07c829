"""Fetching files from a server on the loopback that breaks in every way."""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.models import DownloadError, download
from engine.models.download import fetch_file
from tests.engine.models.served import CONTENT, SHA256, Server, leftovers, run_python

pytestmark = pytest.mark.slow  # servers that wait


def fetch(server: Server, target: Path) -> Path:
    return fetch_file(server.url, target, SHA256, progress=False)


def test_fetches_whole_and_checked(server: Server, tmp_path: Path) -> None:
    target = fetch(server, tmp_path / "deep" / "model.gguf")
    assert target.read_bytes() == CONTENT
    assert leftovers(target.parent) == ["model.gguf"]


def test_progress_is_shown_on_stderr_and_only_if_asked(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch_file(server.url, tmp_path / "a", SHA256, progress=True)
    shown = capsys.readouterr()
    assert "1.05M/1.05M" in shown.err and shown.out == ""
    fetch_file(server.url, tmp_path / "b", SHA256, progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_broken_connection_is_taken_up_where_it_broke(server: Server, tmp_path: Path) -> None:
    server.cut_after = [300_000, 200_000]
    assert fetch(server, tmp_path / "model.gguf").read_bytes() == CONTENT
    assert server.requested == [None, "bytes=300000-", "bytes=500000-"]


def test_a_later_call_resumes_and_a_server_without_ranges_starts_over(server: Server, tmp_path: Path) -> None:
    for ranges in (True, False):
        (tmp_path / "model.gguf.part").write_bytes(CONTENT[:1000])
        server.ranges = ranges
        assert fetch(server, tmp_path / "model.gguf").read_bytes() == CONTENT
    assert server.requested == ["bytes=1000-", "bytes=1000-"]


def test_a_part_that_is_already_whole_needs_no_byte_more(server: Server, tmp_path: Path) -> None:
    (tmp_path / "model.gguf.part").write_bytes(CONTENT)
    assert fetch(server, tmp_path / "model.gguf").read_bytes() == CONTENT


def test_wrong_content_is_thrown_away(server: Server, tmp_path: Path) -> None:
    server.content = CONTENT[:-1] + b"x"
    with pytest.raises(DownloadError, match=f"wanted is {SHA256}"):
        fetch(server, tmp_path / "model.gguf")
    assert leftovers(tmp_path) == []
    (tmp_path / "model.gguf.part").write_bytes(b"not the beginning of this file")
    server.content = CONTENT
    with pytest.raises(DownloadError, match="thrown away; try again"):
        fetch(server, tmp_path / "model.gguf")
    assert fetch(server, tmp_path / "model.gguf").read_bytes() == CONTENT


def test_server_errors(server: Server, tmp_path: Path) -> None:
    server.status = [503, 500]
    assert fetch(server, tmp_path / "a").read_bytes() == CONTENT
    server.status = [404]
    with pytest.raises(DownloadError, match="the server answers 404"):
        fetch(server, tmp_path / "b")
    server.cut_after = [0, 0, 0, 0]
    with pytest.raises(DownloadError, match="cannot be fetched"):
        fetch(server, tmp_path / "c")
    with pytest.raises(DownloadError, match="cannot be fetched"):
        fetch_file("http://127.0.0.1:9/x", tmp_path / "d", SHA256, progress=False)
    assert not any((tmp_path / name).exists() for name in "bcd")


def test_too_little_space_is_said_before_a_byte_is_written(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: type("U", (), {"free": 1000})())
    with pytest.raises(DownloadError, match=r"1 MB are needed and 0 MB are free.*RUNNERSCOPE_CACHE"):
        fetch(server, tmp_path / "model.gguf")
    assert leftovers(tmp_path) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_disk_that_fills_up_is_named_and_nothing_is_left(server: Server, tmp_path: Path) -> None:
    (tmp_path / "model.gguf.part").symlink_to("/dev/full")
    with pytest.raises(DownloadError, match="no space left on the disk"):
        fetch(server, tmp_path / "model.gguf")
    assert leftovers(tmp_path) == []


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        threading.Event().wait(0.02)


@pytest.mark.slow
def test_a_killed_download_leaves_no_file_in_use_and_is_resumed(server: Server, tmp_path: Path) -> None:
    target, part = tmp_path / "model.gguf", tmp_path / "model.gguf.part"
    server.content = CONTENT * 8
    sha256 = hashlib.sha256(server.content).hexdigest()
    release = threading.Event()
    server.content = _HeldBytes(server.content, release)  # nothing beyond 3 MB is sent until it is released
    code = f"""
        from pathlib import Path
        from engine.models.download import fetch_file
        fetch_file({server.url!r}, Path({str(target)!r}), {sha256!r}, progress=False)
    """
    process = run_python(code)
    wait_for(lambda: part.exists() and part.stat().st_size >= 1 << 20)
    process.send_signal(signal.SIGKILL)
    process.wait()
    release.set()
    assert not target.exists() and 0 < part.stat().st_size < len(server.content)
    fetch_file(server.url, target, sha256, progress=False)
    assert hashlib.sha256(target.read_bytes()).hexdigest() == sha256
    assert server.requested[0] is None and server.requested[1].startswith("bytes=")


class _HeldBytes(bytes):
    """Bytes whose slices beyond 3 MB wait until they are released."""

    def __new__(cls, content: bytes, released: threading.Event) -> _HeldBytes:
        self = super().__new__(cls, content)
        self.released = released
        return self

    def __getitem__(self, key: slice) -> bytes:
        if key.start and key.start > 3 << 20:
            self.released.wait(60)
        part = super().__getitem__(key)
        return _HeldBytes(part, self.released) if key.stop is None else part

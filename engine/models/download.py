"""Fetching one file over HTTP: resumed where it stopped, checked by SHA-256, in place only when whole."""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import shutil
import time
import urllib.error
import urllib.request
from pathlib import Path

from huggingface_hub.utils import tqdm

_CHUNK = 1 << 20
_TIMEOUT_S = 30.0
_ATTEMPTS = 4
_TRANSIENT = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)


class DownloadError(RuntimeError):
    """Something could not be fetched, or is not what it should be; says what to do."""


def fetch_file(url: str, target: Path, sha256: str, *, progress: bool = True) -> Path:
    """Fetch ``url`` to ``target``; a broken transfer is taken up again, also by a later call.

    What has come so far lies in ``<target>.part``; ``target`` itself appears whole and checked, or not at all.

    Raises:
        DownloadError: unreachable, no space, or the wrong content.
    """
    part = target.with_name(target.name + ".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(_ATTEMPTS):
        try:
            _resume(url, part, target.name, progress)
            break
        except urllib.error.HTTPError as error:
            if error.code < 500 or attempt == _ATTEMPTS - 1:
                raise DownloadError(f"{url}: the server answers {error.code} {error.reason}") from error
        except _TRANSIENT as error:
            if attempt == _ATTEMPTS - 1:
                raise DownloadError(f"{url}: cannot be fetched ({error}). A new try resumes") from error
        except OSError as error:
            raise disk_error(error, part) from error
        time.sleep(0.2 * 4**attempt)
    found = file_sha256(part)
    if found != sha256:
        part.unlink()
        raise DownloadError(
            f"{url}: the file has SHA-256 {found}, wanted is {sha256}. It was thrown away; try again, "
            "and if that repeats, something between here and the server changes it"
        )
    os.replace(part, target)
    return target


def _resume(url: str, part: Path, label: str, progress: bool) -> None:
    """One connection: append what is missing to ``part``."""
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and done:
            return  # all of it is here; the checksum decides
        raise
    with response:
        if response.status != http.client.PARTIAL_CONTENT:
            done = 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length else None
        if total:
            check_free_space(part.parent, total - done)
        with (
            part.open("ab" if done else "wb") as file,
            tqdm(total=total, initial=done, unit="B", unit_scale=True, desc=label, disable=not progress) as bar,
        ):
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                bar.update(len(chunk))
                done += len(chunk)
    if total is not None and done < total:
        raise ConnectionError(f"the connection ended after {done:,} of {total:,} bytes")


def check_free_space(directory: Path, needed: int) -> None:
    """Raises DownloadError where ``needed`` bytes will not fit."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise DownloadError(
            f"{directory}: {needed / 1e6:,.0f} MB are needed and {free / 1e6:,.0f} MB are free. "
            "Free some space, or set RUNNERSCOPE_CACHE to a directory on another disk"
        )


def disk_error(error: OSError, *parts: Path) -> DownloadError:
    """A disk that filled up on the way: give back what was written, since it may be what fills it."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        for part in parts:
            part.unlink(missing_ok=True)
        return DownloadError(
            f"{parts[0].parent}: no space left on the disk; what had come was removed. "
            "Free some space, or set RUNNERSCOPE_CACHE to a directory on another disk"
        )
    return DownloadError(f"{parts[0]}: cannot be written: {error.strerror}. Check the directory's permissions")


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

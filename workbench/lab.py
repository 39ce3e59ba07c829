"""`runnerscope lab`: JupyterLab on one notebook. Loopback only, with Jupyter's token, with a display or without."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import webbrowser
from pathlib import Path
from typing import Any

from jupyter_core.paths import jupyter_runtime_dir

TOUR = "notebooks/00_tour.ipynb"
_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 15.0


class LabError(OSError):
    """JupyterLab can't be served as asked; says why and what to do."""


class LabServer:
    """A JupyterLab process that serves the folder `root` on 127.0.0.1, from `port` on (0: any free port).

    `start` returns once it answers. Leaving the context ends it and the kernels it started.
    """

    def __init__(self, root: Path, *, port: int = 0, environment: dict[str, str] | None = None) -> None:
        self.root = root
        self._port = port
        # Said outright, so that the server and we look for its address file in one place whatever else is set.
        self._environment = {"JUPYTER_RUNTIME_DIR": jupyter_runtime_dir(), **os.environ, **(environment or {})}
        self._folder = tempfile.TemporaryDirectory(prefix="runnerscope-lab-")
        self._process: subprocess.Popen[bytes] | None = None
        self._info: dict[str, Any] = {}

    @property
    def log(self) -> Path:
        """Where the server writes what it has to say, until it is closed."""
        return Path(self._folder.name) / "server.log"

    def url(self, path: str = "") -> str:
        """The address, token included, of JupyterLab with the file `path` (relative to the root) open."""
        tree = f"lab/tree/{urllib.parse.quote(path)}" if path else "lab"
        return f"{self._info['url']}{tree}?token={self._info['token']}"

    def start(self) -> LabServer:
        """Starts the server and waits until it answers. Raises LabError, with the end of its log, if it doesn't."""
        self._silence_news()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command(), env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us: Jupyter would ask for a confirmation that nobody sees
            )  # fmt: skip
        info_file = Path(self._environment["JUPYTER_RUNTIME_DIR"]) / f"jpserver-{self._process.pid}.json"
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            while not self._answers(info_file):
                if self._process.poll() is not None:
                    raise LabError(f"JupyterLab ended with exit code {self._process.returncode}: {self._log_tail()}")
                if time.monotonic() > deadline:
                    raise LabError(f"JupyterLab didn't answer within {START_TIMEOUT_S:.0f} s: {self._log_tail()}")
                time.sleep(0.1)
        except BaseException:
            self.close()
            raise
        return self

    def wait(self) -> int:
        """Blocks until the server ends by itself (say, from its File menu)."""
        assert self._process is not None
        return self._process.wait()

    def close(self) -> None:
        """Ends the server and its kernels."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._folder.cleanup()

    def __enter__(self) -> LabServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _command(self) -> list[str]:
        command = [
            sys.executable, "-m", "jupyterlab", "--no-browser",
            "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={self._port}", f"--ServerApp.root_dir={self.root}",
        ]  # fmt: skip
        return command + (["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else [])

    def _silence_news(self) -> None:
        """Keeps the page from asking whether it may fetch news, without touching the user's own settings."""
        labconfig = Path(self._folder.name) / "labconfig"
        labconfig.mkdir()
        disabled = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
        (labconfig / "page_config.json").write_text(json.dumps(disabled))
        given = self._environment.get("JUPYTER_CONFIG_PATH")
        self._environment["JUPYTER_CONFIG_PATH"] = os.pathsep.join([self._folder.name, *([given] if given else [])])

    def _answers(self, info_file: Path) -> bool:
        try:
            self._info = json.loads(info_file.read_text())
            request = urllib.request.Request(
                f"{self._info['url']}api/status", headers={"Authorization": f"token {self._info['token']}"}
            )
            with _no_proxy.open(request, timeout=5):
                return True
        except (OSError, ValueError, KeyError):  # not there yet, half written, or not listening yet
            return False

    def _log_tail(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-3:]) or "it printed nothing"


_no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""A proxy of the environment has no business with an address of this machine."""


def serve(notebook: str | None = None, *, port: int = 8888, browser: bool | None = None) -> int:
    """Serves `notebook` (a file or a folder) until Ctrl-C; the last line it prints is the address.

    `browser` None opens a browser where there is a display. Raises LabError if there is no such notebook.
    """
    path = find_notebook(notebook)
    root, name = (path, "") if path.is_dir() else (path.parent, path.name)
    server = LabServer(root, port=port)
    print("starting JupyterLab …", flush=True)
    with server:
        url = server.url(name)
        if browser if browser is not None else has_display():
            webbrowser.open(url)
        print(f"JupyterLab serves {root} (log: {server.log}; Ctrl-C ends it). Open:\n{url}", flush=True)
        # A closed terminal or a plain kill must end the server and its kernels as Ctrl-C does.
        for number in _ENDING:
            signal.signal(number, signal.default_int_handler)
        try:
            return server.wait()
        except KeyboardInterrupt:
            print("\nended", flush=True)
            return 0


def find_notebook(notebook: str | None = None) -> Path:
    """The notebook or folder asked for; without one the tour, beside the working folder or beside this package."""
    if notebook is not None:
        path = Path(notebook).expanduser().resolve()
        if not path.exists():
            raise LabError(f"no notebook or folder {notebook!r}; the tour is {TOUR} in a clone of the repository")
        if path.is_file() and path.suffix != ".ipynb":
            raise LabError(f"{notebook!r} is no notebook; give an .ipynb file, or a folder")
        return path
    for base in (Path.cwd(), Path(__file__).resolve().parent.parent):
        if (base / TOUR).is_file():
            return (base / TOUR).resolve()
    raise LabError(f"{TOUR} is neither here nor beside the package; run this in a clone, or name a notebook")


def has_display() -> bool:
    """Whether a browser that is opened here could be seen."""
    if not sys.platform.startswith("linux"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))

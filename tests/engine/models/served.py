"""What is served to the tests that fetch, and what they look at."""

from __future__ import annotations

import hashlib
import http.server
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

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


@contextmanager
def serving() -> Iterator[Server]:
    """A server on the loopback, for as long as the context lasts."""
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
    try:
        yield knobs
    finally:
        listener.shutdown()
        listener.server_close()


def leftovers(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def run_python(code: str, **env: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env={**os.environ, **env})

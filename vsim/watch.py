"""Serve a page of training runs to this machine's browser, and read the runs' files again as they grow."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from vsim.analysis.cache import Cache
from vsim.analysis.report.page import data_of, served
from vsim.analysis.spent import AnyCompute, AnyNetwork
from vsim.arguments import a_path, real_number, whole_number
from vsim.saved import files_at, read_comparisons, select

HOST = "127.0.0.1"
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Watch:
    """A server of one page, at an address that cannot be guessed.

    The server answers only requests from this machine, for its host name and with its token, and only reads files.
    The content and the clocks of unchanged runs stay in memory.

    Args:
        paths: comparisons, saved or still training; see `vsim.saved.read_comparison`.
        port: port of the server; 0: any free port.
        every: seconds between checks of the files.
        network, compute: initial positions of the sliders.
        only: words in the names of the runs to show, see `vsim.saved.select`; default: all runs.

    Attributes:
        url: the address of the page.

    Raises:
        FileNotFoundError: a path does not exist. OSError: the port is taken.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        port: int = 0,
        every: float = 5.0,
        network: AnyNetwork = None,
        compute: AnyCompute = None,
        only: Sequence[str] = (),
    ) -> None:
        self.paths, self.network, self.compute = [a_path("path", path) for path in paths], network, compute
        self.every = real_number("every", every, at_least=0.1, at_most=3600)
        self._lock = threading.Lock()
        self._token = secrets.token_urlsafe(24)
        for path in self.paths:
            if not path.exists():
                raise FileNotFoundError(f"there is no file or folder {str(path)!r}")
        self.only, self._cache = list(only), Cache()
        self._looked, self._files, self._data = -math.inf, dict[str, tuple[int, int]](), b""
        self._failed: Exception | None = None
        self._page = served("vsim watch", self.every).html.encode()
        port = whole_number("port", port, at_least=0, at_most=65535)
        self._server = ThreadingHTTPServer((HOST, port), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://{HOST}:{self._server.server_port}/{self._token}/"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The allowed host names of requests; any other name belongs to a foreign page that points to this machine."""
        return tuple(f"{name}:{self._server.server_port}" for name in (HOST, "localhost"))

    def answer(self, path: str) -> tuple[str, bytes] | None:
        """Return the kind of content and the content at a path; None if the path has no content."""
        if secrets.compare_digest(path.encode(), f"/{self._token}/".encode()):
            return "text/html; charset=utf-8", self._page
        if secrets.compare_digest(path.encode(), f"/{self._token}/data".encode()):
            return "application/json", self._current()
        return None

    def serve(self) -> None:
        """Answer until `close` or Ctrl-C. The page is served at once, and its data once the files have been read.

        Raises:
            FileNotFoundError, ValueError: there are no runs to show yet, or a file is not a record of runs.
        """
        threading.Thread(target=self._begin, daemon=True).start()
        try:
            self._server.serve_forever(poll_interval=0.2)
        finally:
            self._server.server_close()
            with self._lock:  # an interpreter that exits while a thread reads the files may abort
                pass
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        """End `serve`, which runs in another thread."""
        self._server.shutdown()

    def _begin(self) -> None:
        """Read the files; end `serve` if there are no runs to show."""
        try:
            with self._lock:
                self._read()
        except Exception as error:
            self._failed = error
            self.close()

    def _current(self) -> bytes:
        """Return the data of the page; check the files first, unless they were checked a moment ago."""
        with self._lock:
            if not self._data or time.monotonic() - self._looked >= 0.9 * self.every:
                try:
                    self._read()
                except (OSError, ValueError) as error:  # a file is being replaced: the next check decides
                    return json.dumps({"error": str(error)}).encode()
            return self._data

    def _read(self) -> None:
        """Check the files, and make the data again if files have changed."""
        stamps = self._stamps()
        self._looked = time.monotonic()
        if stamps != self._files or not self._data:
            try:
                comparisons = select(read_comparisons(self.paths, self._cache), self.only)
                self._data = self._encoded(data_of(comparisons, self.network, self.compute, self._cache))
            except (OSError, ValueError):
                raise
            except Exception as error:  # a forged file
                raise ValueError(f"{', '.join(map(str, self.paths))} cannot be shown: {error!r}") from error
            self._files = stamps
            self._cache.end_round()
            self._looked = time.monotonic()

    @staticmethod
    def _encoded(data: str) -> bytes:
        digest = hashlib.sha256(data.encode()).hexdigest()
        return f'{{"digest":"{digest}","pages":{data}}}'.encode()

    def _stamps(self) -> dict[str, tuple[int, int]]:
        """Return file → time and size, for all files that may be read."""
        found = {}
        for path in self.paths:
            for file in files_at(path):
                try:
                    stat = file.stat()
                except OSError:  # removed meanwhile
                    continue
                found[str(file)] = (stat.st_mtime_ns, stat.st_size)
        return found


def _handler(watch: Watch) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "vsim", ""
        timeout = 30

        def handle(self) -> None:
            with suppress(ConnectionError):  # the browser no longer waits
                super().handle()

        def do_GET(self) -> None:
            if self.headers.get("Host") not in watch.hosts or self.headers.get_all("Host", [])[1:]:
                return self._send(403, "text/plain", b"another host\n")
            found = watch.answer(self.path)
            return self._send(404, "text/plain", b"not found\n") if found is None else self._send(200, *found)

        def _send(self, status: int, kind: str, content: bytes) -> None:
            self.send_response(status)
            for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    return Handler

"""Servers on loopback: one that never answers, a relay that can be cut, one that stores wandb views."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def silent_server() -> Iterator[str]:
    """The address of a server that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


class Relay:
    """Passes connections on to `target` (http://host:port) until `cut()`; from then on everything hangs."""

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("http://").split(":")
        self._target = (host, int(port))
        self._cut = threading.Event()
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._cut.set()

    def close(self) -> None:
        self._closed.set()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self._closed.is_set():
                client, _ = self._listener.accept()
                threading.Thread(target=self._pump, args=(client,), daemon=True).start()

    def _pump(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(self._target) as upstream:
            other = {client: upstream, upstream: client}
            while not self._closed.is_set():
                for side in select.select(list(other), [], [], 0.1)[0]:
                    data = side.recv(65536)
                    if not data:
                        return
                    if not self._cut.is_set():
                        other[side].sendall(data)


@contextmanager
def graphql_server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a server that lets anybody in and keeps views, and the list of the views it was given."""
    views: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            data: dict[str, Any] = {"viewer": {"id": "1", "username": "somebody", "entity": "somebody"}}
            if "upsertView" in request["query"]:
                views.append(request["variables"])
                data = {"upsertView": {"view": {"id": "2", "name": "nw-abcdefghijk-v"}, "inserted": True}}
            body = json.dumps({"data": data}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", views
        server.shutdown()

"""A server on loopback for tests: the real application under uvicorn, in a thread."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import httpx
import uvicorn

from draftwood.server.app import create_app
from draftwood.server.service import Service, Settings


class Serving:
    """A running server."""

    def __init__(self, service: Service, url: str, server: uvicorn.Server) -> None:
        self.service = service
        self.url = url
        self.server = server
        self.http = httpx.Client(base_url=url, timeout=60)

    @property
    def runner(self):
        return self.service.runner

    def post(self, path: str, body: dict, **more) -> httpx.Response:
        return self.http.post(path, json=body, **more)

    def complete(self, **body) -> dict:
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        return response.json()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over the samples that have these labels."""
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            head, _, value = line.rpartition(" ")
            if head.partition("{")[0] == f"draftwood:{name}" and all(f'{k}="{v}"' in head for k, v in labels.items()):
                total += float(value)
        return total


def until(condition, seconds: float = 10.0) -> None:
    """Wait for a condition that another thread brings about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


@contextlib.contextmanager
def serving(load, ready: bool = True, **settings):
    """Serve what `load` returns, and end it; `ready`: wait until it has loaded."""
    holder: dict[str, Service] = {}
    listener = socket.create_server(("127.0.0.1", 0))
    begun = threading.Event()

    def work() -> None:
        service = holder["service"] = Service(Settings(**{"names": ("nano",), **settings}), load)
        config = uvicorn.Config(create_app(service), log_level="critical", timeout_graceful_shutdown=2, lifespan="on")
        holder["server"] = server = uvicorn.Server(config)
        begun.set()
        server.run(sockets=[listener])

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert begun.wait(30)
        until(lambda: holder["server"].started)
        if ready:
            until(lambda: holder["service"].runner.phase == "ready", 60)
        yield Serving(holder["service"], f"http://127.0.0.1:{listener.getsockname()[1]}", holder["server"])
    finally:
        holder["server"].should_exit = True
        thread.join(30)
    assert not thread.is_alive()

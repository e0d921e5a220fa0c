"""Serve the model over HTTP with OpenAI's API: chat and completions at http://HOST:PORT/v1."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from draftwood import env, ranks
from draftwood.config import Options, Plan, add_options, options_from
from draftwood.errors import ConfigError, DraftwoodError
from draftwood.plan import NOT_LOADED

if TYPE_CHECKING:
    from draftwood.llm import LLM
    from draftwood.server.service import Service, Settings

SWITCH_SECONDS = 0.0005
"""How long a Python thread may keep the others waiting: the engine's thread is asked for every token."""
LOGGING: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "%(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "plain", "stream": "ext://sys.stderr"}},
    "loggers": {
        "uvicorn": {"handlers": ["stderr"], "level": "WARNING", "propagate": False},
        "uvicorn.access": {"handlers": ["stderr"], "level": "INFO", "propagate": False},
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to listen, whom to serve, and all options of the engine."""
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1; 0.0.0.0: all)")
    group.add_argument("--port", type=int, default=8000, help="port to listen on, 0: any free one (default 8000)")
    group.add_argument(
        "--api-key", action="append", default=None, metavar="KEY",
        help="key that requests must bear; may be given again (default: DRAFTWOOD_API_KEY, else none)",
    )  # fmt: skip
    group.add_argument(
        "--served-model-name", nargs="+", default=None, metavar="NAME", help="names of the model (default: MODEL)"
    )
    group.add_argument("--max-queue", type=int, default=256, help="most requests that wait (default 256)")
    group.add_argument(
        "--max-request-bytes", type=int, default=None, help="largest body (default: what the context holds, generously)"
    )
    group.add_argument(
        "--shutdown-timeout", type=float, default=30.0, help="seconds for open answers after SIGTERM (default 30)"
    )
    group.add_argument(
        "--sse-keep-alive", type=float, default=10.0, help="seconds of silence before a stream sends a comment (default 10)"
    )
    group.add_argument(
        "--allowed-origins", nargs="+", default=(), metavar="ORIGIN", help="web pages that may call (default: none)"
    )
    group.add_argument("--access-log", action="store_true", help="write a line for each request to stderr")
    add_options(parser)
    parser.set_defaults(enable_prefix_caching=True)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; return 0, or 1 when the engine failed."""
    options = options_from(args)
    settings = _settings(args, options)
    code = ranks.start(args, options, drains=True)
    if code is not None:
        return code
    if not ranks.is_first():
        return _follow(options)
    with _bind(args.host, args.port) as listener:
        return _serve(settings, options, listener, args.access_log)


def _settings(args: argparse.Namespace, options: Options) -> Settings:
    try:
        from draftwood.server.service import Settings
    except ImportError as error:
        raise ConfigError(f"serving needs {error.name}; pip install 'draftwood[serve]'") from None
    for flag, low in (("max_queue", 0), ("shutdown_timeout", 0), ("sse_keep_alive", 0.01), ("max_request_bytes", 1024)):
        value = getattr(args, flag)
        if value is not None and not low <= value < 1 << 40:
            raise ConfigError(f"--{flag.replace('_', '-')} {value} is below {low} or absurdly large; choose another")
    keys = args.api_key if args.api_key is not None else [k for k in [env.read("DRAFTWOOD_API_KEY")] if k]
    if not all(keys):
        raise ConfigError("--api-key is empty; give a key or leave the flag out")
    name = Path(options.model).name if Path(options.model).is_dir() else options.model
    return Settings(
        names=tuple(args.served_model_name or [name or options.model]),
        api_keys=tuple(keys),
        max_queue=args.max_queue,
        max_request_bytes=args.max_request_bytes,
        keep_alive=args.sse_keep_alive,
        shutdown_timeout=args.shutdown_timeout,
        origins=tuple(args.allowed_origins),
    )


def _load(options: Options) -> LLM:
    from draftwood.llm import LLM

    llm = LLM(options)
    llm.warm()
    return llm


def _follow(options: Options) -> int:
    with _load(options) as llm:
        llm.follow()
    return 0


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises ConfigError where that is not possible."""
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"--port {port} is outside 0..65535; choose a port in that range")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; choose another --host or --port") from None
    return listener


def _serve(settings: Settings, options: Options, listener: socket.socket, access_log: bool) -> int:
    import uvicorn

    from draftwood.server.app import create_app
    from draftwood.server.service import Service

    sys.setswitchinterval(SWITCH_SECONDS)
    service = Service(settings, lambda: _load(options))
    config = uvicorn.Config(
        create_app(service),
        log_config=LOGGING,
        access_log=access_log,
        timeout_graceful_shutdown=5,
        server_header=False,
        lifespan="on",
    )

    class Server(uvicorn.Server):
        """Signals begin to drain; a second one ends at once."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            self.asked += 1
            if self.asked > 1:
                self.should_exit = self.force_exit = True

        asked = 0

    server = Server(config)
    return asyncio.run(_until_end(server, service, listener))


async def _until_end(server: Any, service: Service, listener: socket.socket) -> int:
    """Run the server until a signal or the engine's end; return the exit code."""
    runner = service.runner
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    _say(f"listening on {_address(listener)}, loading {service.settings.names[0]}")
    told = False
    while not serving.done() and not server.asked and not runner.ended.is_set():
        if runner.ready.is_set() and not told:
            told = True
            _say_notes(runner.llm.plan if runner.llm is not None else None)
            _say(f"ready: {_address(listener)}/v1")
        await asyncio.sleep(0.05)
    if server.asked and not runner.ended.is_set():
        if not runner.ready.is_set():  # nothing is open, and loading cannot be told to end
            _leave("leaving while the model loads", 0)
        _say(f"shutting down: {len(runner.open)} open, at most {service.settings.shutdown_timeout:g} s")
        drained = asyncio.create_task(runner.drain(service.settings.shutdown_timeout))
        while not drained.done() and server.asked < 2:
            await asyncio.sleep(0.02)
        drained.cancel()
    server.should_exit = True
    await serving
    if not runner.ended.is_set():
        _leave("the engine does not end; leaving it", 1)
    return _exit_code(runner.error)


def _leave(why: str, code: int) -> NoReturn:
    """End the process at once: its engine's thread would not let it end orderly."""
    _say(why)
    os._exit(code)


def _say_notes(plan: Plan | None) -> None:
    """Say where the plan is not what was asked for, or not what might be expected."""
    for note in plan.notes if plan is not None else ():
        if note != NOT_LOADED:  # that was asked for
            _say(f"note: {note}")


def _exit_code(error: BaseException | None) -> int:
    """Raise what ended the engine, as it is: errors for people are one line, others need their traceback."""
    if error is None:
        return 0
    if not isinstance(error, DraftwoodError):
        _say("the engine failed:")
    raise error


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _say(text: str) -> None:
    print(f"draftwood serve: {text}", file=sys.stderr, flush=True)

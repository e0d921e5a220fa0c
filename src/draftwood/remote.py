"""A server elsewhere that speaks OpenAI's API: its address, its key, the model it serves."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from dataclasses import dataclass
from typing import Any

from draftwood.config import Options
from draftwood.errors import ConfigError

OURS = "draftwood"
"""What our own servers say owns the model; they take more fields than OpenAI's."""
DONE = "[DONE]"
"""What the last event of an answer's stream holds."""


@dataclass(frozen=True)
class Remote:
    """Where requests go, without "/v1", and what they bear and ask for. `ours`: the server is one of this project's."""

    url: str
    headers: dict[str, str]
    model: str
    ours: bool


def add_arguments(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Add the flags that name a server; `purpose` says what happens without them."""
    group = parser.add_argument_group("server elsewhere")
    group.add_argument("--base-url", metavar="URL", help=f"server to use, as in http://127.0.0.1:8000 (default: {purpose})")
    group.add_argument("--api-key", metavar="KEY", help="key of the server at --base-url")
    group.add_argument("--served-model-name", metavar="NAME", help="model to ask for there (default: the first that it lists)")


def event(line: str) -> str | None:
    """Return what a line of an answer's stream holds: JSON or DONE; None for comments and what lies between events."""
    return line[5:].strip() if line.startswith("data:") else None


def needs(*packages: str, command: str) -> None:
    """Raise ConfigError unless the packages are installed; all are in the extra `serve`."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{command} needs {package}; pip install 'draftwood[serve]'")


def connect(args: argparse.Namespace, **defaults: Any) -> Remote:
    """Find the server at --base-url; `defaults` are the command's own of flags of Options.

    Raises ConfigError where there is none, and for flags that only a model here could obey.
    """
    for f in dataclasses.fields(Options):
        value, default = getattr(args, f.name, None), defaults.get(f.name, f.default)
        positional = f.metadata.get("positional")
        # MODEL and switches come with their defaults, of other flags None says that they were not given.
        if value is not None and (value != default or not positional and not isinstance(value, bool)):
            flag = "MODEL" if positional else f"--{f.name.replace('_', '-')}"
            raise ConfigError(f"{flag} has no effect on the server at --base-url; leave it out, or leave --base-url out")
    if not args.base_url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url {args.base_url!r} is no address; write it as http://HOST:PORT")
    return find(args.base_url.rstrip("/").removesuffix("/v1"), args.api_key, args.served_model_name)


def absent(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that only a server at --base-url could obey, where none is given."""
    for flag, value in (("--api-key", args.api_key), ("--served-model-name", args.served_model_name)):
        if value is not None:
            raise ConfigError(f"{flag} is for a server elsewhere; give its address with --base-url, or leave {flag} out")


def find(url: str, key: str | None = None, name: str | None = None) -> Remote:
    """Ask the server at `url` for its models. Raises ConfigError when it does not answer as one."""
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(f"{url}/v1/models", headers=headers, timeout=30, trust_env=False)
        response.raise_for_status()
        models: list[dict[str, Any]] = response.json()["data"]
        return Remote(url, headers, name or str(models[0]["id"]), models[0].get("owned_by") == OURS)
    except httpx.HTTPStatusError as error:
        raise ConfigError(f"{url}/v1/models answers {error.response.status_code}; check --base-url and --api-key") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError, AttributeError) as error:
        why = str(error) or type(error).__name__
        raise ConfigError(f"no model could be read from {url}/v1/models ({why}); start the server or check --base-url") from None

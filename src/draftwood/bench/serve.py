"""Measure a server under load: throughput, TTFT, TPOT, ITL and latency percentiles, acceptance.

Without --base-url the model is served for the length of the benchmark; with it, any OpenAI-compatible server is measured.
Each concurrency and each rate is one run over the same prompts. Results have vLLM's keys (`vllm bench serve`), one object a run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from draftwood import remote, report, samples
from draftwood.config import add_options, options_from
from draftwood.errors import ConfigError

if TYPE_CHECKING:
    import httpx

    from draftwood.bench.load import Answer, Load, Result
    from draftwood.remote import Remote

TIMES = {"ttft": "TTFT ms", "tpot": "TPOT ms", "itl": "ITL ms", "e2el": "E2E ms"}
COLUMNS = ("run", "done", "failed", "req/s", "tok/s", *(c for name in TIMES.values() for c in (name, "p99")), "accept")
_SPEC = ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `draftwood bench serve`."""
    group = parser.add_argument_group("bench")
    group.add_argument("--endpoint", choices=("chat", "completions"), default="chat", help="API to use (default chat)")
    group.add_argument("--concurrency", default="1,4,16", help="requests open together, a run each (default 1,4,16; none: '')")
    group.add_argument("--request-rate", default="", help="arrivals per second, a run each, with commas (default: none)")
    group.add_argument("--num-prompts", type=int, default=64, help="requests of a run (default 64)")
    group.add_argument("--num-warmups", type=int, default=2, help="requests before the first run, not counted (default 2)")
    group.add_argument("--dataset", type=Path, metavar="FILE", help='JSON lines with "prompt" or "messages" (default: built in)')
    group.add_argument("--max-tokens", type=int, default=64, help="most tokens of an answer (default 64)")
    group.add_argument("--ignore-eos", action="store_true", help="answers always have --max-tokens tokens")
    group.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default 0)")
    group.add_argument("--seed", type=int, default=1, help="seed of arrivals and of the first request (default 1)")
    group.add_argument("--timeout", type=float, default=600.0, help="seconds until a silent request counts as failed (default 600)")
    group.add_argument(
        "--ready-check-timeout-sec", type=float, default=600.0, metavar="SECONDS",
        help="how long to wait for a server that still loads, 0: not at all (default 600)",
    )  # fmt: skip
    group.add_argument(
        "--save-result", type=Path, metavar="FILE", help="write a line of JSON a run, with every request's times and text"
    )
    group.add_argument("--json", action="store_true", help="end with one line of JSON")
    remote.add_arguments(parser, "serve MODEL meanwhile")
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; return 1 if a request failed."""
    remote.needs("httpx", "prometheus_client", command="bench serve")
    if args.base_url is None:
        remote.absent(args)
    loads = parse_loads(args.concurrency, args.request_rate)
    bodies = _bodies(args)
    with _server(args) as server:
        results = asyncio.run(_measure(args, server, loads, bodies))
    report.show(report.table(COLUMNS, [_cells(r) for r in results]))
    for error in dict.fromkeys(e for r in results for e in r["errors"] if e):
        report.note(f"failed: {error}")
    if args.save_result is not None:
        _save(args.save_result, results)
    if args.json:
        report.show(report.json_line({"runs": [{k: v for k, v in r.items() if not isinstance(v, list)} for r in results]}))
    return int(any(r["failed"] for r in results))


def parse_loads(concurrency: str, rates: str) -> list[Load]:
    """Return the runs. Raises ConfigError for text that is no list of numbers, and where nothing is left to run."""
    from draftwood.bench.load import Load

    found = [Load(n, None) for n in (report.numbers("--concurrency", concurrency, int, 1, 4096) if concurrency else ())]
    found += [Load(None, rate) for rate in (report.numbers("--request-rate", rates, float, 1e-3, 1e5) if rates else ())]
    if not found:
        raise ConfigError("--concurrency and --request-rate are both empty; give at least one number")
    return found


def _bodies(args: argparse.Namespace) -> list[dict[str, Any]]:
    for flag, value, low, most in (
        ("--num-prompts", args.num_prompts, 1, 1_000_000), ("--num-warmups", args.num_warmups, 0, 10_000),
        ("--max-tokens", args.max_tokens, 1, 1 << 20), ("--timeout", args.timeout, 0.1, 1e6),
        ("--temperature", args.temperature, 0, 2), ("--ready-check-timeout-sec", args.ready_check_timeout_sec, 0, 1e6),
    ):  # fmt: skip
        if not low <= value <= most:
            raise ConfigError(f"{flag} {value} is outside {low}..{most}; choose a value in that range")
    prompts = _built_in(args.endpoint) if args.dataset is None else read_dataset(args.dataset, args.endpoint)
    common = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    if args.ignore_eos:
        common["ignore_eos"] = True
    return [{**prompts[i % len(prompts)], **common, "seed": args.seed + i} for i in range(args.num_prompts)]


def _built_in(endpoint: str) -> list[dict[str, Any]]:
    if endpoint == "chat":
        return [{"messages": [{"role": "user", "content": s.text}]} for s in samples.SAMPLES]
    return [{"prompt": s.text} for s in samples.SAMPLES]


def read_dataset(file: Path, endpoint: str) -> list[dict[str, Any]]:
    """Return what each line asks. Raises ConfigError naming the line that cannot be used."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset {file} cannot be read: {error}; give a file of JSON lines") from None
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError:
            item = None
        item = item if isinstance(item, dict) else {}
        prompt, messages = item.get("prompt"), item.get("messages")
        if isinstance(messages, list) and endpoint == "chat":
            found.append({"messages": messages})
        elif isinstance(prompt, str):
            found.append({"messages": [{"role": "user", "content": prompt}]} if endpoint == "chat" else {"prompt": prompt})
        else:
            wanted = '"prompt" or "messages"' if endpoint == "chat" else '"prompt"'
            raise ConfigError(f"--dataset {file} line {number} is no JSON object with {wanted}; write one on each line")
    if not found:
        raise ConfigError(f"--dataset {file} holds no prompts; write a JSON object on each line")
    return found


@contextlib.contextmanager
def _server(args: argparse.Namespace) -> Iterator[Remote]:
    """The server to measure; without --base-url, one that runs as long as the context."""
    if args.base_url is not None:
        yield remote.connect(args)
        return
    from draftwood.bench.local import served

    with served(options_from(args)) as url:
        yield remote.find(url)


async def _measure(
    args: argparse.Namespace, server: Remote, loads: Sequence[Load], bodies: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    import httpx

    from draftwood.bench.load import CHAT, COMPLETIONS, ready
    from draftwood.bench.load import run as run_load

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    path = CHAT if args.endpoint == "chat" else COMPLETIONS
    asked = [{**body, "model": server.model} for body in bodies]
    results = []
    async with httpx.AsyncClient(
        base_url=server.url, headers=server.headers, timeout=args.timeout, limits=limits, trust_env=False
    ) as client:
        if args.ready_check_timeout_sec:
            await ready(client, args.ready_check_timeout_sec)
        with report.progress(args.num_warmups + len(loads) * len(asked), "bench serve", " requests") as bar:
            if args.num_warmups:
                warm = [asked[i % len(asked)] for i in range(args.num_warmups)]
                await run_load(client, path, warm, dataclasses.replace(loads[0], concurrency=1, rate=None), args.seed, bar.update)
            for load in loads:
                before = await _counters(client)
                result = await run_load(client, path, asked, load, args.seed, bar.update)
                results.append(summary(result, server.model, path, acceptance(before, await _counters(client))))
    return results


async def _counters(client: httpx.AsyncClient) -> dict[str, float]:
    """The server's counters of drafts, summed over labels, whatever prefix its metrics have; empty where it has none."""
    import httpx
    from prometheus_client.parser import text_string_to_metric_families

    try:
        response = await client.get("/metrics")
    except httpx.HTTPError:
        return {}
    found: dict[str, float] = {}
    try:
        families = list(text_string_to_metric_families(response.text)) if response.status_code == 200 else []
    except ValueError:  # a page of something else
        return {}
    for sample in (sample for family in families for sample in family.samples):
        name = sample.name.rpartition(":")[2].removesuffix("_total")
        if name in _SPEC:
            found[name] = found.get(name, 0.0) + sample.value
    return found


def acceptance(before: dict[str, float], after: dict[str, float]) -> dict[str, float | None]:
    """What the server's counters say of drafts between two readings; None of nothing."""
    drafts, tokens, accepted = (after.get(name, 0.0) - before.get(name, 0.0) for name in _SPEC)
    known = drafts > 0 and tokens > 0
    return {
        "spec_decode_acceptance_length": 1 + accepted / drafts if known else None,
        "spec_decode_acceptance_rate": 100 * accepted / tokens if known else None,
        "spec_decode_num_drafts": int(drafts) if known else None,
        "spec_decode_draft_tokens": int(tokens) if known else None,
        "spec_decode_accepted_tokens": int(accepted) if known else None,
    }


def summary(result: Result, model: str, path: str, accepted: dict[str, float | None]) -> dict[str, Any]:
    """Return a run with the keys of `vllm bench serve`; lists are by request, `accepted` as from `acceptance`."""
    good = [a for a in result.answers if not a.error]
    inputs, outputs = sum(a.prompt_tokens for a in good), sum(a.completion_tokens for a in good)
    load, seconds = result.load, result.seconds
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"), "backend": "openai-chat" if "chat" in path else "openai", "label": load.label,
        "model_id": model, "tokenizer_id": model, "num_prompts": len(result.answers), "request_rate": load.rate or "inf",
        "burstiness": 1.0, "max_concurrency": load.concurrency, "duration": seconds, "completed": len(good),
        "failed": len(result.answers) - len(good), "total_input_tokens": inputs, "total_output_tokens": outputs,
        "request_throughput": len(good) / seconds, "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds, "max_concurrent_requests": result.most_open,
        **_percentiles("ttft", [a.first for a in good]),
        **_percentiles("tpot", [a.per_token for a in good if a.per_token is not None]),
        **_percentiles("itl", [gap for a in good for gap in a.gaps]),
        **_percentiles("e2el", [a.latency for a in good]),
        **accepted,
        **_lists(result.answers),
    }  # fmt: skip


def _lists(answers: Sequence[Answer]) -> dict[str, list[Any]]:
    return {
        "input_lens": [a.prompt_tokens for a in answers], "output_lens": [a.completion_tokens for a in answers],
        "ttfts": [a.first for a in answers], "itls": [a.gaps for a in answers], "generated_texts": [a.text for a in answers],
        "errors": [a.error for a in answers],
    }  # fmt: skip


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, deviation and percentiles in milliseconds; None of nothing."""
    keys = [f"mean_{name}_ms", f"median_{name}_ms", f"std_{name}_ms", *(f"p{p}_{name}_ms" for p in (90, 95, 99))]
    if not seconds:
        return dict.fromkeys(keys)
    ms = 1e3 * np.asarray(seconds)
    values = [ms.mean(), np.median(ms), ms.std(), *np.percentile(ms, (90, 95, 99))]
    return {key: float(value) for key, value in zip(keys, values, strict=True) if math.isfinite(value)}


def _cells(r: dict[str, Any]) -> list[Any]:
    times = [r[f"{kind}_{name}_ms"] for name in TIMES for kind in ("mean", "p99")]
    return [
        r["label"], r["completed"], r["failed"], r["request_throughput"], r["output_throughput"], *times,
        r["spec_decode_acceptance_length"],
    ]  # fmt: skip


def _save(file: Path, results: Sequence[dict[str, Any]]) -> None:
    """Write one object a line, as `vllm bench serve --save-result` does for one run and with --append-result for more."""
    try:
        file.write_text("".join(report.json_line(result) + "\n" for result in results), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--save-result {file} cannot be written: {error.strerror}; the table above is the result") from None

"""What is measured, for Prometheus: vLLM's names under the prefix `draftwood:`, and the stages and trees of this engine.

Per-request values are observed on the event loop; the engine's own counts are read from its totals when scraped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from draftwood import __version__
from draftwood.engine.totals import Totals
from draftwood.server.runner import READY, Runner, Ticket, Update

PREFIX = "draftwood:"
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 320, 640)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
SIZES = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
MAX_FIELDS = 100
"""Unknown field names that get a label of their own; a client can invent any number."""


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self, runner: Runner, model: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model}
        self._fields: set[str] = set()
        self._first: dict[Ticket, float] = {}
        """Time of the first token and then of the latest one, by open ticket."""
        self.finished = self._counter("request_success", "Answers by how they ended.", ["finished_reason"])
        self.aborted = self._counter("request_aborts", "Answers whose client went away or whose server ended.")
        self.responses = self._counter("http_responses", "HTTP responses.", ["route", "status"])
        self.unknown = self._counter("unknown_fields", "Request fields that nobody knows, by name.", ["field"])
        self.generated = self._counter("generation_tokens", "Tokens of answers.")
        self.ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self.itl = self._histogram("inter_token_latency_seconds", "Between updates of an answer.", SECONDS)
        self.tpot = self._histogram("request_time_per_output_token_seconds", "Mean after the first token.", SECONDS)
        self.e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", SECONDS)
        self.queue = self._histogram("request_queue_time_seconds", "From arrival to the first step.", SECONDS)
        self.prefill = self._histogram("request_prefill_time_seconds", "From the first step to the first token.", SECONDS)
        self.decode = self._histogram("request_decode_time_seconds", "From the first token to the last.", SECONDS)
        self.prompts = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.answers = self._histogram("request_generation_tokens", "Tokens of an answer.", TOKENS)
        self.asked = self._histogram("request_params_max_tokens", "max_tokens of a request.", TOKENS)
        self.registry.register(_Engine(runner, model))

    def _counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(PREFIX + name, help, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(PREFIX + name, help, ["model_name"], registry=self.registry, buckets=buckets)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def responded(self, route: str, status: int) -> None:
        """Count a response."""
        self.responses.labels(**self._labels, route=route, status=str(status)).inc()

    def saw_unknown(self, names: Sequence[str]) -> None:
        """Count fields that nobody knows."""
        for name in names:
            label = name if name.isascii() and name.isprintable() and len(name) <= 64 else "(odd name)"
            if label not in self._fields and len(self._fields) >= MAX_FIELDS:
                label = "(more names)"
            self._fields.add(label)
            self.unknown.labels(**self._labels, field=label).inc()

    def observe(self, ticket: Ticket, update: Update) -> None:
        """Take note of an update of an answer."""
        labels, tokens = self._labels, update.delta.token_ids if update.delta is not None else []
        if tokens:
            self.generated.labels(**labels).inc(len(tokens))
            before = self._first.get(ticket)
            if before is None:
                self.ttft.labels(**labels).observe(max(0.0, update.time - ticket.created))
                self._first_token(ticket, update)
            else:
                self.itl.labels(**labels).observe(max(0.0, update.time - before))
            self._first[ticket] = update.time
        if update.last:
            self._end(ticket, update)

    def _first_token(self, ticket: Ticket, update: Update) -> None:
        started, labels = update.usage.started, self._labels
        self.queue.labels(**labels).observe(max(0.0, started - ticket.created))
        self.prefill.labels(**labels).observe(max(0.0, update.time - started))
        self.prompts.labels(**labels).observe(len(ticket.ids))
        if ticket.params.max_tokens is not None:
            self.asked.labels(**labels).observe(ticket.params.max_tokens)
        ticket.first = update.time

    def _end(self, ticket: Ticket, update: Update) -> None:
        labels, usage = self._labels, update.usage
        self._first.pop(ticket, None)
        if update.error is not None:
            self.aborted.labels(**labels).inc()
            return
        self.finished.labels(**labels, finished_reason=update.finish_reason or "").inc()
        self.e2e.labels(**labels).observe(update.time - ticket.created)
        self.answers.labels(**labels).observe(usage.completion_tokens)
        decoding = max(0.0, update.time - ticket.first)
        self.decode.labels(**labels).observe(decoding)
        if usage.completion_tokens > 1:
            self.tpot.labels(**labels).observe(decoding / (usage.completion_tokens - 1))

    def left(self, ticket: Ticket) -> None:
        """Take note that nobody waits for an answer any more."""
        self._first.pop(ticket, None)
        self.aborted.labels(**self._labels).inc()


class _Engine(Collector):
    """Reads the engine's state and totals when scraped."""

    def __init__(self, runner: Runner, model: str) -> None:
        self._runner = runner
        self._model = model

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily(PREFIX + "build_info", "Version of the server.", labels=["model_name", "version"])
        info.add_metric([self._model, __version__], 1)
        yield info
        yield self._gauge("ready", "1 when requests are taken.", self._runner.phase == READY)
        yield self._gauge("num_requests_open", "Requests whose answers have not ended.", len(self._runner.open))
        llm = self._runner.llm
        if llm is None:
            return
        state = llm.state()
        yield self._gauge("num_requests_running", "Requests that hold a row of the engine.", state.running)
        waiting = max(0, len(self._runner.open) - state.running)
        yield self._gauge("num_requests_waiting", "Requests that wait for a row or for pages.", waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the pages that requests hold.", 1 - state.free_pages / state.pages)
        yield self._gauge("kv_cache_pages", "Pages of the cache.", state.pages)
        yield self._count("num_preemptions", "Requests that gave up their pages to older ones.", state.preemptions)
        yield from self._totals(state.totals)

    def _totals(self, totals: Totals) -> Iterator[Metric]:
        # One reading of the lists, so that the sums below belong together.
        accepted, trees = list(totals.accepted), list(totals.trees)
        drafts = sum(depth * count for depth, count in enumerate(accepted))
        nodes = sum(size * count for size, count in enumerate(trees))
        yield self._count("prompt_tokens", "Prompt tokens computed.", totals.prompt_tokens)
        yield self._count("prefix_cache_queries", "Prompt tokens looked for in the prefix cache.", totals.prefix_queries)
        yield self._count("prefix_cache_hits", "Prompt tokens found in the prefix cache.", totals.prefix_hits)
        yield self._count("decoded_tokens", "Tokens that row-steps returned, before stops and limits.", totals.decoded)
        yield self._count("steps", "Forwards of the target.", totals.steps)
        yield self._count("row_steps", "Forwards of the target, counted for each decoding row.", totals.row_steps)
        yield self._count("spec_decode_num_drafts", "Trees with nodes beyond the root.", totals.drafted)
        yield self._count("spec_decode_num_draft_tokens", "Tree nodes beyond the root.", nodes)
        yield self._count("spec_decode_num_accepted_tokens", "Accepted tree nodes beyond the root.", drafts)
        name = PREFIX + "spec_decode_num_accepted_tokens_per_pos"
        by_depth = CounterMetricFamily(name, "Accepted tree nodes by depth, from 0.", labels=["model_name", "position"])
        for depth in range(1, len(accepted)):
            by_depth.add_metric([self._model, str(depth - 1)], sum(accepted[depth:]))
        yield by_depth
        stages = CounterMetricFamily(PREFIX + "stage_seconds", "Time in each stage.", labels=["model_name", "stage"])
        for stage, seconds in totals.stage_seconds.items():
            stages.add_metric([self._model, stage], seconds)
        yield stages
        yield self._sizes("tree_nodes", "Tree nodes beyond the root of a row-step.", trees)
        yield self._sizes("accepted_nodes", "Accepted nodes beyond the root of a row-step.", accepted)

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, help, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _count(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, help, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _sizes(self, name: str, help: str, counts: list[int]) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, help, labels=["model_name"])
        buckets = [(str(float(limit)), float(sum(counts[: limit + 1]))) for limit in SIZES if limit < len(counts)]
        buckets.append(("+Inf", float(sum(counts))))
        family.add_metric([self._model], buckets, sum(size * count for size, count in enumerate(counts)))
        return family

"""`jaxinfer bench serve`: serve a workload in this process and tell latencies, throughput and the bottleneck."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from jaxinfer.cli._errors import UserMistake, user_mistakes
from jaxinfer.cli._options import add_engine_options, add_model, engine_options
from jaxinfer.cli._parser import Parser, port
from jaxinfer.cli._recording import check_outputs
from jaxinfer.cli._workload import (
    add_result_options,
    add_workload_options,
    read_slo,
    read_workload,
    show_run,
)
from jaxinfer.core.observer import Observer, Observers, unobserved

if TYPE_CHECKING:
    from jaxinfer.core.workload import Workload
    from jaxinfer.engine import Engine

_ABOUT = """Serve a workload in this process, in real time: requests that come by a Poisson process, in bursts, all at
once or in a closed loop, of random tokens or from a file. Tells TTFT (from arrival), ITL (between tokens), TPOT and
end-to-end time, throughput, goodput, KV utilization, preemptions and cache hits, and names the bottleneck. Loading,
compiling and a warm-up come before; the cache is empty at the beginning. Runs with the same workload hash did the same
work."""


def add_parser(kinds: argparse._SubParsersAction) -> None:
    """Declare the measurement."""
    parser: Parser = kinds.add_parser("serve", help="latencies and throughput of a workload", description=_ABOUT)
    add_model(parser)
    add_workload_options(parser)
    add_result_options(parser)
    parser.add_argument(
        "--metrics-port",
        type=port,
        metavar="N",
        help="serve Prometheus metrics on http://127.0.0.1:N/metrics while the workload runs",
    )
    add_engine_options(parser)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Serve, measure and print."""
    from jaxinfer.cli._quiet import native_messages_held
    from jaxinfer.cli._serving import require_device, scheduler_facts
    from jaxinfer.engine.report import SECONDS
    from jaxinfer.engine.serve_bench import measure_serving

    read_slo(options)  # a mistake here must not wait for the run
    check_outputs(options)
    with _metrics_served(options) as metrics:
        device, observers = require_device(), Observers()
        with native_messages_held():
            engine, workload = _prepare(options, observers)
        measured = measure_serving(engine, observers, workload, also=metrics)
    if len(measured.refused) == len(workload.requests):
        raise UserMistake(f"Every request was refused, the first with: {measured.refused[0]}")
    facts = [
        ("model", options.model),
        ("device", device.device_kind),
        ("workload", workload.hash),
        *scheduler_facts(measured.config),
    ]
    if measured.refused:
        facts.append(("refused", str(len(measured.refused))))
    title = f"Serving of {len(workload.requests)} requests"
    show_run(options, title, facts, measured.timeline, measured.config, SECONDS)
    return 0


@contextmanager
def _metrics_served(options: argparse.Namespace) -> Iterator[Observer]:
    """An observer whose metrics are on --metrics-port until the block ends."""
    if options.metrics_port is None:
        yield unobserved
        return
    try:
        from prometheus_client import CollectorRegistry, start_http_server

        from jaxinfer.engine.metrics import PrometheusMetrics
    except ImportError:
        raise UserMistake("--metrics-port needs prometheus-client; pip install 'jaxinfer[metrics]'.") from None
    registry = CollectorRegistry()
    with user_mistakes():
        server, thread = start_http_server(options.metrics_port, addr="127.0.0.1", registry=registry)
    try:
        yield PrometheusMetrics(options.model, registry)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _prepare(options: argparse.Namespace, observer: Observer) -> tuple[Engine, Workload]:
    """The engine, and the workload in its model's tokens."""
    from checkpoints import open_checkpoint, progress_bar
    from jaxinfer.engine.build import build_engine
    from jaxinfer.runtime.loading import decoder_config

    given = engine_options(options)
    with progress_bar() as progress, user_mistakes():
        with open_checkpoint(options.model, progress=progress) as checkpoint:
            config = decoder_config(checkpoint, dtype=given.dtype, kv_dtype=given.kv_dtype, attention=given.attention)
            workload = read_workload(options, config.vocab_size, checkpoint.tokenizer().encode)
            fitting = [request.positions for request in workload.requests if request.positions <= config.max_positions]
            if not fitting:
                raise UserMistake(f"Every request is longer than the {config.max_positions} positions of the model.")
            # A hub model is opened again by its directory, so that the hub is asked once.
            source = options.model if checkpoint.directory is None else str(checkpoint.directory)
        settings = engine_options(options, max_context=max(fitting))
        return build_engine(source, settings, progress, observer), workload

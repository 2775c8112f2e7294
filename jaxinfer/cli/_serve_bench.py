"""`jaxinfer bench serve`: serve a workload in this process and tell latencies, throughput and the bottleneck."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from jaxinfer.cli._errors import UserMistake, user_mistakes
from jaxinfer.cli._options import add_engine_options, add_model, engine_options
from jaxinfer.cli._parser import Parser
from jaxinfer.cli._workload import (
    add_result_options,
    add_workload_options,
    check_outputs,
    read_slo,
    read_workload,
    show_run,
)

if TYPE_CHECKING:
    from jaxinfer.core.workload import Workload
    from jaxinfer.engine import Engine
    from jaxinfer.engine.build import EngineOptions

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
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve, measure and print."""
    from jaxinfer.cli._quiet import native_messages_held
    from jaxinfer.cli._serving import require_device
    from jaxinfer.engine.report import SECONDS
    from jaxinfer.engine.serve_bench import measure_serving

    read_slo(options)  # a mistake here must not wait for the run
    check_outputs(options)
    device = require_device()
    with native_messages_held():
        engine, settings, workload = _prepare(options)
    measured = measure_serving(engine, settings, workload)
    if len(measured.refused) == len(workload.requests):
        raise UserMistake(f"Every request was refused, the first with: {measured.refused[0]}")
    facts = [
        ("model", options.model),
        ("device", device.device_kind),
        ("workload", workload.hash),
        ("slots", str(measured.config.max_slots)),
        ("KV pages", f"{measured.config.num_pages - 1} of {measured.config.page_size} positions"),
    ]
    if measured.refused:
        facts.append(("refused", str(len(measured.refused))))
    title = f"Serving of {len(workload.requests)} requests"
    show_run(options, title, facts, measured.timeline, measured.config, SECONDS)
    return 0


def _prepare(options: argparse.Namespace) -> tuple[Engine, EngineOptions, Workload]:
    """The engine, what it was built with, and the workload in its model's tokens."""
    from checkpoints import open_checkpoint
    from jaxinfer.cli._progress import progress_bars
    from jaxinfer.engine.build import build_engine
    from jaxinfer.runtime.loading import decoder_config

    given = engine_options(options)
    with progress_bars() as progress, user_mistakes():
        with open_checkpoint(options.model, progress=progress) as checkpoint:
            config = decoder_config(checkpoint, dtype=given.dtype, kv_dtype=given.kv_dtype, attention=given.attention)
            workload = read_workload(options, config.vocab_size, checkpoint.tokenizer().encode)
            # A hub model is opened again by its directory, so that the hub is asked once.
            source = options.model if checkpoint.directory is None else str(checkpoint.directory)
        settings = engine_options(options, max_context=workload.longest)
        return build_engine(source, settings, progress), settings, workload

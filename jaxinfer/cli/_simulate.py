"""`jaxinfer simulate`: serve a workload by the real scheduler on a clock instead of a device."""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING, Any

from jaxinfer.cli._errors import UserMistake, user_mistakes
from jaxinfer.cli._parser import Parser, number, positive, refuse_without_effect
from jaxinfer.cli._plan import add_config_source, read_decoder
from jaxinfer.cli._recording import (
    check_outputs,
    write_files,
)
from jaxinfer.cli._tables import print_table
from jaxinfer.cli._workload import (
    add_result_options,
    add_workload_options,
    read_slo,
    read_workload,
    show_run,
)
from jaxinfer.core.latency import Capacity, summarize
from jaxinfer.core.pool import ROOM_FOR_CACHE
from jaxinfer.core.scheduler import SchedulerConfig
from jaxinfer.core.scheduling_example import ExampleRun, example_config, first_and_last_tick, run_all, tick_rows
from jaxinfer.core.simulator import Simulator, StepSeconds, one_tick
from jaxinfer.core.timeline import TimelineRecorder

if TYPE_CHECKING:
    from jaxinfer.models import DecoderConfig
    from jaxinfer.runtime.chips import Target

_ABOUT = """Serve a workload by the real scheduler and page pool on a clock, without a device: with --steps at the step
times that `jaxinfer bench steps --json` measured, with --target at the least times by the datasheet of a chip, else a
tick for each round. --example shows three requests tick by tick under every combination of static waves or continuous
batching, whole or chunked prefill, with or without a prefix cache; its --report has all of them,
its --trace the last."""
_PREFILL_ROWS = 8
_MOST_PAGES = 10_000_000
"""Their records take about 1 GB."""
_OF_TARGET = ("model", "config", "dtype", "kv_dtype", "weight_dtype", "tp", "floor_ratio")
_OF_EXAMPLE = ("example", "trace", "report", "json", "run", "parser")
_TICK_COLUMNS = ("tick", "A", "B", "C", "tokens", "pages held", "cached")


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser: Parser = commands.add_parser(
        "simulate",
        help="serve a workload on a clock: schedules and latencies of chips that are not here",
        description=_ABOUT,
    )
    parser.add_argument("--example", action="store_true", help="show the scheduling example tick by tick")
    times = parser.add_argument_group("step times")
    times.add_argument("--steps", metavar="FILE", help="measured by `jaxinfer bench steps --json`")
    times.add_argument(
        "--target", metavar="CHIP-N", help="of a chip: v5e-1, v6e-4, h100, ... (with --model or --config)"
    )
    times.add_argument("--tp", type=positive, metavar="N", help="devices of the target (all)")
    times.add_argument(
        "--floor-ratio", type=number, default=1.0, metavar="X", help="times the least time of the target (1)"
    )
    add_config_source(times)
    engine = parser.add_argument_group("engine")
    engine.add_argument("--max-slots", type=positive, default=8, metavar="N", help="sequences at once (8)")
    engine.add_argument("--max-context", type=positive, default=2048, metavar="N", help="positions of each (2048)")
    engine.add_argument("--page-size", type=positive, default=16, metavar="N", help="positions of a page (16)")
    engine.add_argument(
        "--num-pages",
        type=positive,
        metavar="N",
        help="pages of the pool (default: 4 times what the slots use, or all that fit)",
    )
    engine.add_argument("--max-batched-tokens", type=positive, default=512, metavar="N", help="tokens of a round (512)")
    engine.add_argument("--mode", default="continuous", choices=("continuous", "static"), help="(continuous)")
    engine.add_argument(
        "--policy", default="fcfs", choices=("fcfs", "priority"), help="who goes first; priorities come with a dataset"
    )
    engine.add_argument("--no-enable-prefix-caching", action="store_true", help="compute every prompt whole")
    engine.add_argument("--no-enable-chunked-prefill", action="store_true", help="compute prompts in one piece")
    engine.add_argument("--no-async-scheduling", action="store_true", help="schedule a round when the last one is done")
    engine.add_argument("--reserve-full", action="store_true", help="admit only what surely fits to its end")
    engine.add_argument(
        "--vocab-size",
        type=positive,
        default=49152,
        metavar="N",
        help="tokens that random prompts are made of; that of a model gives the work of `bench serve` (49152)",
    )
    add_workload_options(parser)
    add_result_options(parser)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Simulate and print."""
    if options.example:
        return _example(options)
    read_slo(options)  # a mistake here must not wait for the simulation
    if options.vocab_size > 2**31:
        raise UserMistake(f"--vocab-size is {options.vocab_size}, but token ids are below 2^31.")
    check_outputs(options)
    workload = read_workload(options, options.vocab_size)
    config, step_seconds, source = _setting(options)
    recorder = TimelineRecorder()
    refused = Simulator(config, step_seconds, recorder).run(workload)
    if refused and len(refused) == len(workload.requests):
        raise UserMistake(f"Every request was refused, the first with: {refused[0]}")
    from jaxinfer.engine.report import SECONDS, TICKS

    facts = [("step times", source), ("workload", workload.hash), ("KV pages", str(config.num_pages - 1))]
    if refused:
        facts.append(("refused", str(len(refused))))
    unit = TICKS if step_seconds is one_tick else SECONDS
    show_run(options, f"Simulation of {len(workload.requests)} requests", facts, recorder.timeline(), config, unit)
    return 0


def _setting(options: argparse.Namespace) -> tuple[SchedulerConfig, StepSeconds, str]:
    """The scheduler's limits, how long rounds take, and where that comes from."""
    if options.steps is not None and options.target is not None:
        raise UserMistake("Give --steps or --target, not both.")
    if options.target is not None:
        return _roofline(options)
    refuse_without_effect(options, _OF_TARGET, "without --target")
    if options.steps is not None:
        return _measured(options)
    return _scheduler_config(options), one_tick, "a tick for each round"


def _measured(options: argparse.Namespace) -> tuple[SchedulerConfig, StepSeconds, str]:
    from jaxinfer.engine.step_models import MeasuredSteps
    from jaxinfer.runtime.limits import RunnerLimits

    config = _scheduler_config(options)
    with user_mistakes():
        limits = RunnerLimits.of_scheduler(config, options.vocab_size)
        steps = MeasuredSteps(options.steps, limits, streamed=config.max_rounds_in_flight > 1)
        return config, steps, f"measured, {options.steps}"


def _roofline(options: argparse.Namespace) -> tuple[SchedulerConfig, StepSeconds, str]:
    from jaxinfer.runtime.chips import parse_target  # imports no jax

    if not 0 < options.floor_ratio < float("inf"):
        raise UserMistake(f"--floor-ratio must be above 0, not {options.floor_ratio:g}.")
    with user_mistakes():
        target = parse_target(options.target)
        os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported; nothing runs on a device
        from jaxinfer.engine.build import common_window
        from jaxinfer.engine.step_models import RooflineSteps

        model = read_decoder(options)
        config = _scheduler_config(options, _pages_that_fit(options, model, target), common_window(model))
        steps = RooflineSteps(model, target, options.tp or target.devices, options.floor_ratio)
    return config, steps, f"{options.floor_ratio:g} x the least of {target.name}"


def _pages_that_fit(options: argparse.Namespace, model: DecoderConfig, target: Target) -> int:
    from jaxinfer.engine.plan import make_plan

    plan = make_plan(model, target=target, devices=options.tp, batches=(1,), prefills=(1,))
    pages = (plan.kv_bytes or 0) // (plan.kv_bytes_per_token * options.page_size)
    if pages < 2:
        raise UserMistake(f"The weights leave no memory of {target.name} for KV pages; take more devices.")
    return pages


def _scheduler_config(
    options: argparse.Namespace, most_pages: int | None = None, window: int | None = None
) -> SchedulerConfig:
    pages = 1 + ROOM_FOR_CACHE * options.max_slots * -(-options.max_context // options.page_size)
    if most_pages is not None:
        pages = min(pages, most_pages)
    pages = min(pages, _MOST_PAGES)
    for name, value, most in (
        ("--num-pages", options.num_pages, _MOST_PAGES),
        ("--max-slots", options.max_slots, 2**16),
    ):
        if value is not None and value > most:
            raise UserMistake(f"{name} is {value}, but a simulation keeps at most {most}.")
    with user_mistakes():
        return SchedulerConfig(
            max_slots=options.max_slots,
            page_size=options.page_size,
            num_pages=options.num_pages or pages,
            max_context=options.max_context,
            max_batched_tokens=max(options.max_batched_tokens, options.max_slots),
            mode=options.mode,
            policy=options.policy,
            max_prefill_rows=min(_PREFILL_ROWS, options.max_slots),
            enable_prefix_caching=not options.no_enable_prefix_caching,
            enable_chunked_prefill=not options.no_enable_chunked_prefill,
            reserve_full=options.reserve_full,
            max_rounds_in_flight=1 if options.no_async_scheduling else 2,
            window=window,
        )


def _example(options: argparse.Namespace) -> int:
    refuse_without_effect(options, [name for name in vars(options) if name not in _OF_EXAMPLE], "with --example")
    check_outputs(options)
    runs = run_all()
    if options.report or options.trace:
        from jaxinfer.engine.report import TICKS, ReportSection

        sections = []
        for example in runs:
            config = example_config(example.mode, example.chunked_prefill, example.prefix_cache)
            summary = summarize(example.timeline, Capacity.of_scheduler(config))
            facts = [("most pages held", str(example.peak_pages))]
            sections.append(ReportSection(example.title, facts, example.timeline, summary, TICKS))
        write_files(options, sections)
    if options.json:
        print(json.dumps([_example_as_json(example) for example in runs]))
        return 0
    for example in runs:
        print(f"{example.title}:")
        print_table(_TICK_COLUMNS, tick_rows(example), left=("A", "B", "C"))
    print("First token and finish, in ticks:")
    columns = ("", "A", "B", "C", "most pages held")
    print_table(columns, [_example_row(example) for example in runs], left=("",))
    return 0


def _example_row(example: ExampleRun) -> tuple[str, ...]:
    ticks = (first_and_last_tick(sequence) for sequence in example.timeline.sequences)
    return example.title, *(f"{first}, {last}" for first, last in ticks), str(example.peak_pages)


def _example_as_json(example: ExampleRun) -> dict[str, Any]:
    return {
        "mode": example.mode,
        "chunked_prefill": example.chunked_prefill,
        "prefix_cache": example.prefix_cache,
        "peak_pages": example.peak_pages,
        "first_and_last_tick": {s.sequence.request_id: first_and_last_tick(s) for s in example.timeline.sequences},
        "ticks": [dict(zip(_TICK_COLUMNS, row, strict=True)) for row in tick_rows(example)],
    }

"""`jaxinfer bench steps`: how long prefill and decode steps take, against what the machine could do."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxinfer.cli._errors import user_mistakes
from jaxinfer.cli._options import add_engine_options, add_model, engine_options
from jaxinfer.cli._parser import Parser, positive, positives

if TYPE_CHECKING:
    from jaxinfer.engine.step_times import StepTime

_STEPS_ABOUT = """Time prefill and decode steps of a model with the programs that serve requests, compiled and
warmed up before. The floor is the least time for the bytes a step must move and the operations it
must do, at the bandwidth and rate measured on this machine in the same run; the last column is the
median time over the floor, so 1 is perfect."""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    about = "Measure this machine."
    parser = commands.add_parser("bench", help="measure step times", description=about)
    kinds = parser.add_subparsers(title="measurements", metavar="WHAT", parser_class=Parser, required=True)
    steps = kinds.add_parser("steps", help="prefill and decode step times", description=_STEPS_ABOUT)
    add_model(steps)
    steps.add_argument("--batch", type=positives, default=(1, 8), metavar="N,N,...", help="decode batches (1,8)")
    steps.add_argument(
        "--context", type=positives, default=(128,), metavar="N,N,...", help="cached positions at decode (128)"
    )
    steps.add_argument("--prefill", type=positives, default=(512,), metavar="N,N,...", help="prompt lengths (512)")
    steps.add_argument("--rounds", type=positive, default=20, metavar="N", help="decode steps of each kind (20)")
    steps.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    add_engine_options(steps, only=("dtype", "attention"))
    steps.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    from jaxinfer.cli._progress import progress_bars
    from jaxinfer.cli._quiet import native_messages_held
    from jaxinfer.cli._serving import require_device
    from jaxinfer.engine.step_times import StepTimer, measure_steps

    device = require_device()
    engine = engine_options(options)
    begin = time.perf_counter()
    with native_messages_held(), user_mistakes(), progress_bars() as progress:
        timer = StepTimer(
            options.model,
            dtype=engine.dtype,
            attention=engine.attention,
            max_batch=max(options.batch),
            max_context=max(options.context),
            max_prefill=max(options.prefill),
            on_progress=progress,
        )
    about = {
        "model": options.model,
        "dtype": timer.config.dtype,
        "device": device.device_kind,
        "ready_s": round(time.perf_counter() - begin, 2),
    }
    steps = measure_steps(timer, options.batch, options.context, options.prefill, repeats=options.rounds)
    if options.json:
        print(json.dumps(about | {"steps": [_as_json(step) for step in steps]}))
    else:
        _print_table(about, steps)
    return 0


def _as_json(step: StepTime) -> dict[str, Any]:
    return {
        "kind": step.kind,
        "batch": step.batch,
        "tokens": step.tokens,
        "context": step.context,
        "median_s": step.median_s,
        "min_s": min(step.seconds),
        "max_s": max(step.seconds),
        "repeats": len(step.seconds),
        "tokens_per_s": step.tokens_per_s,
        "floor_s": step.floor_s,
        "bound": step.bound,
        "floor_ratio": step.floor_ratio,
        "bytes": step.cost.bytes,
        "flops": step.cost.flops,
    }


def _print_table(about: dict[str, Any], steps: Sequence[StepTime]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    columns = (
        "step",
        "batch",
        "tokens",
        "context",
        "median ms",
        "min ms",
        "max ms",
        "tok/s",
        "floor ms",
        "bound",
        "x floor",
    )
    table = Table(box=SIMPLE_HEAD)
    for name in columns:
        table.add_column(name, justify="left" if name in ("step", "bound") else "right", no_wrap=True)
    for step in steps:
        milliseconds = [1e3 * value for value in (step.median_s, min(step.seconds), max(step.seconds))]
        table.add_row(
            step.kind,
            str(step.batch),
            str(step.tokens),
            str(step.context),
            *(f"{value:.2f}" for value in milliseconds),
            f"{step.tokens_per_s:.1f}",
            f"{1e3 * step.floor_s:.2f}",
            step.bound,
            f"{step.floor_ratio:.2f}",
        )
    print(
        f"{about['model']} in {about['dtype']} on {about['device']}; "
        f"loaded, compiled and warmed up in {about['ready_s']:.1f} s."
    )
    console = Console()
    # Figures must not be cut where standard output is a file or a narrow terminal.
    needed = console.measure(table, options=console.options.update(max_width=1000)).maximum
    Console(width=max(console.width, needed)).print(table)

"""`jaxinfer bench`: how long steps and attention kernels take, against what the machine could do."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxinfer.cli import _serve_bench
from jaxinfer.cli._errors import UserMistake, user_mistakes
from jaxinfer.cli._options import DEFAULT_MODEL, MODEL_HELP, add_engine_options, engine_options
from jaxinfer.cli._parser import Parser, positive, positives, whole_numbers
from jaxinfer.cli._tables import print_table

if TYPE_CHECKING:
    from jaxinfer.engine.build import EngineOptions
    from jaxinfer.engine.device_rates import DeviceRates
    from jaxinfer.engine.kernel_times import KernelTime
    from jaxinfer.engine.step_times import StepTime, StepTimer, TimerSizes

_STEPS_ABOUT = """Time prefill and decode steps of a model with the programs that serve requests, compiled and
warmed up before. The floor is the least time for the bytes a step must move and the operations it
must do, at the bandwidth and rate measured on this machine in the same run. A step is timed twice:
alone, as the engine runs it, waited for and its sampled ids transferred (median, min, max, tok/s, x
floor); and in a stream of steps that are dispatched back to back and waited for once (stream ms,
stream x), which leaves out the host where the device is the slower one. 1 x floor is perfect."""

_KERNELS_ABOUT = """Time each attention operation alone, in a program of many calls, at a table of shapes: the
attention of Llama 3 8B, or something small on a CPU. The floor is the least time for the bytes that a
call must move and the operations it must do, at the bandwidth and rate measured on this device in the
same run; the last column is the floor over the time, so 100% is perfect. What kv_write moves is so
little that a cache may take it faster than memory would."""

TIMED_BATCHES, TIMED_CONTEXT, TIMED_PREFILL = (1, 8), 128, 512
"""What `bench steps` measures unless told otherwise."""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    about = "Measure this machine."
    parser = commands.add_parser("bench", help="measure step and kernel times", description=about)
    kinds = parser.add_subparsers(title="measurements", metavar="WHAT", parser_class=Parser, required=True)
    steps = kinds.add_parser("steps", help="prefill and decode step times", description=_STEPS_ABOUT)
    steps.add_argument("--model", metavar="M", help=MODEL_HELP)
    steps.add_argument("--config", metavar="FILE", help="a config.json instead of a model: random weights of its shape")
    steps.add_argument("--batch", type=positives, default=TIMED_BATCHES, metavar="N,N,...", help="decode batches (1,8)")
    steps.add_argument(
        "--context",
        type=positives,
        metavar="N,N,...",
        help=f"cached positions at decode ({TIMED_CONTEXT}, or as many as the model was made for)",
    )
    steps.add_argument(
        "--prefill",
        type=positives,
        metavar="N,N,...",
        help=f"tokens of a prefill ({TIMED_PREFILL}, or as many as the model was made for)",
    )
    steps.add_argument(
        "--prefill-rows", type=positives, default=(1,), metavar="N,N,...", help="prompts these are divided among (1)"
    )
    steps.add_argument(
        "--prefill-context",
        type=whole_numbers,
        default=(0,),
        metavar="N,N,...",
        help="positions that each prompt has cached before (0)",
    )
    steps.add_argument("--rounds", type=positive, default=20, metavar="N", help="decode steps of each kind (20)")
    steps.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    add_engine_options(steps, only=("dtype", "weight_dtype", "attention"))
    steps.set_defaults(run=run_steps)
    kernels = kinds.add_parser("kernels", help="attention kernel times", description=_KERNELS_ABOUT)
    kernels.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    add_engine_options(kernels, only=("attention",))
    kernels.set_defaults(run=run_kernels)
    _serve_bench.add_parser(kinds)


def run_steps(options: argparse.Namespace) -> int:
    """Measure steps and print."""
    from jaxinfer.cli._quiet import native_messages_held
    from jaxinfer.cli._serving import require_device
    from jaxinfer.engine.step_times import measure_steps

    if options.config is not None and options.model is not None:
        raise UserMistake("Give --model or --config, not both.")
    device = require_device()
    engine = engine_options(options)
    begin = time.perf_counter()
    with native_messages_held(), user_mistakes():
        timer, sizes = _step_timer(options, engine)
    ready_s, rates = time.perf_counter() - begin, timer.rates()
    about = {
        "model": options.config or options.model or DEFAULT_MODEL,
        "dtype": timer.config.dtype,
        "device": device.device_kind,
        "ready_s": round(ready_s, 2),
        **_rates_as_json(rates),
    }
    steps = list(measure_steps(timer, rates, sizes, repeats=options.rounds))
    if options.json:
        print(json.dumps(about | {"steps": [_step_as_json(step) for step in steps]}))
        return 0
    print(
        f"{about['model']} in {about['dtype']} on {about['device']}; loaded, compiled and warmed up in {ready_s:.1f} s."
    )
    print(_rates_in_words(rates))
    _print_steps(steps)
    return 0


def run_kernels(options: argparse.Namespace) -> int:
    """Measure kernels and print."""
    from jaxinfer.cli._quiet import native_messages_held
    from jaxinfer.cli._serving import require_device
    from jaxinfer.engine.device_rates import measure_rates
    from jaxinfer.engine.kernel_times import check_choices, shapes_for, time_kernel

    device = require_device()
    shapes, attention = shapes_for(device.platform), engine_options(options).attention
    with user_mistakes():
        check_choices(shapes, attention)
    with native_messages_held():
        rates = measure_rates(shapes[0].dtype)
        times = [time_kernel(shape, rates, attention) for shape in shapes]
    if options.json:
        about = {"device": device.device_kind, **_rates_as_json(rates)}
        print(json.dumps(about | {"kernels": [_kernel_as_json(kernel) for kernel in times]}))
        return 0
    print(f"{device.device_kind}: {_rates_in_words(rates)}")
    _print_kernels(times)
    return 0


def _step_timer(options: argparse.Namespace, engine: EngineOptions) -> tuple[StepTimer, TimerSizes]:
    from checkpoints import open_checkpoint, progress_bar
    from jaxinfer.engine.step_times import StepTimer
    from jaxinfer.runtime.loading import decoder_config

    with progress_bar() as progress:
        if options.config is not None:
            config = _config(options.config, engine)
            sizes = _sizes(options, config.max_positions)
            return StepTimer.with_random_weights(config, sizes, progress), sizes
        model = DEFAULT_MODEL if options.model is None else options.model
        with open_checkpoint(model, progress=progress) as checkpoint:
            sizes = _sizes(options, decoder_config(checkpoint).max_positions)
            # A hub model is opened again by its directory, so that the hub is asked once.
            source = model if checkpoint.directory is None else str(checkpoint.directory)
        types = {"dtype": engine.dtype, "weight_dtype": engine.weight_dtype, "attention": engine.attention}
        return StepTimer(source, **types, sizes=sizes, on_progress=progress), sizes


def _sizes(options: argparse.Namespace, max_positions: int) -> TimerSizes:
    from jaxinfer.engine.step_times import TimerSizes

    contexts = options.context or (min(TIMED_CONTEXT, max_positions),)
    prefills = options.prefill or (min(TIMED_PREFILL, max_positions),)
    return TimerSizes(options.batch, contexts, prefills, options.prefill_rows, options.prefill_context)


def _config(path: str, engine: EngineOptions) -> Any:
    from jaxinfer.cli._plan import read_decoder
    from jaxinfer.engine.step_times import default_dtype
    from jaxinfer.runtime.loading import default_kv_dtype

    dtype = default_dtype() if engine.dtype == "auto" else engine.dtype
    types = {"dtype": dtype, "kv_dtype": default_kv_dtype(dtype), "weight_dtype": engine.weight_dtype}
    source = argparse.Namespace(config=path, model=None, **types)
    return read_decoder(source).replace(attention=engine.attention)


def _rates_as_json(rates: DeviceRates) -> dict[str, Any]:
    return {"bandwidth": rates.bandwidth, "bandwidth_measured_as": rates.method, "flops_per_s": rates.flops}


def _rates_in_words(rates: DeviceRates) -> str:
    return f"{rates.bandwidth / 1e9:.1f} GB/s ({rates.method}), {rates.flops / 1e12:.2f} TFLOP/s measured."


def _step_as_json(step: StepTime) -> dict[str, Any]:
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
        "stream_s": step.stream_s,
        "floor_s": step.floor_s,
        "bound": step.bound,
        "floor_ratio": step.floor_ratio,
        "stream_floor_ratio": step.stream_floor_ratio,
        "bytes": step.cost.bytes,
        "flops": step.cost.flops,
    }


_STEP_COLUMNS: dict[str, Callable[[StepTime], str]] = {
    "step": lambda step: step.kind,
    "batch": lambda step: str(step.batch),
    "tokens": lambda step: str(step.tokens),
    "context": lambda step: str(step.context),
    "median ms": lambda step: f"{1e3 * step.median_s:.2f}",
    "min ms": lambda step: f"{1e3 * min(step.seconds):.2f}",
    "max ms": lambda step: f"{1e3 * max(step.seconds):.2f}",
    "tok/s": lambda step: f"{step.tokens_per_s:.1f}",
    "floor ms": lambda step: f"{1e3 * step.floor_s:.2f}",
    "bound": lambda step: step.bound,
    "x floor": lambda step: f"{step.floor_ratio:.2f}",
    "stream ms": lambda step: f"{1e3 * step.stream_s:.2f}",
    "stream x": lambda step: f"{step.stream_floor_ratio:.2f}",
}


def _print_steps(steps: Sequence[StepTime]) -> None:
    rows = [[cell(step) for cell in _STEP_COLUMNS.values()] for step in steps]
    print_table(tuple(_STEP_COLUMNS), rows, left=("step", "bound"))


def _kernel_as_json(kernel: KernelTime) -> dict[str, Any]:
    shape, cost = kernel.shape, kernel.shape.cost
    return {
        "operation": shape.operation,
        "tokens": shape.tokens,
        "context": shape.context,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "page_size": shape.page_size,
        "dtype": shape.dtype,
        "page_dtype": shape.pool_dtype,
        "lowering": kernel.choice.name,
        "reason": kernel.choice.reason,
        "seconds": kernel.seconds,
        "floor_s": kernel.floor_s,
        "bound": kernel.bound,
        "fraction": kernel.fraction,
        "bytes": cost.bytes,
        "flops": cost.flops,
    }


_KERNEL_COLUMNS: dict[str, Callable[[KernelTime], str]] = {
    "operation": lambda kernel: kernel.shape.name,
    "lowering": lambda kernel: kernel.choice.name,
    "us": lambda kernel: f"{1e6 * kernel.seconds:.1f}",
    "GB/s": lambda kernel: f"{kernel.shape.cost.bytes / kernel.seconds / 1e9:.1f}",
    "GFLOP/s": lambda kernel: f"{kernel.shape.cost.flops / kernel.seconds / 1e9:.1f}",
    "floor us": lambda kernel: f"{1e6 * kernel.floor_s:.1f}",
    "bound": lambda kernel: kernel.bound,
    "of limit": lambda kernel: f"{100 * kernel.fraction:.0f}%",
}


def _print_kernels(kernels: Sequence[KernelTime]) -> None:
    rows = [[cell(kernel) for cell in _KERNEL_COLUMNS.values()] for kernel in kernels]
    print_table(tuple(_KERNEL_COLUMNS), rows, left=("operation", "lowering", "bound"))
    for reason in dict.fromkeys(f"{kernel.choice.name}: {kernel.choice.reason}" for kernel in kernels):
        print(reason)

"""Serving and step times of jaxinfer against transformers and vLLM on the CPU, interleaved in one run.

``python bench/compare_serving.py [--transformers-python PYTHON] [--vllm-python PYTHON] [--rounds 3] [--json FILE]``

serving: 32 requests of 32 to 256 prompt tokens and 16 to 128 sampled ones, given all at once as token ids; nothing but
    their number ends them. Tokens per second are those asked for, from the first prompt given to the last token had.
decode, prefill (jaxinfer and vLLM): one request alone; a decode step at 128 positions is what 33 tokens took longer
    than one, over 32; a prefill what one token after 512 took.
start (jaxinfer and vLLM): from the start of the process to its first token. Programs that are kept on disk are found
    there from the second run on, or with ``--starts 2``.

Every side is a process of its own that answers requests (``_answers.py``), held to the same processors and stopped
while another works; the order changes every round, and a first round warms up. Figures are medians over the rounds,
ratios medians over rounds of jaxinfer's rate over the other's: above 1, jaxinfer is faster. Prefix caches are off.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _sides import Side
from compare_transformers import hold_to_processors

from checkpoints import DEFAULT_MODEL, convert, open_checkpoint

HERE = Path(__file__).parent
LONG_OUTPUT, AT_CONTEXT, LONG_PROMPT = 33, 128, 512
CONTEXT = 1024


@dataclass(frozen=True)
class Generation:
    """Requests of one measurement, given at once: prompts and how many tokens to sample after each."""

    prompts: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...]

    def as_request(self) -> dict[str, Any]:
        return {"measure": "generate"} | asdict(self)


@dataclass(frozen=True)
class SideSpec:
    """How to start a side. alone: whether its steps and its start are compared too."""

    name: str
    dtype: str
    command: tuple[str, ...]
    environment: dict[str, str]
    alone: bool

    @property
    def engine(self) -> str:
        return self.name.split(" ")[0]


@dataclass(frozen=True)
class Measures:
    """What every side is asked."""

    serving: Generation
    one_token: Generation
    long_output: Generation
    long_prompt: Generation

    @classmethod
    def make(cls, vocab_size: int, requests: int) -> Measures:
        draw = random.Random(0)

        def prompt(length: int) -> tuple[int, ...]:
            return tuple(draw.choices(range(vocab_size), k=length))

        prompts = tuple(prompt(draw.randint(32, 256)) for _ in range(requests))
        tokens = tuple(draw.randint(16, 128) for _ in range(requests))
        alone = (prompt(AT_CONTEXT - LONG_OUTPUT // 2),)
        return cls(
            Generation(prompts, tokens),
            Generation(alone, (1,)),
            Generation(alone, (LONG_OUTPUT,)),
            Generation((prompt(LONG_PROMPT),), (1,)),
        )


def side_specs(options: argparse.Namespace, model: Path) -> list[SideSpec]:
    """jaxinfer in the types that are compared, and what the arguments gave interpreters for."""
    shared = ("--model", str(model))
    specs = []
    for dtype in options.dtypes:
        ours = (sys.executable, str(HERE / "_side_jaxinfer.py"), *shared, "--dtype", dtype)
        sizes = ("--context", str(CONTEXT), "--slots", str(options.slots))
        path = {"PYTHONPATH": str(HERE.parent)}  # a checkout needs no installation
        specs.append(SideSpec(f"jaxinfer {dtype}", dtype, (*ours, *sizes), path, True))
        if options.vllm_python:
            theirs = (options.vllm_python, str(HERE / "_peer_vllm.py"), *shared, "--dtype", dtype)
            bind = {"VLLM_CPU_OMP_THREADS_BIND": options.vllm_threads_bind}
            specs.append(SideSpec(f"vLLM {dtype}", dtype, (*theirs, "--context", str(CONTEXT)), bind, True))
    if options.transformers_python and "float32" in options.dtypes:
        for batching in ("static", "continuous"):
            theirs = (options.transformers_python, str(HERE / "_peer_transformers.py"), *shared, "--serve")
            threads = ("--threads", str(options.threads), "--batching", batching)
            specs.append(SideSpec(f"transformers {batching}", "float32", (*theirs, *threads), {}, False))
    return specs


def start(spec: SideSpec, starts: int, first: Generation) -> tuple[Side, list[float]]:
    """The running side, and seconds from each of its starts to its first token."""
    seconds = []
    while True:
        side = Side(spec.name, spec.command, spec.environment)
        side.ask(first.as_request())
        seconds.append(time.perf_counter() - side.started)
        print(f"{spec.name}: first token {seconds[-1]:.1f} s after its start", file=sys.stderr, flush=True)
        if len(seconds) == starts or not spec.alone:
            return side, seconds
        side.close()


@contextmanager
def started(
    specs: Sequence[SideSpec], starts: int, first: Generation
) -> Iterator[tuple[dict[str, Side], dict[str, list[float]]]]:
    """All sides, paused, and the seconds that each start took."""
    sides: dict[str, Side] = {}
    seconds: dict[str, list[float]] = {}
    try:
        for spec in specs:
            sides[spec.name], seconds[spec.name] = start(spec, starts, first)
            sides[spec.name].pause()
        yield sides, seconds
    finally:
        for side in sides.values():
            side.close()


def measure(side: Side, spec: SideSpec, measures: Measures) -> tuple[dict[str, float], list[list[int]]]:
    """The side's rates, and what it sampled for the serving requests."""

    def seconds(generation: Generation) -> float:
        return side.ask(generation.as_request())["seconds"]

    served = side.ask(measures.serving.as_request())
    rates = {"serving": sum(measures.serving.tokens) / served["seconds"]}
    if spec.alone:
        one = statistics.median(seconds(measures.one_token) for _ in range(3))
        long = statistics.median(seconds(measures.long_output) for _ in range(3))
        rates["decode"] = (LONG_OUTPUT - 1) / (long - one)
        rates["prefill"] = LONG_PROMPT / statistics.median(seconds(measures.long_prompt) for _ in range(3))
    return rates, served["ids"]


def interleave(
    sides: dict[str, Side], specs: Sequence[SideSpec], measures: Measures, rounds: int
) -> tuple[dict[str, dict[str, list[float]]], dict[str, list[list[int]]]]:
    """Rates by side and measure, one for every round, and the ids of the last; a first round is dropped."""
    rates: dict[str, dict[str, list[float]]] = {spec.name: {} for spec in specs}
    ids: dict[str, list[list[int]]] = {}
    for number in range(rounds + 1):
        for spec in specs if number % 2 else reversed(specs):
            side = sides[spec.name]
            side.resume()
            found, ids[spec.name] = measure(side, spec, measures)
            side.pause()
            for name, rate in found.items() if number else ():
                rates[spec.name].setdefault(name, []).append(rate)
        print(f"round {number} of {rounds} done", file=sys.stderr, flush=True)
    return rates, ids


def summarise(
    specs: Sequence[SideSpec],
    rates: dict[str, dict[str, list[float]]],
    starts: dict[str, list[float]],
    ids: dict[str, list[list[int]]],
) -> dict[str, dict[str, Any]]:
    summary: dict[str, dict[str, Any]] = {}
    for spec in specs:
        ours, theirs = rates[f"jaxinfer {spec.dtype}"], rates[spec.name]
        entry: dict[str, Any] = {name: _spread(values) for name, values in theirs.items()}
        if spec.engine != "jaxinfer":
            entry["ratios"] = {name: _ratio(ours[name], values) for name, values in theirs.items()}
            pairs = zip(ids[spec.name], ids[f"jaxinfer {spec.dtype}"], strict=True)
            entry["identical requests"] = sum(one == other for one, other in pairs)
        if spec.alone:
            entry["starts_s"] = [round(seconds, 2) for seconds in starts[spec.name]]
        summary[spec.name] = entry
    return summary


def _spread(values: Sequence[float]) -> dict[str, float]:
    figures: dict[str, Callable[[Sequence[float]], float]] = {"median": statistics.median, "min": min, "max": max}
    return {name: round(figure(values), 2) for name, figure in figures.items()}


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return round(statistics.median(one / other for one, other in zip(ours, theirs, strict=True)), 3)


def print_summary(summary: dict[str, dict[str, Any]], requests: int) -> None:
    columns = (f"serving {requests}, tok/s", "decode step, ms", "prefill, tok/s", "start, s", "same ids")
    print(f"{'':26}" + "".join(f"{column:>26}" for column in columns))
    for name, entry in summary.items():
        cells = [_cell(entry, measured) for measured in ("serving", "decode", "prefill")]
        cells.append(f"{entry['starts_s'][-1]:.1f}" if "starts_s" in entry else "-")
        cells.append(f"{entry['identical requests']} of {requests}" if "identical requests" in entry else "-")
        print(f"{name:26}" + "".join(f"{cell:>26}" for cell in cells))
    print("In brackets after the range: jaxinfer's rate in the same type over this one's.")


def _cell(entry: dict[str, Any], measured: str) -> str:
    if measured not in entry:
        return "-"
    figures = [entry[measured][figure] for figure in ("median", "min", "max")]
    if measured == "decode":  # milliseconds of a step
        figures = [1e3 / figures[0], 1e3 / figures[2], 1e3 / figures[1]]
    text = f"{figures[0]:.1f} ({figures[1]:.1f}-{figures[2]:.1f})"
    return f"{text} [{entry['ratios'][measured]:.2f}]" if "ratios" in entry else text


@contextmanager
def safetensors_directory(model: str) -> Iterator[Path]:
    """The model as a directory that every side reads."""
    if Path(model).is_dir():
        yield Path(model).resolve()
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield convert(model, Path(scratch) / "model", format="safetensors")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serving of jaxinfer against transformers and vLLM on the CPU.")
    parser.add_argument("--transformers-python", metavar="PYTHON", help="a Python that has torch and transformers")
    parser.add_argument("--vllm-python", metavar="PYTHON", help="a Python that has vLLM's build for CPUs")
    parser.add_argument(
        "--vllm-threads-bind",
        default="auto",
        metavar="BIND",
        help="processors that compute in vLLM: auto (its default, leaves one to its server) or for instance 0-1",
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as for jaxinfer (default: the default model)")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="with commas between (float32,bfloat16)")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--slots", type=int, default=32, help="sequences that jaxinfer runs at once (32)")
    parser.add_argument("--threads", type=int, default=2, help="processors for every side (2)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--starts", type=int, default=1, help="how often to start jaxinfer and vLLM (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    options = parser.parse_args()
    options.dtypes = options.dtypes.split(",")
    for dtype in options.dtypes:
        if dtype not in ("float32", "bfloat16"):
            parser.error(f"--dtypes are float32 and bfloat16, not {dtype!r}")
    if min(options.requests, options.slots, options.threads, options.rounds, options.starts) < 1:
        parser.error("--requests, --slots, --threads, --rounds and --starts must be at least 1")
    return options


def main() -> None:
    options = parse_options()
    # So that the sides are ended then too: a paused one would stay for ever.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    processors = hold_to_processors(options.threads)
    with safetensors_directory(options.model) as model:
        with open_checkpoint(str(model)) as checkpoint:
            measures = Measures.make(checkpoint.config["vocab_size"], options.requests)
        specs = side_specs(options, model)
        load_before = os.getloadavg()[0]
        with started(specs, options.starts, measures.one_token) as (sides, starts):
            rates, ids = interleave(sides, specs, measures, options.rounds)
            about: dict[str, Any] = {name: side.about for name, side in sides.items()}
    about |= {"processors": processors, "rounds": options.rounds, "load_before": round(load_before, 2)}
    summary = summarise(specs, rates, starts, ids)
    print_summary(summary, options.requests)
    print(", ".join(f"{key}: {value}" for key, value in about.items()))
    if options.json is not None:
        results = {"results": summary, "rates": rates, "about": about}
        options.json.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()

"""Decode and prefill times of jaxinfer against transformers, alternating in one run.

``python bench/compare_transformers.py --peer-python /path/to/python-with-torch [--rounds 5] [--json]``

transformers runs in a process of its own (``_peer_transformers.py``) in another environment if need be; each side is
idle while the other measures, and the order changes every round, so noise of the machine falls on both. Both are held
to the same processors. The ratio is the median over rounds of (transformers seconds / jaxinfer seconds): above 1,
jaxinfer is faster.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _sides import Side

PEER_SCRIPT = Path(__file__).with_name("_peer_transformers.py")


@dataclass(frozen=True)
class Request:
    """``repeats`` decode steps after ``length`` cached positions a row, or that many prefills of ``length`` tokens."""

    measure: str
    batch: int
    length: int
    repeats: int


REQUESTS = {
    "decode b1": Request("decode", 1, 128, 8),
    "decode b8": Request("decode", 8, 128, 8),
    "prefill 512": Request("prefill", 1, 512, 2),
}

Measure = Callable[[Request], Sequence[float]]
"""Seconds of every repeat; the caller takes the median."""


def open_jaxinfer(model: Path, dtype: str) -> Measure:
    """The jaxinfer side: greedy decode steps and prefills, every one waited for."""
    # Imported here: the processors must be chosen before jax starts its threads.
    timer = importlib.import_module("jaxinfer.engine.step_times").StepTimer(str(model), dtype=dtype)

    def measure(request: Request) -> Sequence[float]:
        if request.measure == "decode":
            return timer.decode(request.batch, request.length, request.repeats)
        return timer.prefill(request.length, request.repeats)

    return measure


class TransformersPeer(Side):
    """The other process, and which cache it chose for what."""

    def __init__(self, python: str, model: Path, dtype: str, threads: int):
        options = ["--model", str(model), "--dtype", dtype, "--threads", str(threads)]
        super().__init__("transformers", [python, str(PEER_SCRIPT), "--serve", *options])
        self.caches: dict[str, str] = {}

    def measure(self, request: Request) -> list[float]:
        answer = self.ask(asdict(request))
        self.caches[f"{request.measure} b{request.batch}"] = answer["cache"]
        return answer["seconds"]


def alternate(sides: dict[str, Measure], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Median seconds of every round, by request and side; one round before them warms up and is dropped."""
    seconds: dict[str, dict[str, list[float]]] = {name: {side: [] for side in sides} for name in REQUESTS}
    for round_number in range(rounds + 1):
        order = list(sides) if round_number % 2 else list(reversed(sides))
        for name, request in REQUESTS.items():
            for side in order:
                median = statistics.median(sides[side](request))
                if round_number:
                    seconds[name][side].append(median)
    return seconds


def summarise(seconds: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, Any]]:
    summary: dict[str, dict[str, Any]] = {}
    for name, by_side in seconds.items():
        entry: dict[str, Any] = {}
        for side, values in by_side.items():
            median = statistics.median(values)
            entry[side] = {
                "ms": round(1e3 * median, 3),
                "ms_min": round(1e3 * min(values), 3),
                "ms_max": round(1e3 * max(values), 3),
                "tokens_per_s": round(tokens_per_repeat(REQUESTS[name]) / median, 1),
            }
        if len(by_side) == 2:
            pairs = zip(by_side["transformers"], by_side["jaxinfer"], strict=True)
            entry["ratio"] = round(statistics.median(theirs / ours for theirs, ours in pairs), 3)
        summary[name] = entry
    return summary


def tokens_per_repeat(request: Request) -> int:
    return request.batch * (request.length if request.measure == "prefill" else 1)


def print_table(summary: dict[str, dict[str, Any]], sides: Sequence[str]) -> None:
    print(f"{'':12}" + "".join(f"{side + ' ms (min-max)':>32}{'tok/s':>10}" for side in sides) + f"{'ratio':>8}")
    for name, entry in summary.items():
        cells = []
        for side in sides:
            figures = entry[side]
            spread = f"{figures['ms']:.1f} ({figures['ms_min']:.1f}-{figures['ms_max']:.1f})"
            cells.append(f"{spread:>32}{figures['tokens_per_s']:>10.1f}")
        print(f"{name:12}" + "".join(cells) + f"{entry.get('ratio', '-'):>8}")


def hold_to_processors(count: int) -> int:
    """Restrict this process, and what it starts, to `count` processors where the system allows it."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    chosen = sorted(os.sched_getaffinity(0))[:count]
    os.sched_setaffinity(0, chosen)
    return len(chosen)


def default_model() -> Path:
    from checkpoints import DEFAULT_MODEL, fetch_named_model

    return fetch_named_model(DEFAULT_MODEL)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Decode and prefill times of jaxinfer against transformers.")
    parser.add_argument("--peer-python", required=True, help="a Python that has torch, transformers and gguf")
    parser.add_argument("--model", type=Path, help="a .gguf file (default: the default model, fetched once)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2, help="processors for either side (default: 2)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-only", action="store_true", help="measure transformers alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    if options.model is not None and not options.model.is_file():
        parser.error(f"{options.model} is not a file")
    return options


def main() -> None:
    options = parse_options()
    model = (options.model or default_model()).resolve()
    # Before jax is imported: it sizes its thread pool by the processors it may use.
    processors = hold_to_processors(options.threads)
    sides: dict[str, Measure] = {}
    if not options.peer_only:
        sides["jaxinfer"] = open_jaxinfer(model, options.dtype)
    peer = TransformersPeer(options.peer_python, model, options.dtype, processors)
    sides["transformers"] = peer.measure
    load_before = os.getloadavg()[0]
    summary = summarise(alternate(sides, options.rounds))
    peer.close()
    about = {
        "dtype": options.dtype,
        "processors": processors,
        "rounds": options.rounds,
        "load_before": round(load_before, 2),
        "torch": peer.about["torch"],
        "transformers": peer.about["transformers"],
        "transformers_caches": peer.caches,
    }
    if options.json:
        print(json.dumps({"results": summary, "about": about}))
    else:
        print_table(summary, list(sides))
        print(", ".join(f"{key}: {value}" for key, value in about.items()))


if __name__ == "__main__":
    main()

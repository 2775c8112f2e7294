"""Four claims about serving, each measured on both sides in one run: exit status 0 only if all hold.

``python bench/serving_claims.py [--only prefix,chunks] [--rounds 3] [--json FILE]``

prefix: 16 requests at once share their first 512 tokens; median time to first token with the prefix cache over without.
chunks: a prompt of 2,048 tokens comes while four requests decode; their longest wait between two tokens with the prompt
    cut to a budget of 256 tokens a round over that with the prompt computed whole.
batching: 96 requests of mixed lengths in 8 slots; output tokens per second of continuous batching over static waves.
host: time the host works on a decode step of 8 sequences, over the time of the step, which it may overlap.

The sides alternate, each figure is the median over the rounds. Programs are compiled and warmed up before.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from _serving import serve_on

from checkpoints import DEFAULT_MODEL
from jaxinfer.core.timeline import Timeline
from jaxinfer.core.workload import Workload, WorkloadRequest, WorkloadSpec, random_workload
from jaxinfer.engine import Engine
from jaxinfer.engine.build import EngineOptions, build_engine

DECODING = 8
"""Sequences that decode at once where the host's time is measured."""


@dataclass(frozen=True)
class Claim:
    """A figure, what it may be at most or must be at least, and what it was made of, by round."""

    name: str
    about: str
    value: float
    wanted: float
    at_most: bool
    measured: dict[str, list[float]]

    @property
    def holds(self) -> bool:
        return self.value <= self.wanted if self.at_most else self.value >= self.wanted


@dataclass(frozen=True)
class Bench:
    """What the claims are measured with."""

    model: str
    rounds: int

    def build(self, options: EngineOptions) -> Engine:
        return build_engine(self.model, options)

    def alternate(self, sides: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
        """A figure of every side in every round, their order changing from round to round."""
        measured: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(self.rounds):
            for name in list(sides) if number % 2 else reversed(sides):
                measured[name].append(sides[name]())
        return measured


def prefix_cache(bench: Bench) -> Claim:
    options = EngineOptions(max_slots=16, max_context=1024)
    engine = bench.build(options)
    spec = WorkloadSpec(num_prompts=16, input_len=16, output_len=16, prefix_len=512)
    workload = random_workload(spec, engine.runner.limits.vocab_size)

    def ttft(caching: bool) -> float:
        timeline = serve(engine, replace(options, enable_prefix_caching=caching), workload)
        return statistics.median(first_token(timeline))

    measured = bench.alternate({"with": lambda: ttft(True), "without": lambda: ttft(False)})
    about = "TTFT p50 with the prefix cache over without, 16 requests sharing 512 tokens"
    return Claim("prefix", about, ratio(measured["with"], measured["without"]), 0.25, True, measured)


def chunked_prefill(bench: Bench) -> Claim:
    most = {True: 256, False: 2048}
    options = {
        chunked: EngineOptions(
            max_slots=8,
            max_context=2176,
            max_batched_tokens=tokens,
            enable_chunked_prefill=chunked,
            enable_prefix_caching=False,
        )
        for chunked, tokens in most.items()
    }
    engines = {chunked: bench.build(setting) for chunked, setting in options.items()}
    workload = long_among_decoding(engines[True].runner.limits.vocab_size)

    def worst_itl(chunked: bool) -> float:
        timeline = serve(engines[chunked], options[chunked], workload)
        decoding, (long,) = timeline.sequences[:-1], timeline.sequences[-1:]
        begin, end = long.spans[0].start, long.token_times[0]
        if not all(each.token_times[0] < begin and end < each.token_times[-1] for each in decoding):
            raise SystemExit("The long prompt did not come while the others decoded: this machine is too fast or slow.")
        return max(gap for each in decoding for gap in each.itls_s)

    measured = bench.alternate({"with": lambda: worst_itl(True), "without": lambda: worst_itl(False)})
    about = "worst ITL of 4 decoding requests beside a prompt of 2,048 tokens, chunked over whole"
    return Claim("chunks", about, ratio(measured["with"], measured["without"]), 0.3, True, measured)


def continuous_batching(bench: Bench) -> Claim:
    options = EngineOptions(max_slots=8, max_context=512, enable_prefix_caching=False)
    engine = bench.build(options)
    workload = mixed_lengths(96, engine.runner.limits.vocab_size)

    def rate(setting: EngineOptions) -> float:
        timeline = serve(engine, setting, workload)
        last = max(sequence.token_times[-1] for sequence in timeline.sequences)
        return sum(request.output_tokens for request in workload.requests) / (last - timeline.begin)

    sides = {"continuous": options, "static": replace(options, mode="static")}
    measured = bench.alternate({name: lambda setting=setting: rate(setting) for name, setting in sides.items()})
    about = "output tokens/s of continuous batching over static waves, 96 requests of 8 to 256 tokens"
    return Claim("batching", about, ratio(measured["continuous"], measured["static"]), 1.5, False, measured)


def host_time(bench: Bench) -> Claim:
    options = EngineOptions(max_slots=DECODING, max_context=512)
    engine = bench.build(options)
    spec = WorkloadSpec(num_prompts=DECODING, input_len=64, output_len=96)
    workload = random_workload(spec, engine.runner.limits.vocab_size)
    measured: dict[str, list[float]] = {"host ms": [], "step ms": []}
    for _ in range(bench.rounds):
        rounds = [
            round_
            for round_ in serve(engine, options, workload).rounds
            if round_.decodes == DECODING and not round_.prefill_rows
        ]
        measured["host ms"].append(1e3 * statistics.median(round_.host_s for round_ in rounds))
        measured["step ms"].append(1e3 * statistics.median(round_.device_s for round_ in rounds))
    about = f"host time over the time of a decode step of {DECODING} sequences"
    return Claim("host", about, ratio(measured["host ms"], measured["step ms"]), 0.1, True, measured)


CLAIMS: dict[str, Callable[[Bench], Claim]] = {
    "prefix": prefix_cache,
    "chunks": chunked_prefill,
    "batching": continuous_batching,
    "host": host_time,
}


def serve(engine: Engine, options: EngineOptions, workload: Workload) -> Timeline:
    return serve_on(engine, options, workload).timeline


def first_token(timeline: Timeline) -> list[float]:
    """Seconds to the first token of every sequence."""
    return [sequence.token_times[0] - sequence.arrival for sequence in timeline.sequences]


def ratio(some: Sequence[float], others: Sequence[float]) -> float:
    """Median over the rounds of one over the other."""
    return statistics.median(one / other for one, other in zip(some, others, strict=True))


def long_among_decoding(vocab_size: int) -> Workload:
    """Four prompts of 64 tokens that sample 96, and one of 2,048 tokens a second later."""
    draw = random.Random(0)

    def request(name: str, arrival: float, prompt: int, output: int) -> WorkloadRequest:
        return WorkloadRequest(name, arrival, tuple(draw.choices(range(vocab_size), k=prompt)), output)

    short = (request(f"short {number}", 0.0, 64, 96) for number in range(4))
    return Workload((*short, request("long", 1.0, 2048, 2)))


def mixed_lengths(count: int, vocab_size: int) -> Workload:
    """Prompts of 16 to 128 tokens and outputs of 8 to 256, all at once; short ones are more frequent (log-uniform)."""
    draw = random.Random(0)

    def length(least: int, most: int) -> int:
        return round(least * (most / least) ** draw.random())

    return Workload(
        tuple(
            WorkloadRequest(str(number), 0.0, tuple(draw.choices(range(vocab_size), k=length(16, 128))), length(8, 256))
            for number in range(count)
        )
    )


def print_claim(claim: Claim) -> None:
    wanted = f"{'at most' if claim.at_most else 'at least'} {claim.wanted:g}"
    print(f"{'pass' if claim.holds else 'FAIL'}  {claim.name}: {claim.value:.3f}, wanted {wanted}: {claim.about}")
    for name, values in claim.measured.items():
        print(f"      {name}: " + ", ".join(f"{value:.4g}" for value in values), flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Four claims about serving, measured.")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--only", default=",".join(CLAIMS), help=f"of {','.join(CLAIMS)}, with commas between")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    options = parser.parse_args()
    options.only = options.only.split(",")
    for name in options.only:
        if name not in CLAIMS:
            parser.error(f"there is no claim {name!r}; the claims are {', '.join(CLAIMS)}")
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def main() -> int:
    options = parse_options()
    bench = Bench(options.model, options.rounds)
    claims = []
    for name in options.only:
        claims.append(CLAIMS[name](bench))
        print_claim(claims[-1])
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(claim) | {"holds": claim.holds} for claim in claims]) + "\n")
    return 0 if all(claim.holds for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())

"""The simulator against the engine: step times are measured, then the same workloads served by both.

``python bench/simulator_accuracy.py [--only poisson,closed,prefixes] [--json FILE] [--steps FILE]``

Prints TTFT p50 and ITL p50, predicted and measured; exit status 0 only if every prediction is within 15%. Step times
are those of ``jaxinfer bench steps``, measured in this run (before and after the workloads, the median of both, as
machines drift) or read from a file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _serving import serve_on

from checkpoints import DEFAULT_MODEL
from jaxinfer.core.latency import Capacity, Summary, summarize
from jaxinfer.core.scheduler import SchedulerConfig
from jaxinfer.core.simulator import Simulator
from jaxinfer.core.timeline import Timeline, TimelineRecorder
from jaxinfer.core.workload import Workload, WorkloadSpec, random_workload
from jaxinfer.engine.build import EngineOptions, build_engine
from jaxinfer.engine.step_models import MeasuredSteps
from jaxinfer.runtime.limits import RunnerLimits

WITHIN = 0.15
OPTIONS = EngineOptions(max_slots=8, max_context=1024)
WORKLOADS = {
    "poisson": WorkloadSpec(num_prompts=32, request_rate=1.0, input_len=160, output_len=48, range_ratio=0.5),
    "closed": WorkloadSpec(num_prompts=32, max_concurrency=4, input_len=128, output_len=64, range_ratio=0.5),
    "prefixes": WorkloadSpec(
        num_prompts=32, request_rate=1.5, input_len=48, output_len=32, range_ratio=0.5, prefix_len=256, prefix_share=0.8
    ),
    "burst": WorkloadSpec(num_prompts=24, input_len=256, output_len=32, range_ratio=0.5),
}
STEPS = {
    "--batch": "1,2,4,8",
    "--context": "64,256,768",
    "--prefill": "32,64,96,128,192,256,384,512",
    "--prefill-rows": "1,8",
    "--prefill-context": "0,256",
}


@dataclass(frozen=True)
class Prediction:
    """One figure of one workload, in seconds."""

    workload: str
    figure: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def holds(self) -> bool:
        return abs(self.error) <= WITHIN


def measure_steps(model: str, rounds: int) -> dict[str, Any]:
    """What `jaxinfer bench steps --json` prints."""
    options = [part for option in STEPS.items() for part in option]
    command = [sys.executable, "-m", "jaxinfer.cli", "bench", "steps", "--json", "--model", model, *options]
    done = subprocess.run([*command, "--rounds", str(rounds)], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit("`jaxinfer bench steps` failed.")
    return json.loads(done.stdout)


def median_steps(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One run with the median times of several."""
    steps = [
        step | {name: statistics.median(other[name] for other in same) for name in ("median_s", "stream_s")}
        for step, same in zip(runs[0]["steps"], zip(*(run["steps"] for run in runs), strict=True), strict=True)
    ]
    return runs[0] | {"steps": steps}


def simulate(steps: dict[str, Any], config: SchedulerConfig, vocab_size: int, workload: Workload) -> Timeline:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(steps, file)
        file.flush()
        limits = RunnerLimits.of_scheduler(config, vocab_size)
        seconds = MeasuredSteps(file.name, limits, streamed=config.max_rounds_in_flight > 1)
    recorder = TimelineRecorder()
    Simulator(config, seconds, recorder).run(workload)
    return recorder.timeline()


def figures(timeline: Timeline, config: SchedulerConfig) -> Summary:
    return summarize(timeline, Capacity.of_scheduler(config))


def compare(name: str, predicted: Summary, measured: Summary) -> list[Prediction]:
    found = []
    for figure in ("ttft", "itl"):
        of_simulator, of_engine = getattr(predicted, figure), getattr(measured, figure)
        if of_simulator is None or of_engine is None:
            raise SystemExit(f"The workload {name} has no {figure}.")
        found.append(Prediction(name, f"{figure} p50", of_simulator.p50, of_engine.p50))
    return found


def print_predictions(predictions: list[Prediction]) -> None:
    print(f"{'workload':12}{'figure':10}{'predicted ms':>14}{'measured ms':>13}{'error':>8}")
    for each in predictions:
        times = f"{1e3 * each.predicted:>14.1f}{1e3 * each.measured:>13.1f}"
        verdict = "pass" if each.holds else "FAIL"
        print(f"{each.workload:12}{each.figure:10}{times}{100 * each.error:>+7.1f}%  {verdict}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The simulator against the engine.")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--only", default=",".join(WORKLOADS), help=f"of {','.join(WORKLOADS)}, with commas between")
    parser.add_argument("--rounds", type=int, default=10, help="decode steps of each kind that are timed (10)")
    parser.add_argument("--steps", type=Path, metavar="FILE", help="step times measured before")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    options = parser.parse_args()
    options.only = options.only.split(",")
    for name in options.only:
        if name not in WORKLOADS:
            parser.error(f"there is no workload {name!r}; they are {', '.join(WORKLOADS)}")
    return options


def main() -> int:
    options = parse_options()
    given = [] if options.steps is None else [json.loads(options.steps.read_text(encoding="utf-8"))]
    runs = given or [measure_steps(options.model, options.rounds)]
    built = build_engine(options.model, OPTIONS)
    vocab_size = built.runner.limits.vocab_size
    served = {}
    for name in options.only:
        workload = random_workload(WORKLOADS[name], vocab_size)
        served[name] = workload, serve_on(built, OPTIONS, workload)
    if not given:
        runs.append(measure_steps(options.model, options.rounds))
    steps, predictions, summaries = median_steps(runs), [], {}
    for name, (workload, run) in served.items():
        predicted = figures(simulate(steps, run.config, vocab_size, workload), run.config)
        measured = figures(run.timeline, run.config)
        predictions += compare(name, predicted, measured)
        summaries[name] = {"predicted": asdict(predicted), "measured": asdict(measured)}
    print_predictions(predictions)
    if options.json is not None:
        results = [asdict(each) | {"error": each.error, "holds": each.holds} for each in predictions]
        options.json.write_text(json.dumps({"results": results, "summaries": summaries, "steps": steps}) + "\n")
    return 0 if all(each.holds for each in predictions) else 1


if __name__ == "__main__":
    sys.exit(main())

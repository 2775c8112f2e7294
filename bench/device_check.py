"""What only the GPU can tell, in one short run: are the kernels right, how fast are they, how fast is a step.

    python bench/device_check.py [--json FILE] [--minutes 5] [--only checks,kernels,steps]

Needs a Hopper GPU, jax, flax and numpy; no network, no checkpoint, no installation of jaxinfer. Prints every result as
soon as it is there. Sections run in processes of their own: a kernel that crashes or hangs is reported in a line, its
process is ended, and a new one goes on after it. `--dry-run-cpu` runs the same code on a CPU with small shapes and XLA
in place of the kernels.

The limits are measured first: a copy of 2 GiB (bytes read and written) and a product of square bf16 matrices. Goals: a
decode step moves its least bytes at 85% of that bandwidth, a prefill step computes at 70% of that rate. Steps are
timed in a stream (dispatched back to back, waited for once: the device's time) and one by one as the engine runs them.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = ("checks", "kernels", "steps")
SHARES = {"checks": 0.35, "kernels": 0.6, "steps": 1.0}
"""When each section must end, as a part of all the time."""
SILENCE_S = {"device": 90, "checks": 90, "kernels": 45, "steps": 150}
"""Seconds without a word after which a process counts as hung."""
MOST_RESTARTS = 6
DECODE_GOAL, PREFILL_GOAL = 0.85, 0.70
GPU_KERNELS = "pallas_mosaic_gpu"

LLAMA_3_8B: dict[str, Any] = json.loads((ROOT / "examples" / "llama-3-8b.json").read_text())
TINY = LLAMA_3_8B | {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
}


@dataclass(frozen=True)
class Plan:
    """What one run measures. attention: the lowering; rates: [bytes/s, FLOP/s] once they are known."""

    dry: bool
    attention: str
    rates: tuple[float, float] | None = None
    model: dict[str, Any] = field(default_factory=lambda: LLAMA_3_8B)
    batches: tuple[int, ...] = (1, 16, 64)
    contexts: tuple[int, ...] = (512, 4096)
    prefills: tuple[int, ...] = (512, 2048)
    decode_steps: int = 32
    prefill_steps: int = 8


FULL = Plan(dry=False, attention=GPU_KERNELS)
DRY = Plan(True, "auto", None, TINY, (1, 2, 4), (16, 64), (16, 32), 4, 2)


# --- the parent: starts sections, prints, keeps the time -------------------------------------------------------------


class Report:
    """All results so far; every addition is printed and the file written anew."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.results: dict[str, Any] = {"device": None, **{section: [] for section in SECTIONS}, "problems": []}
        self.begin = time.monotonic()

    def add(self, section: str, line: str, result: Any) -> None:
        if section == "device":
            self.results["device"] = result
        else:
            self.results[section].append(result)
        self._tell(line)

    def problem(self, section: str, sentence: str) -> None:
        self.results["problems"].append({"section": section, "problem": sentence})
        self._tell(f"PROBLEM in {section}: {sentence}")

    def _tell(self, line: str) -> None:
        print(f"[{time.monotonic() - self.begin:5.1f} s] {line}", flush=True)
        if self.path is not None:
            whole = self.path.with_name(self.path.name + ".new")
            whole.write_text(json.dumps(self.results, indent=1), encoding="utf-8")
            whole.replace(self.path)


class Child:
    """A process that runs one section from item `first` on; its messages come in a queue, None at its end."""

    def __init__(self, section: str, plan: Plan, first: int, seconds: float) -> None:
        self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - lives as long as the process
        command = [sys.executable, __file__, "--section", section, "--first", str(first), "--seconds", f"{seconds:.0f}"]
        environment = {**os.environ, **({"JAX_PLATFORMS": "cpu"} if plan.dry else {}), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [*command, "--plan", json.dumps(asdict(plan))],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
        )
        self.messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # libraries may print too
                self.messages.put(json.loads(line))
        self.messages.put(None)

    def end(self) -> str:
        """End the process; how it ended, with the last line that it left on standard error."""
        self.process.kill()
        code = self.process.wait()
        self.log.seek(0)
        lines = [line.strip() for line in self.log if line.strip()]
        self.log.close()
        return f"exit code {code}" + (f": {lines[-1][:300]}" if lines else "")


def run_section(section: str, plan: Plan, report: Report, deadline: float) -> int:
    """Run a section to its end or until `deadline` (time.monotonic); the number of its results."""
    first, results = 0, 0
    for _ in range(1 + MOST_RESTARTS):
        child, running, whole = Child(section, plan, first, deadline - time.monotonic()), None, False
        reason = ""
        while True:
            patience = min(SILENCE_S[section], deadline + 5 - time.monotonic())
            try:
                message = child.messages.get(timeout=max(0.1, patience))
            except queue.Empty:
                reason = "out of time" if time.monotonic() > deadline else "no answer, taken for hung"
                break
            if message is None:
                break
            if message["kind"] == "start":
                running = message
            elif message["kind"] == "result":
                report.add(section, message["line"], message["result"])
                results, running = results + 1, None
            elif message["kind"] == "end":
                whole = True
                if message["problem"]:
                    report.problem(section, message["problem"])
        ending = child.end()
        if whole:
            return results
        where = f"{running['name']}: " if running else ""
        report.problem(section, where + (reason or ending))
        if running is None or time.monotonic() > deadline - 15:
            return results
        first = running["item"] + 1
    return results


def run_all(plan: Plan, report: Report, sections: tuple[str, ...], seconds: float) -> int:
    """Exit code: 0 when every kernel is right and no section had a problem, 1 otherwise, 2 when there is no device."""
    begin = time.monotonic()
    if run_section("device", plan, report, begin + min(120, seconds)) == 0:
        return 2
    device = report.results["device"]
    plan = replace(plan, rates=(device["bandwidth"], device["flops_per_s"]))
    for section in sections:
        run_section(section, plan, report, begin + SHARES[section] * seconds)
        timed = any("part_of_limit" in step for step in report.results["steps"])
        left = begin + seconds - time.monotonic()
        if section == "steps" and not timed and plan.attention == GPU_KERNELS and left > 60:
            report.problem(section, "no step ran with the GPU kernels; XLA's attention in their place.")
            run_section(section, replace(plan, attention="xla"), report, begin + seconds)
    wrong = [check["name"] for check in report.results["checks"] if not check["ok"]]
    print(
        f"{len(report.results['checks'])} kernel cases, {len(wrong)} wrong; {len(report.results['problems'])} problems"
    )
    return 1 if wrong or report.results["problems"] else 0


# --- the children: one section each ----------------------------------------------------------------------------------


def tell(kind: str, **content: Any) -> None:
    print(json.dumps({"kind": kind, **content}), flush=True)


def section_device(plan: Plan, first: int) -> Iterator[tuple[str, Any]]:
    import jax

    from jaxinfer.engine.device_rates import measure_rates

    device = jax.devices()[0]
    if device.platform != "gpu" and not plan.dry:
        raise SystemExit(f"jax finds no GPU here, only {device.device_kind}; --dry-run-cpu needs none.")
    tell("start", item=0, name="rates")
    rates = measure_rates("bfloat16")
    result = {
        "kind": device.device_kind,
        "jax": jax.__version__,
        "bandwidth": rates.bandwidth,
        "bandwidth_measured_as": rates.method,
        "flops_per_s": rates.flops,
    }
    yield (
        f"{device.device_kind}, jax {jax.__version__}: {rates.bandwidth / 1e12:.3f} TB/s ({rates.method}), "
        f"{rates.flops / 1e12:.1f} bf16 TFLOP/s",
        result,
    )


def section_checks(plan: Plan, first: int) -> Iterator[tuple[str, Any]]:
    from bench._device_kernels import KernelCheck, all_checks, run_checks

    item = first
    for outcome in run_checks(all_checks()[first:], plan.attention):
        if isinstance(outcome, KernelCheck):
            verdict = "ok   " if outcome.ok else "WRONG"
            yield f"{verdict} {outcome.name} {outcome.error:.1e} {outcome.note}".rstrip(), asdict(outcome)
            item += 1
        else:
            tell("start", item=item, name=outcome.name)


def section_kernels(plan: Plan, first: int) -> Iterator[tuple[str, Any]]:
    from jaxinfer.engine.kernel_times import shapes_for, time_kernel

    for item, shape in enumerate(shapes_for("cpu" if plan.dry else "gpu")[first:], first):
        tell("start", item=item, name=shape.name)
        timed = time_kernel(shape, rates_of(plan), plan.attention)
        cost, us = shape.cost, 1e6 * timed.seconds
        line = (
            f"{shape.name} ({timed.choice.name}): {us:.1f} us, {cost.bytes / us / 1e6:.3f} TB/s, "
            f"{cost.flops / us / 1e6:.1f} TFLOP/s, {100 * timed.fraction:.0f}% of the {timed.bound} limit"
        )
        yield line, asdict(timed) | {"fraction": timed.fraction, "bytes": cost.bytes, "flops": cost.flops}


def section_steps(plan: Plan, first: int) -> Iterator[tuple[str, Any]]:
    from jaxinfer.engine import step_times

    begin = time.monotonic()
    timer = step_times.StepTimer.with_random_weights(config_of(plan), sizes_of(plan))
    rates = rates_of(plan)
    seconds = time.monotonic() - begin
    yield f"weights made, programs compiled in {seconds:.1f} s", {"ready_s": seconds, "attention": plan.attention}
    items = [("decode", batch, context) for context in plan.contexts for batch in plan.batches]
    items = [*(("prefill", 1, tokens) for tokens in plan.prefills), *items]
    for item, (kind, batch, length) in enumerate(items[first:], first):
        tell("start", item=item, name=f"{kind} {batch} x {length}")
        if kind == "prefill":
            step = step_times.measure_prefill(timer, rates, length, plan.prefill_steps)
            part, goal, of = step.cost.flops / step.stream_s / rates.flops, PREFILL_GOAL, "matrix rate"
        else:
            step = step_times.measure_decode(timer, rates, batch, length, plan.decode_steps)
            part, goal, of = step.cost.bytes / step.stream_s / rates.bandwidth, DECODE_GOAL, "copy bandwidth"
        met = "met" if part >= goal else "MISSED"
        line = (
            f"{kind} {batch} x {length}: stream {1e3 * step.stream_s:.3f} ms, one by one {1e3 * step.median_s:.3f} ms, "
            f"floor {1e3 * step.floor_s:.3f} ms; {100 * part:.0f}% of the {of} (goal {100 * goal:.0f}%: {met})"
        )
        yield line, asdict(step) | {"part_of_limit": part, "goal": goal, "attention": plan.attention}


def rates_of(plan: Plan) -> Any:
    from jaxinfer.engine.device_rates import DeviceRates

    assert plan.rates is not None, "the device section comes first"
    return DeviceRates(*plan.rates, "measured before")


def config_of(plan: Plan) -> Any:
    from jaxinfer.models import family_of

    config = family_of(plan.model).decoder(plan.model)
    return config.replace(dtype="bfloat16", attention=plan.attention)


def sizes_of(plan: Plan) -> Any:
    from jaxinfer.engine.step_times import TimerSizes

    return TimerSizes(tuple(plan.batches), tuple(plan.contexts), tuple(plan.prefills))


def do_without_checkpoints() -> None:
    """Where packages of the checkpoint readers are missing, let the engine be imported all the same.

    It names their types; nothing is read here.
    """
    try:
        import checkpoints  # noqa: F401
    except ModuleNotFoundError:
        stand_in = types.ModuleType("checkpoints")
        stand_in.__getattr__ = lambda name: Any
        sys.modules["checkpoints"] = stand_in


def run_child(section: str, plan: Plan, first: int, seconds: float) -> int:
    """Run one section, telling of every item before it starts and after it ended."""
    deadline = time.monotonic() + seconds
    run = {"device": section_device, "checks": section_checks, "kernels": section_kernels, "steps": section_steps}
    for line, result in run[section](plan, first):
        tell("result", line=line, result=result)
        if time.monotonic() > deadline:
            tell("end", problem="out of time; what was left is not measured.")
            return 0
    tell("end", problem="")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there, anew with each one")
    parser.add_argument("--minutes", type=float, default=5.0, help="stop within this time (5)")
    parser.add_argument(
        "--only", default=",".join(SECTIONS), metavar="NAMES", help=f"sections, of {','.join(SECTIONS)}"
    )
    parser.add_argument("--dry-run-cpu", action="store_true", help="the same code on a CPU, with small shapes")
    for name, kind in (("--section", str), ("--plan", str), ("--first", int), ("--seconds", float)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.section:
        sys.path.insert(0, str(ROOT))
        do_without_checkpoints()
        return run_child(options.section, Plan(**json.loads(options.plan)), options.first, options.seconds)
    sections = tuple(options.only.split(","))
    if not set(sections) <= set(SECTIONS):
        parser.error(f"--only takes {', '.join(SECTIONS)}")
    plan = DRY if options.dry_run_cpu else FULL
    return run_all(plan, Report(options.json), sections, 60 * options.minutes - 10)


if __name__ == "__main__":
    sys.exit(main())

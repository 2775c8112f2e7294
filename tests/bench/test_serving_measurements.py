"""What the serving comparisons make of their measurements: workloads, ratios, verdicts and exit status."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import compare_serving
import serving_claims
import simulator_accuracy
from compare_serving import Generation, Measures, SideSpec
from serving_claims import Bench, Claim
from simulator_accuracy import Prediction

from jaxinfer.core.latency import Distribution, Summary
from jaxinfer.core.scheduler import SchedulerConfig
from jaxinfer.core.workload import Workload, WorkloadRequest

# --- compare_serving -------------------------------------------------------------------------------------------------


def test_requests_are_the_same_every_time_and_within_their_lengths():
    measures = Measures.make(1000, 2000)
    assert measures == Measures.make(1000, 2000)
    lengths = [len(prompt) for prompt in measures.serving.prompts]
    assert (min(lengths), max(lengths)) == (32, 256)
    assert (min(measures.serving.tokens), max(measures.serving.tokens)) == (16, 128)
    assert max(token for prompt in measures.serving.prompts for token in prompt) < 1000
    # The steps that the long output has more than the one token see 128 positions on average.
    (prompt,) = measures.long_output.prompts
    seen = [len(prompt) + step for step in range(1, compare_serving.LONG_OUTPUT)]
    assert sum(seen) / len(seen) == pytest.approx(compare_serving.AT_CONTEXT, abs=1)
    assert [len(prompt) for prompt in measures.long_prompt.prompts] == [512]


class FakeSide:
    """Takes a second for a prompt and 0.1 for each token, and tells when it works or rests."""

    def __init__(self, name: str, slowness: float, log: list[str]) -> None:
        self.name, self.slowness, self.log = name, slowness, log

    def ask(self, request):
        seconds = sum(1 + 0.1 * count for count in request["tokens"])
        return {"seconds": self.slowness * seconds, "ids": [[self.slowness] * count for count in request["tokens"]]}

    def resume(self) -> None:
        self.log.append(self.name)

    def pause(self) -> None:
        self.log.append("")


SPECS = [SideSpec(f"{name} float32", "float32", (), {}, name != "other") for name in ("jaxinfer", "vLLM", "other")]


def test_rates_ratios_and_order():
    log: list[str] = []
    sides = {spec.name: FakeSide(spec.name, slowness, log) for spec, slowness in zip(SPECS, (1, 2, 1), strict=True)}
    measures = Measures.make(100, 3)
    rates, ids = compare_serving.interleave(sides, SPECS, measures, 2)  # pyright: ignore[reportArgumentType]
    names = [spec.name for spec in SPECS]
    assert log[::2] == [*names[::-1], *names, *names[::-1]]
    assert set(log[1::2]) == {""}  # each rests before the next one works
    assert [len(values) for values in rates["vLLM float32"].values()] == [2, 2, 2]
    summary = compare_serving.summarise(SPECS, rates, {spec.name: [9.0, 3.14159] for spec in SPECS}, ids)
    assert summary["vLLM float32"]["ratios"] == {"serving": 2, "decode": 2, "prefill": 2}
    assert summary["vLLM float32"]["identical requests"] == 0
    assert summary["other float32"]["ratios"] == {"serving": 1}
    assert summary["other float32"]["identical requests"] == 3
    assert summary["jaxinfer float32"]["decode"]["median"] == pytest.approx(10)
    assert summary["jaxinfer float32"]["starts_s"] == [9.0, 3.14]
    assert "starts_s" not in summary["other float32"]


def test_only_what_was_asked_for_counts():
    measures = replace(Measures.make(100, 1), serving=Generation(((1,), (2,)), (30, 10)))
    rates, _ = compare_serving.measure(FakeSide("", 1, []), SPECS[2], measures)  # pyright: ignore[reportArgumentType]
    assert rates == {"serving": pytest.approx(40 / 6)}


def test_sides_are_those_with_an_interpreter():
    options = Namespace(
        dtypes=["float32", "bfloat16"], slots=8, vllm_python="v", vllm_threads_bind="0-1", transformers_python="t",
        threads=2,
    )  # fmt: skip
    specs = compare_serving.side_specs(options, Path("m"))
    assert [spec.name for spec in specs] == [
        "jaxinfer float32",
        "vLLM float32",
        "jaxinfer bfloat16",
        "vLLM bfloat16",
        "transformers static",
        "transformers continuous",
    ]
    assert {spec.command[spec.command.index("--dtype") + 1] for spec in specs if spec.dtype == "bfloat16"} == {
        "bfloat16"
    }
    alone = compare_serving.side_specs(
        Namespace(**vars(options) | {"vllm_python": None, "transformers_python": None}), Path("m")
    )
    assert {spec.engine for spec in alone} == {"jaxinfer"}


# --- serving_claims --------------------------------------------------------------------------------------------------


def claim(value: float, wanted: float, at_most: bool) -> Claim:
    return Claim("a", "about", value, wanted, at_most, {"with": [1.0, 2.0]})


@pytest.mark.parametrize(("value", "at_most", "holds"), [(0.2, True, True), (0.3, True, False), (0.3, False, True)])
def test_a_claim_holds_on_its_side_of_the_threshold(value, at_most, holds):
    assert claim(value, 0.25, at_most).holds == holds


@pytest.mark.parametrize(("values", "status"), [((0.2, 0.1), 0), ((0.2, 0.9), 1), ((0.9, 0.2), 1)])
def test_the_exit_status_says_whether_all_hold(monkeypatch, capsys, tmp_path, values, status):
    claims = {str(index): lambda bench, value=value: claim(value, 0.25, True) for index, value in enumerate(values)}
    monkeypatch.setattr(serving_claims, "CLAIMS", claims)
    monkeypatch.setattr(sys, "argv", ["serving_claims.py", "--only", "0,1", "--json", str(tmp_path / "out.json")])
    assert serving_claims.main() == status
    printed = capsys.readouterr().out
    assert printed.count("FAIL") == sum(value > 0.25 for value in values)
    assert [entry["value"] for entry in json.loads((tmp_path / "out.json").read_text())] == list(values)


def test_sides_alternate_and_ratios_are_of_the_same_round():
    order: list[str] = []

    def side(name: str, values: list[float]):
        def run() -> float:
            order.append(name)
            return values.pop(0)

        return run

    measured = Bench("m", 3).alternate({"a": side("a", [1.0, 4.0, 9.0]), "b": side("b", [2.0, 2.0, 3.0])})
    assert "".join(order) == "baabba"
    assert serving_claims.ratio(measured["a"], measured["b"]) == 2.0


def test_workloads_of_the_claims():
    long = serving_claims.long_among_decoding(100)
    assert [len(request.prompt_ids) for request in long.requests] == [64] * 4 + [2048]
    assert [request.arrival for request in long.requests] == [0.0] * 4 + [1.0]
    mixed = serving_claims.mixed_lengths(300, 100)
    outputs = sorted(request.output_tokens for request in mixed.requests)
    assert 8 <= outputs[0] < 12
    assert 200 < outputs[-1] <= 256
    assert 40 < outputs[150] < 52  # log-uniform: the median is the geometric mean


# --- simulator_accuracy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("predicted", "holds"), [(1.14, True), (1.16, False), (0.86, True), (0.84, False)])
def test_a_prediction_holds_within_15_percent(predicted, holds):
    assert Prediction("w", "ttft p50", 2 * predicted, 2.0).holds == holds


def steps(factor: float):
    sizes = (("prefill", 1, 64, 0), ("decode", 1, 1, 8))
    return {
        "steps": [
            {"kind": kind, "batch": batch, "tokens": tokens, "context": context}
            | {"median_s": 5.0, "stream_s": factor * seconds}
            for (kind, batch, tokens, context), seconds in zip(sizes, (0.5, 0.1), strict=True)
        ]
    }


@pytest.mark.parametrize("ahead", [False, True])
def test_a_simulation_by_measured_steps(ahead):
    config = SchedulerConfig(
        max_slots=2, page_size=16, num_pages=20, max_context=128, max_batched_tokens=64, max_prefill_rows=2,
        max_rounds_in_flight=1 + ahead,
    )  # fmt: skip
    workload = Workload((WorkloadRequest("0", 0.0, (1,) * 64, 4),))
    times = simulator_accuracy.median_steps([steps(1.0), steps(3.0)])
    summary = simulator_accuracy.figures(simulator_accuracy.simulate(times, config, 100, workload), config)
    assert summary.ttft is not None
    assert summary.itl is not None
    assert (summary.ttft.p50, summary.itl.p50) == pytest.approx((1.0, 0.2) if ahead else (5.0, 5.0))


def test_predictions_compare_medians():
    def summary(ttft: float, itl: float) -> Summary:
        empty = dict.fromkeys(Summary.__dataclass_fields__)
        figures = {"ttft": Distribution(1, 0, ttft, 0, 0), "itl": Distribution(1, 0, itl, 0, 0)}
        return Summary(**empty | figures)  # pyright: ignore[reportArgumentType]

    found = simulator_accuracy.compare("w", summary(1.1, 0.5), summary(1.0, 1.0))
    assert [(each.figure, pytest.approx(each.error), each.holds) for each in found] == [
        ("ttft p50", 0.1, True),
        ("itl p50", -0.5, False),
    ]

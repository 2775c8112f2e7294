"""`jaxinfer simulate`: step times of a chip and of a file, the example, and mistakes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan import LLAMA_3_8B, SMOLLM2_135M, decoder

from jaxinfer.cli import main
from jaxinfer.core.simulator import RoundShape
from jaxinfer.engine.step_models import MeasuredSteps, RooflineSteps
from jaxinfer.runtime.chips import parse_target
from jaxinfer.runtime.cost import StepCost, decode_cost, prefill_cost, weight_bytes_read
from jaxinfer.runtime.limits import RunnerLimits

SMALL = decoder(SMOLLM2_135M | {"num_hidden_layers": 3})
WINDOWED = SMALL.replace(windows=(4, None, 9))
LIMITS = RunnerLimits(
    max_slots=8, page_size=16, num_pages=100, max_context=512, max_batched_tokens=512, max_prefill_rows=8, vocab_size=9
)


@pytest.fixture
def config_file(tmp_path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_8B))
    return str(path)


@pytest.fixture
def steps_file(tmp_path):
    def write(*steps, about=(), **changes) -> str:
        entries = [
            {"kind": kind, "batch": batch, "tokens": tokens, "context": context}
            | {"median_s": seconds, "stream_s": 0.9 * seconds}
            | changes
            for kind, batch, tokens, context, seconds in steps
        ]
        path = tmp_path / "steps.json"
        path.write_text(json.dumps({"model": "m", "steps": entries} | dict(about)))
        return str(path)

    return write


STEPS = (
    ("prefill", 1, 128, 0, 0.1),
    ("prefill", 1, 512, 0, 0.5),
    ("decode", 1, 1, 100, 0.010),
    ("decode", 1, 1, 300, 0.020),
    ("decode", 8, 1, 100, 0.040),
    ("decode", 8, 1, 300, 0.080),
)


@pytest.mark.parametrize("config", [SMALL, WINDOWED], ids=["full", "windows"])
@settings(max_examples=20, deadline=None)
@given(batch=st.integers(1, 9), context=st.integers(0, 30), tokens=st.integers(1, 30))
def test_roofline_counts_what_the_floors_count(config, batch, context, tokens):
    steps = RooflineSteps(config, parse_target("h100"), 1)
    decode, prefill = decode_cost(config, batch, context), prefill_cost(config, tokens, context)
    assert steps.cost([context] * batch, ()) == decode
    assert steps.cost((), [(context, tokens)]) == prefill
    both = steps.cost([context] * batch, [(context, tokens)])
    # Together they read the weights once; all other work is the sum.
    weights = weight_bytes_read(config)
    assert both == StepCost(decode.bytes + prefill.bytes - weights, decode.flops + prefill.flops)


def test_roofline_of_a_round():
    chip = parse_target("v6e-4").chip
    steps = RooflineSteps(SMALL, parse_target("v6e-4"), 4, floor_ratio=2.0)
    expected = 2 * steps.cost((10, 10), ((3, 7),)).floor_seconds(4 * chip.bandwidth, 4 * chip.flops)
    assert steps(RoundShape((10, 10), ((3, 7),))) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("shape", "seconds"),
    [
        (RoundShape((100,), ()), 0.010),
        (RoundShape((200,), ()), 0.015),
        (RoundShape((50,), ()), 0.010),
        (RoundShape((400,), ()), 0.025),
        (RoundShape((50, 150, 100, 100, 100), ()), 0.040),  # five run in the batch shape of eight
        (RoundShape((300, 100, 200), ()), 0.015 + 0.045 * 3 / 7),  # three in that of four, at the mean context
        (RoundShape((), ((0, 512),)), 0.5),
        (RoundShape((), ((0, 200),)), 0.1 + 0.4 * 128 / 384),  # in the batch shape of 256
        (RoundShape((), ((0, 1),)), 0.010 + 0.09 * 31 / 127),  # in that of 32, one token as one decode
        (RoundShape((100,), ((0, 512),)), 0.51),
        (RoundShape((100,) * 3, ((0, 123),)), 0.1 + 0.010 + 0.03 * 3 / 7),  # fewer than half of the decodes: alone
        (RoundShape((100,) * 5, ((0, 123),)), 0.1 + 100 * 0.040 / 200),  # together, as 128 tokens
        (RoundShape((100,) * 5, ((0, 124),)), 0.1 + 0.4 * 64 / 384 + 100 * 0.040 / 200),  # as 192
        (RoundShape((100,) * 5, ((0, 188),)), 0.1 + 0.4 * 64 / 384 + 0.040),  # too many tokens: alone
    ],
)
def test_measured_steps(steps_file, shape, seconds):
    assert MeasuredSteps(steps_file(*STEPS), LIMITS)(shape) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("device", "shape", "seconds"),
    [
        ("NVIDIA H200", RoundShape((100,) * 3, ((0, 125),)), 0.1 + 0.010 + 0.03 * 3 / 7),  # fewer than half: alone
        ("NVIDIA H200", RoundShape((100,) * 4, ((0, 508),)), 0.5 + 100 * (0.05e-3 + 0.15e-3 * 3 / 7)),  # four rows
        ("TPU v6 lite", RoundShape((100,), ((0, 511),)), 0.5 + 100 * 0.05e-3),
    ],
)
def test_measured_steps_of_accelerators(steps_file, device, shape, seconds):
    steps = MeasuredSteps(steps_file(*STEPS, about={"device": device}), LIMITS)
    assert steps(shape) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("shape", "seconds"),
    [
        (RoundShape((), ((300, 512),)), 0.5 + 0.2),
        (RoundShape((), ((150, 512),)), 0.5 + 0.1),
        (RoundShape((), ((900, 512),)), 0.5 + 0.6),
        (RoundShape((), ((300, 128),)), 0.1 + 0.05),
        (RoundShape((), ((300, 40),)), 0.010 + 0.09 * 63 / 127 + 0.05),  # as for the fewest tokens measured
        (RoundShape((), ((0, 64),) * 8), 0.5 + 0.14),
        (RoundShape((), ((0, 128),) * 4), 0.5 + 0.06),
        (RoundShape((), ((400, 128),) + ((0, 128),) * 3), 0.5 + 0.06 + 0.2 / 3),  # 100 cached positions on average
    ],
)
def test_measured_prefills_of_several_prompts_and_after_cached_positions(steps_file, shape, seconds):
    measured = (
        *STEPS,
        ("prefill", 8, 64, 0, 0.64),
        ("prefill", 1, 512, 300, 0.7),
        ("prefill", 1, 128, 300, 0.15),
        ("prefill", 8, 64, 300, 9.0),  # neither alone nor without cached positions: not used
    )
    assert MeasuredSteps(steps_file(*measured), LIMITS)(shape) == pytest.approx(seconds)


def run_json(capsys, *arguments) -> dict:
    assert main(["simulate", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("options", "factor"), [((), 0.9), (("--no-async-scheduling",), 1.0)])
def test_measured_run(steps_file, capsys, options, factor):
    found = run_json(
        capsys,
        *options,
        *("--steps", steps_file(*STEPS), "--num-prompts", "1"),
        *("--random-input-len", "512", "--random-output-len", "3"),
    )
    # The decodes see 512 and 513 positions: 10 ms and 10 more for each 200 above 100.
    assert found["itl"]["mean"] == pytest.approx(factor * (0.010 + 0.010 * 412.5 / 200))
    assert found["ttft"]["p50"] == pytest.approx(factor * 0.5)


def test_roofline_run(config_file, capsys, tmp_path):
    outputs = ("--report", str(tmp_path / "out.html"), "--trace", str(tmp_path / "out.json"))
    arguments = ("--target", "h100", "--config", config_file, "--num-prompts", "3", *outputs, "--slo", "itl:4ms")
    found = run_json(capsys, *arguments)
    floor = decode_cost(decoder(LLAMA_3_8B), 3, 256).floor_seconds(3350e9, 989e12)
    assert found["itl"]["p50"] == pytest.approx(floor, rel=0.02)
    assert found["good"] == 0
    assert found["step times"] == "1 x the least of h100-1"
    assert "Simulation of 3 requests" in (tmp_path / "out.html").read_text()
    assert json.loads((tmp_path / "out.json").read_text())["traceEvents"]


def test_pages_behind_the_window_are_given_back_as_the_engine_does(tmp_path, capsys):
    windowed = LLAMA_3_8B | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 64}
    path = tmp_path / "windowed.json"
    path.write_text(json.dumps(windowed))
    arguments = ("--num-prompts", "1", "--random-input-len", "900", "--random-output-len", "100", "--num-pages", "50")
    found = run_json(capsys, "--target", "h100", "--config", str(path), *arguments)
    assert found["output_tokens"] == 100  # 1,000 positions in 49 pages of 16


def test_same_workload_same_hash(capsys):
    first, again = (run_json(capsys, "--num-prompts", "3", "--mode", mode) for mode in ("static", "continuous"))
    assert first["workload"] == again["workload"]
    assert run_json(capsys, "--num-prompts", "3", "--seed", "1")["workload"] != first["workload"]


def test_policies_reach_the_scheduler(capsys):
    shared = ("--num-prompts", "4", "--random-prefix-len", "64", "--max-concurrency", "1")
    assert run_json(capsys, *shared)["hit_rate"] > 0.1
    assert run_json(capsys, *shared, "--no-enable-prefix-caching")["hit_rate"] == 0
    tight = ("--num-prompts", "8", "--num-pages", "50", "--random-output-len", "256")
    assert run_json(capsys, *tight)["preemptions"] > 0
    assert run_json(capsys, *tight, "--reserve-full")["preemptions"] == 0
    assert run_json(capsys, *tight, "--mode", "static", "--reserve-full")["bottleneck"]["name"] == "static waves"


def test_figures_in_words(capsys):
    assert main(["simulate", "--num-prompts", "3", "--slo", "ttft:5s"]) == 0
    printed = capsys.readouterr().out
    # The third prompt comes into the second round, and has its 64 tokens after the 65th.
    assert "3 of 3 requests complete in 65:" in printed
    assert "Within the objective: 3, a goodput of 0.04615 requests/tick." in printed
    assert "Bottleneck: decode: rounds with prefill took 3%" in printed


def test_dataset(tmp_path, capsys):
    dataset = tmp_path / "requests.jsonl"
    dataset.write_text('{"input_tokens": 5, "output_tokens": 2}\n{"prompt_token_ids": [1, 2], "output_tokens": 4}\n')
    found = run_json(capsys, "--dataset-path", str(dataset))
    assert (found["prompt_tokens"], found["output_tokens"]) == (7, 6)


def test_example(capsys, tmp_path):
    assert main(["simulate", "--example", "--report", str(tmp_path / "out.html")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "continuous batching, chunked prefill, no prefix cache 0, 3 2, 4 4, 5 6" in printed
    assert "1 decode -> token prefill 7 8 5 0" in printed
    assert (tmp_path / "out.html").read_text().count("<section>") == 8
    (first, *_, last) = run_json(capsys, "--example")
    assert first["first_and_last_tick"] == {"A": [0, 3], "B": [4, 7], "C": [5, 6]}
    assert last["ticks"][1]["B"] == "prefill 4 (4 cached) -> token"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--slo", "fast"), "'fast' is no objective"),
        (("--request-rate", "0"), "request_rate must be above 0"),
        (("--random-range-ratio", "2"), "range_ratio must be between 0 and 1"),
        (("--steps", "a", "--target", "h100"), "not both"),
        (("--steps", "/nowhere.json"), "/nowhere.json: No such file or directory."),
        (("--dataset-path", "/nowhere.jsonl"), "/nowhere.jsonl: No such file or directory."),
        (("--target", "magic"), "no target 'magic'"),
        (("--target", "h100", "--floor-ratio", "nan"), "--floor-ratio must be above 0"),
        (("--num-pages", "1"), "num_pages must be at least 2"),
        (("--report", "/nowhere/out.html"), "/nowhere/out.html: No such file or directory."),
        (("--random-input-len", "3000"), "Every request was refused, the first with: The request has 3000"),
        (("--random-input-len", "9" * 400), "more than 64 bits"),
        (("--random-output-len", "1000000000000"), "output_len must be 1 to 16777216"),
        (("--num-prompts", "1000000000000"), "num_prompts must be"),
        (("--num-prompts", "500000000", "--random-prefix-len", "8"), "The prompts have 132000000000 tokens together"),
        (("--request-rate", "1e-320"), "would take more than 1e+09 s"),
        (("--request-rate", "1e300", "--burstiness", "1e300"), "burstiness must be at most 1e+09"),
        (("--dataset-path", "/dev/zero"), "Line 1 of the dataset is longer than 16777216 characters"),
        (("--steps", "/dev/zero"), "/dev/zero is longer than"),
        (("--steps", ""), "Is a directory"),
        (("--report", "/"), "/: Is a directory"),
        (("--report", "same", "--trace", "./same"), "give two files"),
        (("--steps", "a", "--report", "./a"), "a is read and would be overwritten"),
        (("--config", "c"), "--config changes nothing without --target"),
        (("--steps", "a", "--floor-ratio", "2"), "--floor-ratio changes nothing without --target"),
        (("--example", "--max-slots", "4"), "--max-slots changes nothing with --example"),
        (("--dataset-path", "d", "--prefix-share", "0.5"), "--prefix-share changes nothing with --dataset-path"),
    ],
)
def test_mistakes(capsys, arguments, named):
    assert main(["simulate", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert named in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"steps": 3}', '{"steps": [{"kind": "decode"}]}', "[" * 100_000, '{"steps": []}']
)
def test_files_that_are_no_steps(tmp_path, capsys, text):
    path = tmp_path / "steps.json"
    path.write_text(text)
    assert main(["simulate", "--steps", str(path)]) == 2
    assert "steps.json" in capsys.readouterr().err


def test_a_prefill_of_one_token_alone(steps_file, capsys):
    steps = steps_file(("prefill", 1, 1, 0, 0.5), ("decode", 1, 1, 100, 0.010))
    found = run_json(capsys, "--steps", steps, "--num-prompts", "1", "--random-output-len", "3")
    assert found["itl"]["mean"] == pytest.approx(0.009)


@pytest.mark.parametrize("output", ["40", "41"])
def test_a_request_whose_output_would_be_cut_is_refused(capsys, output):
    arguments = ("--random-input-len", "8", "--random-output-len", output, "--num-prompts", "1", "--max-context", "48")
    if output == "40":
        assert run_json(capsys, *arguments)["output_tokens"] == 40
    else:
        assert main(["simulate", *arguments]) == 2
        assert "8 prompt tokens and 41 new ones, but the context holds 48" in capsys.readouterr().err


def test_prompts_that_wait_for_a_row_do_not_wait_for_pages(capsys):
    arguments = ("--num-prompts", "200", "--max-slots", "64", "--random-input-len", "4", "--random-output-len", "2")
    bottleneck = run_json(capsys, *arguments)["bottleneck"]
    assert bottleneck["name"] == "prefill rows"
    assert "with the 8 prompts that a round computes begun" in bottleneck["evidence"]


@pytest.mark.parametrize(
    "change",
    [
        {"median_s": -1},
        {"median_s": "nan"},
        {"median_s": 10**400},
        {"stream_s": 0},
        {"batch": "x"},
        {"batch": 0},
        {"batch": 10**400},
        {"tokens": 0},
        {"context": -1},
        {"context": 10**400},
    ],
)
def test_steps_with_wrong_values(steps_file, capsys, change):
    assert main(["simulate", "--steps", steps_file(*STEPS, **change)]) == 2
    assert "is not the output of `jaxinfer bench steps --json`." in capsys.readouterr().err


def test_weights_larger_than_the_chip(config_file, capsys):
    assert main(["simulate", "--target", "v5e-1", "--config", config_file, "--dtype", "float32"]) == 2
    assert "The weights leave no memory of v5e-1" in capsys.readouterr().err

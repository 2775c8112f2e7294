"""`jaxinfer bench serve` on a tiny model."""

from __future__ import annotations

import json

import pytest

from jaxinfer.cli import main

SHORT = ("--random-input-len", "12", "--random-output-len", "5")


def run_json(capsys, *arguments) -> dict:
    assert main(["bench", "serve", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_figures_trace_and_report(tiny_model, engine_builds, tmp_path, capsys):
    files = ("--trace", str(tmp_path / "out.json"), "--report", str(tmp_path / "out.html"))
    found = run_json(capsys, "--model", tiny_model, "--num-prompts", "5", *SHORT, *files, "--slo", "e2e:100s")
    assert (found["complete"], found["good"], found["preemptions"]) == (5, 5, 0)
    assert (found["prompt_tokens"], found["output_tokens"]) == (60, 25)
    assert found["itl"]["count"] == 20
    assert found["e2e"]["mean"] == pytest.approx(found["ttft"]["mean"] + 4 * found["tpot"]["mean"])
    assert 0 < found["queue"]["mean"] < found["ttft"]["mean"]
    assert found["bottleneck"]["name"]
    assert engine_builds[0].options.max_context == 17  # the longest request
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"device", "host", "slot 0", "slot 1"} <= tracks
    assert "Serving of 5 requests" in (tmp_path / "out.html").read_text()


def test_same_work_as_a_table(tiny_model, engine_builds, capsys):
    arguments = ("--model", tiny_model, "--num-prompts", "3", *SHORT, "--max-concurrency", "1")
    found = run_json(capsys, *arguments)
    assert found["queue"]["p99"] < 0.1  # a closed loop of one never waits
    assert main(["bench", "serve", *arguments, "--mode", "static"]) == 0
    printed = capsys.readouterr().out
    assert f"workload: {found['workload']};" in printed
    assert "3 of 3 requests complete in" in printed
    assert "Bottleneck: " in printed
    assert main(["simulate", "--json", "--vocab-size", "160", *arguments[2:]]) == 0
    assert json.loads(capsys.readouterr().out)["workload"] == found["workload"]
    assert [build.options.mode for build in engine_builds] == ["continuous", "static"]


def test_a_dataset_of_texts(tiny_model, engine_builds, tmp_path, capsys):
    dataset = tmp_path / "requests.jsonl"
    dataset.write_text('{"prompt": "abc", "output_tokens": 2}\n{"prompt": "hello", "output_tokens": 3}\n')
    found = run_json(capsys, "--model", tiny_model, "--dataset-path", str(dataset))
    assert found["output_tokens"] == 5
    assert found["prompt_tokens"] >= 8


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--slo", "soon"), "'soon' is no objective"),
        (("--burstiness", "0"), "burstiness must be above 0"),
        (("--report", "/nowhere/out.html"), "No such file or directory"),
        (("--dataset-path", "/nowhere.jsonl"), "/nowhere.jsonl: No such file or directory"),
        (("--random-input-len", "100000"), "the model was made for"),
        (("--max-context", "8", *SHORT), "Every request was refused, the first with: The prompt has 12 tokens"),
    ],
)
def test_mistakes(tiny_model, refusal, arguments, named):
    assert named in refusal("bench", "serve", "--model", tiny_model, "--num-prompts", "2", *arguments)

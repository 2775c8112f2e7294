"""`jaxinfer bench serve` on a tiny model."""

from __future__ import annotations

import json
import socket
import urllib.request

import pytest

from jaxinfer.cli import main
from jaxinfer.engine import Engine

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
    assert "round on the host" in printed
    assert "of a decode step and kept the device waiting" in printed
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
        (("--random-input-len", "100000"), "longer than the 256 positions of the model"),
        (("--report", "/"), "/: Is a directory"),
    ],
)
def test_mistakes(tiny_model, refusal, arguments, named):
    assert named in refusal("bench", "serve", "--model", tiny_model, "--num-prompts", "2", *arguments)


def test_when_nothing_can_be_served(tiny_model, engine_builds, refusal):
    arguments = ("--random-input-len", "100", "--random-output-len", "5")
    told = refusal("bench", "serve", "--model", tiny_model, "--num-prompts", "2", *arguments)
    assert "Every request was refused, the first with: The request has 100 prompt tokens" in told


def test_metrics_on_a_port(tiny_model, engine_builds, monkeypatch, capsys):
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ("bench", "serve", "--model", tiny_model, "--num-prompts", "3", *SHORT, "--metrics-port", str(port))
        assert main([*arguments]) == 2
        assert "Address already in use" in capsys.readouterr().err
    shown, real_step = [], Engine.step

    def step(engine):
        outputs = real_step(engine)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            shown.append(response.read().decode())
        return outputs

    monkeypatch.setattr(Engine, "step", step)
    assert main([*arguments]) == 0
    name = f'vllm:generation_tokens_total{{model_name="{tiny_model}"}}'
    assert f"{name} 0.0" in shown[0]  # the warm-up is not counted
    assert f"{name} 15.0" in shown[-1]
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics")


def test_priorities_come_with_the_dataset(tiny_model, engine_builds, tmp_path, capsys):
    dataset = tmp_path / "requests.jsonl"
    lines = [f'{{"input_tokens": 4, "output_tokens": 3, "priority": {priority}}}\n' for priority in (2, 1, 0)]
    dataset.write_text("".join(lines))
    options = ("--dataset-path", str(dataset), "--max-slots", "1", "--policy", "priority")
    trace = tmp_path / "out.json"
    found = {}
    for command in (("bench", "serve", "--model", tiny_model), ("simulate", "--vocab-size", "160")):
        assert main([*command, "--json", *options, "--trace", str(trace)]) == 0
        events = json.loads(trace.read_text())["traceEvents"]
        firsts = sorted((event["ts"], event["name"]) for event in events if event["name"].startswith("first token"))
        found[command[0]] = [name for _, name in firsts]
    assert found["simulate"] == ["first token 2", "first token 1", "first token 0"]
    assert found["bench"][-1] == "first token 0"  # this runner has two slots
    assert engine_builds[0].options.policy == "priority"


def test_a_request_longer_than_the_model_is_refused_and_the_others_are_served(
    tiny_model, engine_builds, tmp_path, capsys
):
    dataset = tmp_path / "requests.jsonl"
    dataset.write_text('\ufeff{"input_tokens": 4, "output_tokens": 300}\n{"input_tokens": 4, "output_tokens": 3}\n')
    found = run_json(capsys, "--model", tiny_model, "--dataset-path", str(dataset))
    assert (found["refused"], found["complete"], found["output_tokens"]) == ("1", 1, 3)
    assert engine_builds[0].options.max_context == 7


def test_figures_are_told_even_if_the_report_cannot_be_written(tiny_model, engine_builds, capsys):
    arguments = ("--model", tiny_model, "--num-prompts", "2", *SHORT, "--report", "/dev/full")
    assert main(["bench", "serve", *arguments]) == 2
    captured = capsys.readouterr()
    assert "2 of 2 requests complete" in captured.out
    assert captured.err == "jaxinfer: No space left on device.\n"

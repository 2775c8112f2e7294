"""`jaxinfer generate`: what it prints, where, and on what engine."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys

import pytest
from tiny_model import SMALL, write_model

from jaxinfer.cli import main
from jaxinfer.engine import Engine

PROMPT = "Hello"
PROMPT_IDS = [89, 87, 73, 86, 30, 4, 44, 73, 80, 80, 83, 3, 69, 87, 87, 77, 87, 88, 69, 82, 88, 30, 4]
"""user: Hello, line break, assistant: - one id for each character."""


@pytest.fixture
def generate(engine_builds, tiny_model, capsys):
    """Run the command on the tiny model; returns exit code, output and errors."""

    def run(*arguments: str, model: str = tiny_model):
        code = main(["generate", "--model", model, *SMALL, *arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def objects(generate):
    """Run the command with --json; returns the objects."""

    def run(*arguments: str, **settings):
        code, out, _ = generate("--json", *arguments, **settings)
        assert code == 0
        return [json.loads(line) for line in out.splitlines()]

    return run


def test_text_goes_to_stdout_and_statistics_to_stderr(generate):
    code, out, err = generate(PROMPT, "--max-tokens", "10")
    assert code == 0
    assert out == "6R\nW5=t\n"
    assert err.count("\n") == 1
    assert err.startswith("23 prompt tokens, 10 new tokens; TTFT ")
    assert " ms, ITL " in err
    assert err.endswith(" tok/s (cut at 10 tokens)\n")


def test_text_comes_as_it_is_generated(generate, monkeypatch, capsys):
    seen = []
    real_step = Engine.step

    def step(engine):
        seen.append(capsys.readouterr().out)
        return real_step(engine)

    monkeypatch.setattr(Engine, "step", step)
    generate(PROMPT, "--max-tokens", "5")
    assert seen == ["", "6", "R", "\n", "W"]


def test_json(objects):
    (result,) = objects(PROMPT, "--max-tokens", "10")
    metrics = result.pop("metrics")
    assert result == {
        "prompt": PROMPT,
        "prompt_token_ids": PROMPT_IDS,
        "token_ids": [26, 54, 3, 59, 143, 0, 25, 33, 88, 118],
        "text": "6R\nW5=t",
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert 0 < metrics["ttft_s"] < metrics["e2e_s"]
    assert 0 < metrics["itl_s"] < metrics["e2e_s"]
    assert set(metrics) == {"queue_s", "ttft_s", "itl_s", "e2e_s"}


def test_several_prompts_come_in_order_whichever_ends_first(generate, monkeypatch):
    code, out, err = generate("one", "two\nlines", "three", "--max-tokens", "4")
    answers = out.split("\n\n")
    assert code == 0
    assert [answer.split("\n")[0] for answer in answers] == ["> one", "> two", "> three"]
    assert answers[1].startswith("> two\n> lines\n")
    assert err.startswith("3 prompts, ")
    assert "12 new tokens" in err
    assert "(medians)" in err


def test_a_batch_gives_what_each_prompt_gives_alone(objects):
    together = objects("one", "two", "three", "--max-tokens", "6")
    alone = [objects(prompt, "--max-tokens", "6")[0] for prompt in ("one", "two", "three")]
    assert [result["prompt"] for result in together] == ["one", "two", "three"]
    assert [result["token_ids"] for result in together] == [result["token_ids"] for result in alone]


def test_a_late_first_prompt_holds_back_the_rest(objects):
    long = ("--max-tokens", "8", "--ignore-eos")
    first, second = (objects(prompt, *long)[0]["token_ids"] for prompt in ("one", "two"))
    stop = next(token for token in second[:4] if token not in first)
    results = objects("one", "two", *long, "--stop-token-ids", str(stop))
    assert [result["finish_reason"] for result in results] == ["length", "stop"]
    assert [result["prompt"] for result in results] == ["one", "two"]


def test_several_answers(generate, objects):
    (result,) = objects(PROMPT, "--n", "2", "--temperature", "1", "--seed", "3", "--max-tokens", "4")
    assert result["outputs"][0]["token_ids"] == result["token_ids"]
    assert result["outputs"][0]["token_ids"] != result["outputs"][1]["token_ids"]
    _, out, _ = generate(PROMPT, "--n", "2", "--temperature", "1", "--seed", "3", "--max-tokens", "4")
    assert out.startswith("[1 of 2]\n")
    assert "\n[2 of 2]\n" in out


def test_log_probabilities(objects):
    (result,) = objects(PROMPT, "--max-tokens", "3", "--logprobs", "2", "--prompt-logprobs", "1")
    assert [entry[0]["id"] for entry in result["logprobs"]] == result["token_ids"]
    assert [len(entry) for entry in result["logprobs"]] == [2, 2, 2]
    assert result["logprobs"][0][0]["rank"] == 1
    assert result["cumulative_logprob"] == pytest.approx(sum(entry[0]["logprob"] for entry in result["logprobs"]))
    assert result["prompt_logprobs"][0] is None
    assert [entry[0]["id"] for entry in result["prompt_logprobs"][1:]] == PROMPT_IDS[1:]


def test_sampling_options_reach_the_sampler(objects):
    ids = objects(PROMPT, "--max-tokens", "6")[0]["token_ids"]
    banned = objects(PROMPT, "--max-tokens", "6", "--logit-bias", f"{ids[0]}=-100", "--logit-bias", "26=-100")
    assert ids[0] not in banned[0]["token_ids"]
    stopped = objects(PROMPT, "--max-tokens", "6", "--stop-token-ids", f"99,{ids[1]}", "--stop-token-ids", "98")
    assert stopped[0]["token_ids"] == ids[:2]
    assert stopped[0]["stop_reason"] == ids[1]
    drawn = [objects(PROMPT, "--max-tokens", "6", "--temperature", "2", "--seed", seed)[0] for seed in "112"]
    assert drawn[0]["token_ids"] == drawn[1]["token_ids"] != drawn[2]["token_ids"]


def test_the_models_own_defaults_yield_to_what_is_given(objects, tmp_path):
    model = str(write_model(tmp_path / "model", do_sample=True, temperature=5.0, top_k=100))
    greedy = objects(PROMPT, "--max-tokens", "6")[0]["token_ids"]
    seeded = ("--max-tokens", "6", "--seed", "1")
    assert objects(PROMPT, *seeded, model=model)[0]["token_ids"] != greedy
    assert objects(PROMPT, *seeded, "--top-k", "1", model=model)[0]["token_ids"] == greedy
    assert objects(PROMPT, *seeded, "--temperature", "0", model=model)[0]["token_ids"] == greedy


def test_the_template_and_raw(objects):
    assert objects(PROMPT, "--raw", "--max-tokens", "1")[0]["prompt_token_ids"] == [44, 73, 80, 80, 83]
    with_system = objects(PROMPT, "--system", "Hm", "--max-tokens", "1")[0]["prompt_token_ids"]
    assert with_system[-len(PROMPT_IDS) :] == PROMPT_IDS
    assert len(with_system) == len(PROMPT_IDS) + len("system: Hm\n")


def test_a_model_without_a_template_continues_the_text(objects, tmp_path):
    model = str(write_model(tmp_path / "model", template=None))
    assert objects(PROMPT, "--max-tokens", "1", model=model)[0]["prompt_token_ids"] == [44, 73, 80, 80, 83]


def test_prompts_from_files_and_pipes(objects, standard_input, tmp_path):
    (tmp_path / "prompt").write_text("two\nlines\n\n")
    standard_input(b"piped\n")
    arguments = ("first", "--prompt-file", str(tmp_path / "prompt"), "--prompt-file", "-", "--max-tokens", "1")
    assert [result["prompt"] for result in objects(*arguments)] == ["first", "two\nlines\n", "piped"]
    standard_input(b"piped\n")
    assert [result["prompt"] for result in objects("--max-tokens", "1")] == ["piped"]


def test_the_engine_is_sized_for_the_job(generate, engine_builds, tiny_model):
    generate(PROMPT, "--max-tokens", "1")
    generate(*["p"] * 3, "--n", "2", "--max-tokens", "1")
    generate(*["p"] * 9, "--max-tokens", "1")
    generate(PROMPT, "--max-tokens", "1", "--max-slots", "3", "--mode", "static", "--dtype", "float32")
    assert [build.options.max_slots for build in engine_builds] == [1, 6, 8, 3]
    last = engine_builds[-1].options
    assert (last.max_context, last.max_batched_tokens, last.mode, last.dtype) == (64, 64, "static", "float32")
    assert engine_builds[-1].model == tiny_model


@pytest.mark.parametrize("prompts", [["one"], ["one", "two", "three"]])
def test_ctrl_c_keeps_what_there_is(generate, objects, ctrl_c_in_round, prompts):
    complete = objects(*prompts, "--max-tokens", "20", "--ignore-eos")
    steps = ctrl_c_in_round(4)
    before = signal.getsignal(signal.SIGINT)
    code, out, err = generate(*prompts, "--max-tokens", "20", "--ignore-eos")
    assert code == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert len(steps) == 4  # the round ends, no other begins
    blocks = [out] if len(prompts) == 1 else out[2:].split("\n\n> ")
    answers = [block.removeprefix(f"{prompt}\n").rstrip("\n") for block, prompt in zip(blocks, prompts, strict=True)]
    for result, answer in zip(complete, answers, strict=True):
        assert result["text"].startswith(answer)
    assert answers[0]
    assert "tok/s" in err


# --- the real process -------------------------------------------------------------------------------------------------


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "jaxinfer.cli", *arguments]


@pytest.mark.slow
def test_a_process_from_start_to_end(tiny_model):
    arguments = command("generate", "--model", tiny_model, *SMALL, "--max-tokens", "4", PROMPT)
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout == "6R\nW\n"
    assert done.stderr.count("\n") == 1  # nothing but the statistics


@pytest.mark.slow
def test_a_closed_pipe_is_silent(tiny_model):
    arguments = command("generate", "--model", tiny_model, *SMALL, "--max-tokens", "30", PROMPT)
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(arguments, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert done.returncode == 141
    assert done.stderr == ""


def test_ctrl_c_before_anything_is_generated(tmp_path):
    fifo = tmp_path / "prompt"
    os.mkfifo(fifo)
    process = subprocess.Popen(
        command("generate", "--prompt-file", str(fifo)), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with fifo.open("wb"):  # waits until the process reads
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == 130


@pytest.mark.model
@pytest.mark.slow
def test_the_first_command_of_the_readme():
    arguments = command("generate", "--json", "--temperature", "0", "What is the capital of France?")
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert result["token_ids"] == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert result["text"] == "The capital of France is Paris."
    assert result["finish_reason"] == "stop"


def test_statistics_tell_which_texts_were_cut(generate, objects):
    long = ("--max-tokens", "8", "--ignore-eos")
    first, second = (objects(prompt, *long)[0]["token_ids"] for prompt in ("one", "two"))
    stop = next(token for token in second[:4] if token not in first)
    _, _, err = generate("one", "two", *long, "--stop-token-ids", str(stop))
    assert err.endswith(" tok/s (1 text cut at 8 tokens)\n")
    _, _, err = generate("two", *long, "--stop-token-ids", str(stop))
    assert err.endswith(" tok/s\n")
    _, _, err = generate("two", "--n", "2", *long)
    assert err.endswith(" tok/s (2 texts cut at 8 tokens)\n")


def test_pages_of_a_small_type_fit_more(generate):
    # Of float32 pages only one fits, of int8 pages five; the refusal must count with the type that was asked for.
    small = ("--max-tokens", "40", "--ignore-eos", "--kv-cache-gib", "2.5e-5")
    code, _, err = generate("hi", *small)
    assert code == 2
    assert "cache" in err
    code, _, err = generate("hi", *small, "--kv-dtype", "int8")
    assert code == 0, err


# --- traces and reports -----------------------------------------------------------------------------------------------


def check_trace(events: list[dict]) -> dict[int, str]:
    """The rules of the Chrome trace format that Perfetto's importer goes by; returns the names of the tracks."""
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans: dict[int, list[tuple[float, float]]] = {}
    open_waits: dict[tuple, int] = {}
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        match event["ph"]:
            case "X":
                assert event["dur"] >= 0
                spans.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
            case "C":
                assert event["args"]
                assert all(isinstance(value, int | float) for value in event["args"].values())
            case "b" | "e":
                key = (event["cat"], event["id"], event["name"])
                open_waits[key] = open_waits.get(key, 0) + (1 if event["ph"] == "b" else -1)
            case "i":
                assert event["s"] == "t"
                assert event["tid"] in tracks
            case "M":
                assert event["args"]
            case other:
                pytest.fail(f"no phase {other!r} was expected")
    assert set(open_waits.values()) <= {0}
    assert set(spans) <= set(tracks)
    assert 1 not in tracks  # the process's own number would make a track its main thread
    for track, intervals in spans.items():  # Perfetto drops spans that overlap others of their track in part
        intervals.sort()
        for (_, end), (start, _) in itertools.pairwise(intervals):
            assert start >= end - 2e-3, tracks[track]
    return tracks


@pytest.mark.parametrize("prompts", [["one"], ["one", "two", "three"]])
def test_a_trace_and_a_report_of_a_run(generate, tmp_path, prompts):
    trace, report = tmp_path / "out.json", tmp_path / "out.html"
    files = ("--trace", str(trace), "--report", str(report))
    code, out, _ = generate(*prompts, "--max-tokens", "5", "--ignore-eos", *files)
    assert code == 0
    assert out
    events = json.loads(trace.read_text())["traceEvents"]
    slots = [f"slot {number}" for number in range(min(2, len(prompts)))]
    assert sorted(check_trace(events).values()) == ["device", "host", *slots]
    assert {event["name"] for event in events if event["ph"] == "C"} >= {"pages", "requests"}
    names = [event["name"] for event in events]
    for number in range(len(prompts)):
        assert names.count(f"prefill {number}") == names.count(f"first token {number}") == 1
        assert f"finished {number} (length)" in names
    text = report.read_text()
    assert f"Generation from {len(prompts)} prompt" in text
    assert "KV pages" in text


def test_an_interrupted_run_leaves_its_trace(generate, ctrl_c_in_round, tmp_path):
    ctrl_c_in_round(4)
    code, _, _ = generate("one", "--max-tokens", "20", "--ignore-eos", "--trace", str(tmp_path / "out.json"))
    assert code == 130
    names = [event["name"] for event in json.loads((tmp_path / "out.json").read_text())["traceEvents"]]
    assert "finished 0 (abort)" in names


def test_a_refused_run_leaves_no_empty_files(refusal, tmp_path):
    kept = tmp_path / "kept.html"
    kept.write_text("mine")
    asked = ("--trace", str(tmp_path / "out.json"), "--report", str(kept))
    assert "no such file" in refusal("generate", "hi", "--model", str(tmp_path / "nothing"), *asked)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.html"]
    assert kept.read_text() == "mine"

"""Processes that answer requests: what they are asked, what they answer, how they are paused and end."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from _answers import timed_generation  # noqa: E402
from _sides import Side  # noqa: E402

COUNTS_UP = """
from _answers import answers_only, serve, timed_generation
answers = answers_only()
print("a library says something")
def generate(prompts, tokens):
    return [[prompt[-1] + index + 1 for index in range(count)] for prompt, count in zip(prompts, tokens)]
serve(timed_generation(generate), answers, {"version": 3})
"""


@pytest.fixture
def side():
    side = Side("the peer", [sys.executable, "-c", COUNTS_UP], {"PYTHONPATH": str(BENCH)})
    yield side
    side.close()


def test_a_side_generates(side):
    assert side.about == {"ready": True, "version": 3}
    answer = side.ask({"measure": "generate", "prompts": [[5, 6], [1]], "tokens": [2, 3]})
    assert answer["ids"] == [[7, 8], [2, 3, 4]]
    assert 0 < answer["seconds"] < 10


def test_a_refusal_names_the_side(side):
    with pytest.raises(SystemExit, match="the peer refused a request: prompts and tokens must be lists"):
        side.ask({"measure": "generate", "prompts": [[1]], "tokens": []})


def test_too_few_tokens_are_no_answer():
    answer = timed_generation(lambda prompts, tokens: [[1], [1, 2]])
    assert answer({"prompts": [[1], [2]], "tokens": [1, 3]})["error"] == "[1, 3] tokens were asked for, [1, 2] came"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_paused_side_rests_until_it_is_resumed(side):
    def state() -> str:
        return Path(f"/proc/{side._process.pid}/stat").read_text().rpartition(") ")[2][0]

    side.pause()
    deadline = time.monotonic() + 10
    while state() != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state() == "T"
    side.resume()
    assert side.ask({"measure": "generate", "prompts": [[1]], "tokens": [1]})["ids"] == [[2]]


def test_a_side_that_ends_tells_why():
    with pytest.raises(SystemExit, match="the peer ended: ModuleNotFoundError: No module named 'nothing_of_that_name'"):
        Side("the peer", [sys.executable, "-c", "import nothing_of_that_name"])


def test_a_side_that_cannot_start():
    with pytest.raises(SystemExit, match="/nowhere/python cannot be started: No such file or directory"):
        Side("the peer", ["/nowhere/python"])

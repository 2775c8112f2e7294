"""Requests and answers as lines of JSON, for a process that is measured by another; needs nothing but Python.

The first line out is ``{"ready": true, ...}``; then every request, a JSON object a line, is answered by one, and the
process is idle in between. An answer is ``{"error": sentence}`` when the request cannot be served.

A request of the measure "generate" has "prompts" (token ids) and "tokens" (how many to sample for each, greedily;
nothing else ends a completion); the answer has "seconds" from the first prompt given to the last token had, and "ids",
the sampled tokens of each prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

Answer = Callable[[dict[str, Any]], dict[str, Any]]
Generate = Callable[[list[list[int]], list[int]], Sequence[Sequence[int]]]


def side_parser(description: str) -> argparse.ArgumentParser:
    """The options that every side has which generates."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--context", type=int, default=1024)
    return parser


def answers_only() -> TextIO:
    """Standard output for answers alone: what libraries print goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def serve(answer: Answer, answers: TextIO, about: dict[str, Any]) -> None:
    """Answer the requests on standard input until it ends."""
    print(json.dumps({"ready": True} | about), file=answers, flush=True)
    for line in sys.stdin:
        try:
            request = json.loads(line)
            reply = answer(request) if isinstance(request, dict) else {"error": "a request is a JSON object"}
        except json.JSONDecodeError as error:
            reply = {"error": f"a request is one line of JSON: {error}"}
        print(json.dumps(reply), file=answers, flush=True)


def timed_generation(generate: Generate) -> Answer:
    """Answers requests of the measure "generate"."""

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        prompts, tokens = request.get("prompts"), request.get("tokens")
        if not prompts or not isinstance(prompts, list) or not isinstance(tokens, list) or len(prompts) != len(tokens):
            return {"error": "prompts and tokens must be lists of the same length, which is not 0"}
        begin = time.perf_counter()
        ids = generate(prompts, tokens)
        seconds = time.perf_counter() - begin
        if [len(completion) for completion in ids] != tokens:
            return {"error": f"{tokens} tokens were asked for, {[len(completion) for completion in ids]} came"}
        return {"seconds": seconds, "ids": [[int(token) for token in completion] for completion in ids]}

    return answer

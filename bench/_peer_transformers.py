"""Step times of SmolLM2 in transformers on the CPU; needs torch, transformers and gguf, nothing of jaxinfer.

``--serve`` turns it into a request/response process (see ``_answers.py``) for a driver that alternates between this and
another engine. Requests:

    {"measure": "decode", "batch": 8, "length": 128, "repeats": 8}    8 decode steps after 128 cached positions a row
    {"measure": "prefill", "batch": 1, "length": 512, "repeats": 3}   a prompt of 512 tokens, three times
    {"measure": "generate", ...}                                      as in ``_answers.py``, batched as ``--batching``

The first two are answered with ``{"seconds": [one per repeat], "cache": "static" | "dynamic"}``. A decode step is one
forward pass with the greedy choice of the next ids; a prefill computes the logits of the last position only. Each kind
of such request is tried with both caches of transformers at first, and stays with the faster one. Batching is "static"
(`generate` on so many prompts at a time, padded on the left, each batch until its longest completion ends) or
"continuous" (the manager that `generate_batch` uses, so that each request has a length of its own).

Without ``--serve`` it measures the three standard requests in ``--rounds`` rounds and prints their medians.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _answers import answers_only, serve, timed_generation

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}

# They belong to the other environment, where this file runs.
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    StaticCache,
)
from transformers.generation.continuous_batching.utils import WorkloadHints  # pyright: ignore[reportMissingImports]

STANDARD_REQUESTS = {
    "decode_b1": {"measure": "decode", "batch": 1, "length": 128, "repeats": 8},
    "decode_b8": {"measure": "decode", "batch": 8, "length": 128, "repeats": 8},
    "prefill_512": {"measure": "prefill", "batch": 1, "length": 512, "repeats": 2},
}
CACHE_KINDS = ("dynamic", "static")
MAX_SIZE = 4096
CONTINUOUS_PAGE, CONTINUOUS_TOKENS = 256, 512
"""Positions of a page, the default of transformers, and tokens of a round, the default of jaxinfer."""


class Peer:
    """A loaded model and, for every kind of request seen so far, the faster cache."""

    def __init__(self, model: Path, dtype: torch.dtype, batching: str, batch: int):
        place = {"gguf_file": model.name} if model.is_file() else {}
        self._model = AutoModelForCausalLM.from_pretrained(
            model.parent if model.is_file() else model, **place, dtype=dtype, attn_implementation="sdpa"
        ).eval()
        # Nothing but their number ends completions.
        self._model.config.eos_token_id = self._model.generation_config.eos_token_id = None
        self._batch = batch
        self._generate = timed_generation({"static": self._static, "continuous": self._continuous}[batching])
        # Newer releases call the argument `cache`; older ones only know the first name.
        names = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._measures = {"decode": self._decode, "prefill": self._prefill}
        self._faster: dict[str, str] = {}
        self._filled: dict[tuple, Any] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        measure = request.get("measure")
        if measure == "generate":
            return self._generate(request)
        if measure not in self._measures:
            return {"error": f"unknown measure {measure!r}; known: {', '.join(self._measures)}"}
        given = [request.get(key) for key in ("batch", "length", "repeats")]
        sizes = [size for size in given if isinstance(size, int) and 0 < size <= MAX_SIZE]
        if len(sizes) < len(given):
            return {"error": f"batch, length and repeats must be whole numbers from 1 to {MAX_SIZE}, not {given}"}
        batch, length, repeats = sizes
        run = self._measures[measure]
        key = f"{measure} {sizes}"
        if key not in self._faster:
            self._faster[key] = self._choose_cache(run, batch, length, repeats)
        kind = self._faster[key]
        return {"seconds": run(kind, batch, length, repeats), "cache": kind}

    def _choose_cache(self, run: Callable[..., list[float]], batch: int, length: int, repeats: int) -> str:
        for kind in CACHE_KINDS:
            run(kind, batch, length, 1)
        tried: dict[str, list[float]] = {kind: [] for kind in CACHE_KINDS}
        for _ in range(2):
            for kind in CACHE_KINDS:
                tried[kind] += run(kind, batch, length, repeats)
        return min(CACHE_KINDS, key=lambda kind: statistics.median(tried[kind]))

    def _new_cache(self, kind: str, positions: int) -> Any:
        config = self._model.config
        return DynamicCache(config=config) if kind == "dynamic" else StaticCache(config, max_cache_len=positions)

    def _forward(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """The greedy next ids [batch, 1]."""
        out = self._model(ids, **{self._cache_name: cache}, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(dim=-1, keepdim=True)

    def _prompt(self, batch: int, length: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(length)
        return torch.randint(100, self._model.config.vocab_size, (batch, length), generator=generator)

    def _prefill(self, kind: str, batch: int, length: int, repeats: int) -> list[float]:
        ids, seconds = self._prompt(batch, length), []
        for _ in range(repeats):
            start = time.perf_counter()
            self._forward(ids, self._new_cache(kind, length))
            seconds.append(time.perf_counter() - start)
        return seconds

    def _decode(self, kind: str, batch: int, length: int, repeats: int) -> list[float]:
        key = (kind, batch, length, repeats)
        if key not in self._filled:
            cache = self._new_cache(kind, length + repeats)
            self._filled[key] = (cache, self._forward(self._prompt(batch, length), cache))
        cache, ids = copy.deepcopy(self._filled[key])
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            ids = self._forward(ids, cache)
            seconds.append(time.perf_counter() - start)
        return seconds

    def _static(self, prompts: list[list[int]], tokens: list[int]) -> list[list[int]]:
        done: list[list[int]] = []
        for first in range(0, len(prompts), self._batch):
            some, counts = prompts[first : first + self._batch], tokens[first : first + self._batch]
            width = max(map(len, some))
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in some])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in some])
            config = GenerationConfig(do_sample=False, max_new_tokens=max(counts), pad_token_id=0)
            out = self._model.generate(ids, attention_mask=mask, generation_config=config)
            done += [row[width : width + count].tolist() for row, count in zip(out, counts, strict=True)]
        return done

    def _continuous(self, prompts: list[list[int]], tokens: list[int]) -> list[list[int]]:
        config = GenerationConfig(do_sample=False, max_new_tokens=max(tokens), pad_token_id=0, eos_token_id=-1)
        # Left to itself it takes most of the memory; this holds every request at once.
        pages = [-(-(len(prompt) + count) // CONTINUOUS_PAGE) for prompt, count in zip(prompts, tokens, strict=True)]
        batching = ContinuousBatchingConfig(
            page_size=CONTINUOUS_PAGE,
            num_blocks=sum(pages) + len(pages),
            max_batch_tokens=max(CONTINUOUS_TOKENS, len(prompts)),
            allow_block_sharing=False,
        )
        manager = self._model.continuous_batching_context_manager(
            generation_config=config,
            continuous_batching_config=batching,
            workload_hints=WorkloadHints(max(map(len, prompts)), max(tokens), len(prompts)),
        )
        done: dict[str, list[int]] = {}
        with manager as running:
            for number, (prompt, count) in enumerate(zip(prompts, tokens, strict=True)):
                running.add_request(prompt, request_id=str(number), max_new_tokens=count, eos_token_id=-1)
            while len(done) < len(prompts):
                result = running.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done[result.request_id] = list(result.generated_tokens)
                elif not running.is_running():
                    raise RuntimeError("The continuous batching of transformers ended before its requests did.")
        return [done[str(number)] for number in range(len(prompts))]


def standard_medians(peer: Peer, rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in STANDARD_REQUESTS}
    caches = {}
    for _ in range(rounds):
        for name, request in STANDARD_REQUESTS.items():
            answer = peer.answer(request)
            seconds[name].append(statistics.median(answer["seconds"]))
            caches[name] = answer["cache"]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "decode_b1_ms": round(1e3 * medians["decode_b1"], 2),
        "decode_b8_ms": round(1e3 * medians["decode_b8"], 2),
        "prefill_512_tokens_per_s": round(512 / medians["prefill_512"], 1),
        "caches": caches,
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Step times of SmolLM2 in transformers on the CPU.")
    parser.add_argument("--model", type=Path, required=True, help="a .gguf file or a directory")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batching", choices=("static", "continuous"), default="static")
    parser.add_argument("--batch", type=int, default=8, help="prompts of a static batch (8)")
    parser.add_argument("--serve", action="store_true", help="answer requests on standard input")
    options = parser.parse_args()
    if not options.model.exists():
        parser.error(f"{options.model} does not exist")
    if min(options.rounds, options.threads, options.batch) < 1:
        parser.error("--rounds, --threads and --batch must be at least 1")
    answers = answers_only()
    torch.set_num_threads(options.threads)
    about = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": options.dtype,
        "threads": options.threads,
    }
    with torch.inference_mode():
        peer = Peer(options.model, getattr(torch, options.dtype), options.batching, options.batch)
        if options.serve:
            serve(peer.answer, answers, about)
        else:
            print(json.dumps(standard_medians(peer, options.rounds) | about), file=answers, flush=True)


if __name__ == "__main__":
    main()

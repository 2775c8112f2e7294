"""What the tests of a whole engine share: a tokenizer for the golden models, runs to completion, poisoned caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.engine import Engine

WIDE = {
    "max_slots": 4,
    "page_size": 8,
    "num_pages": 32769,
    "max_context": 256,
    "max_batched_tokens": 64,
    "max_prefill_rows": 4,
}
"""Whole prompts; the pool is large, so that a copy of it would show."""
NARROW = {
    "max_slots": 3,
    "page_size": 16,
    "num_pages": 40,
    "max_context": 240,
    "max_batched_tokens": 5,
    "max_prefill_rows": 2,
}
"""Every prompt in chunks; other buckets, other pages."""


class PlainTokenizer:
    """One letter per token."""

    special_ids = frozenset({0, 1, 2})
    eos_ids = (2, 140)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) - 0x100 for letter in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(0x100 + i) for i in ids if not (skip_special_tokens and i in self.special_ids))


def poison(runner: Any) -> None:
    """An empty cache in which every position, the padding page included, is NaN."""
    runner.reset()
    kv = tuple(dataclasses.replace(pages, data=jnp.full_like(pages.data, jnp.nan)) for pages in runner.state.kv)
    runner.state = dataclasses.replace(runner.state, kv=kv)


def finish(engine: Engine) -> dict[str, Any]:
    """Run until nothing is left; the last output of each request."""
    outputs = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def alone(runner: Any, prompt: Sequence[int], params: SamplingParams) -> list[tuple[int, ...]]:
    """What each completion of a request gives with nothing else in the engine."""
    poison(runner)
    engine = Engine(runner, PlainTokenizer())
    engine.add_request("alone", list(map(int, prompt)), params)
    return [completion.token_ids for completion in finish(engine)["alone"].outputs]


def random_request(numbers: np.random.Generator, vocab: int) -> tuple[list[int], SamplingParams]:
    """A prompt and parameters with every option on or off; the seed is always given."""

    def maybe(value: Any, otherwise: Any, chance: float = 0.3) -> Any:
        return value if numbers.random() < chance else otherwise

    # Some are longer than the 128 positions that attention takes at a time.
    prompt = numbers.integers(3, vocab, numbers.integers(1, maybe(200, 40, 0.2))).tolist()
    max_tokens = int(numbers.integers(1, 24))
    biased = numbers.integers(0, vocab, 3).tolist()
    params = SamplingParams(
        n=int(maybe(3, 1, 0.15)),
        temperature=float(maybe(0.0, numbers.choice([0.7, 1.0, 1.5]), 0.4)),
        top_k=int(maybe(numbers.integers(1, 50), 0)),
        top_p=float(maybe(0.9, 1.0)),
        min_p=float(maybe(0.05, 0.0)),
        repetition_penalty=float(maybe(1.2, 1.0)),
        presence_penalty=float(maybe(0.5, 0.0)),
        frequency_penalty=float(maybe(-0.5, 0.0)),
        logit_bias=maybe({token: 1.5 for token in biased}, None),
        seed=int(numbers.integers(2**32)),
        stop=maybe([chr(0x100 + int(numbers.integers(3, vocab)))], []),
        stop_token_ids=maybe([5, 77], []),
        ignore_eos=bool(maybe(True, False)),
        max_tokens=max_tokens,
        min_tokens=int(maybe(min(4, max_tokens), 0)),
        logprobs=maybe(int(numbers.integers(0, 21)), None),
        prompt_logprobs=maybe(int(numbers.integers(0, 21)), None),
    )
    return prompt, params

"""Perplexity of a model with its weights kept in different types, on one fixed text.

``python bench/perplexity.py [--model M] [--weight-dtypes float,int8,int4] [--tokens N] [--window N] [--json]``

The text (``perplexity.txt``, the project's own guides as they once were, or ``--text FILE``) is cut into windows of
tokens, each prefilled by itself with the steps that serve requests. Perplexity is exp(-mean log probability) over all
tokens but each window's first; every type is compared with the first one named.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from checkpoints import open_checkpoint
from jaxinfer.models import DecoderConfig
from jaxinfer.runtime.cost import tree_bytes
from jaxinfer.runtime.loading import decoder_config, load_params
from jaxinfer.runtime.state import PrefillBatch, TableUpdates, init_state
from jaxinfer.runtime.steps import logits_of, prefill_hidden

TEXT = Path(__file__).with_name("perplexity.txt")
PAGE_SIZE = 16
SCORED_AT_ONCE = 64
"""Positions whose logits exist at the same time."""


@dataclass(frozen=True)
class Perplexity:
    """What was measured of one type: the perplexity over so many predicted tokens, and the bytes of all weights."""

    weight_dtype: str
    tokens: int
    perplexity: float
    weight_bytes: int


@partial(jax.jit, static_argnums=0)
def window_log_probability(config: DecoderConfig, params: Any, ids: jax.Array) -> jax.Array:
    """The sum of the log probabilities of ids[1:], i32[window], each after all before it."""
    pages = -(-ids.shape[0] // PAGE_SIZE)
    state = init_state(config, num_slots=1, num_pages=1 + pages, page_size=PAGE_SIZE, max_context=pages * PAGE_SIZE)
    columns, slot = jnp.arange(pages, dtype=jnp.int32), jnp.zeros((1,), jnp.int32)
    updates = TableUpdates(slots=jnp.zeros_like(columns), columns=columns, pages=columns + 1)
    batch = PrefillBatch(ids, jnp.array([0, ids.shape[0]], jnp.int32), slot, slot, updates)
    hidden, _ = prefill_hidden(config, params, state, batch)

    def score(rows: tuple[jax.Array, jax.Array]) -> jax.Array:
        hidden, targets = rows
        likely = jax.nn.log_softmax(logits_of(config, params, hidden), -1)
        return jnp.take_along_axis(likely, targets[:, None], -1)[:, 0]

    scores = jax.lax.map(score, (_in_parts(hidden), _in_parts(jnp.roll(ids, -1)))).reshape(-1)
    return scores[: ids.shape[0] - 1].sum()


def _in_parts(rows: jax.Array) -> jax.Array:
    padded = jnp.pad(rows, ((0, -rows.shape[0] % SCORED_AT_ONCE), *((0, 0),) * (rows.ndim - 1)))
    return padded.reshape(-1, SCORED_AT_ONCE, *rows.shape[1:])


def measure(model: str, weight_dtype: str, text: str, tokens: int | None = None, window: int = 512) -> Perplexity:
    """Perplexity of a model on the first `tokens` tokens of a text, in whole windows."""
    with open_checkpoint(model) as checkpoint:
        config = decoder_config(checkpoint, weight_dtype=weight_dtype)
        ids = checkpoint.tokenizer().encode(text)[:tokens]
        params = load_params(checkpoint, config)
    starts = range(0, len(ids) - window + 1, window)
    if not starts:
        raise SystemExit(f"The text has {len(ids)} tokens, less than a window of {window}.")
    config = config.for_context(window)
    sums = [window_log_probability(config, params, jnp.array(ids[start : start + window])) for start in starts]
    predicted = len(starts) * (window - 1)
    return Perplexity(weight_dtype, predicted, math.exp(-float(sum(sums)) / predicted), tree_bytes(params))


def main() -> None:
    """Measure every type and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--weight-dtypes", default="float,int8,int4", help="comma-separated (float,int8,int4)")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, help="only so many tokens of the text")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")
    first = None
    for weight_dtype in options.weight_dtypes.split(","):
        found = measure(options.model, weight_dtype, text, options.tokens, options.window)
        first = first or found.perplexity
        change = found.perplexity / first - 1
        if options.json:
            print(json.dumps(asdict(found) | {"change": change}), flush=True)
        else:
            mib = found.weight_bytes / 2**20
            print(
                f"{weight_dtype:6} {found.perplexity:9.4f} {change:+8.2%} {mib:8.1f} MiB {found.tokens} tokens",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Every program a runner needs, compiled ahead of time for every bucket; after that nothing compiles."""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.models import DecoderConfig
from jaxinfer.runtime import sampler
from jaxinfer.runtime.limits import Buckets, RunnerLimits
from jaxinfer.runtime.page_moves import PAGES_PER_CALL, copy_pages, gather_pages, scatter_pages
from jaxinfer.runtime.state import DecodeBatch, EngineState, MixedBatch, PrefillBatch, TableUpdates, init_state
from jaxinfer.runtime.steps import Params, decode_places, decode_step, logits_of, mixed_hidden, wanted_logits

FACTS_PER_CALL = 1024
"""Entries that one call of `add_token_facts` takes."""
SCORED_PER_CALL = 32
"""Prompt positions that one call of `score` takes: their logits exist at once."""

Progress = Callable[[str, int, "int | None"], None]
"""(what is going on, steps done, steps in all where that is known)"""
Program = Callable[..., Any]


@dataclass(frozen=True)
class Programs:
    """Compiled programs. decode: by rows; prefill: by (tokens, rows); sample: by rows; gather_pages and scatter_pages:
    None without host memory for pages."""

    decode: dict[int, Program]
    prefill: dict[tuple[int, int], Program]
    sample: dict[int, Program]
    setup_slots: Program
    add_token_facts: Program
    score: Program
    copy_pages: Program
    gather_pages: Program | None
    scatter_pages: Program | None


def compile_programs(
    config: DecoderConfig,
    params: Params,
    limits: RunnerLimits,
    buckets: Buckets,
    on_progress: Progress | None = None,
) -> Programs:
    """Trace one program after the other and compile them on all processors; of `params` only shapes and types count."""
    tasks = list(_tasks(config, params, limits, buckets))
    compiled: dict[tuple[str, Any], Program] = {}
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        with _collection_paused():
            pending = [(key, pool.submit(lower().compile, _compiler_options())) for key, lower in _largest_first(tasks)]
        for index, (key, future) in enumerate(pending):
            compiled[key] = future.result()
            if on_progress is not None:
                on_progress("Compiling", index + 1, len(pending))
    finally:
        # After an error or Ctrl-C, what has not begun is not waited for.
        pool.shutdown(wait=False, cancel_futures=True)

    def family(kind: str) -> dict[Any, Program]:
        return {bucket: program for (name, bucket), program in compiled.items() if name == kind}

    return Programs(
        decode=family("decode"),
        prefill=family("prefill"),
        sample=family("sample"),
        setup_slots=compiled["setup_slots", None],
        add_token_facts=compiled["add_token_facts", None],
        score=compiled["score", None],
        copy_pages=compiled["copy_pages", None],
        gather_pages=compiled.get(("gather_pages", None)),
        scatter_pages=compiled.get(("scatter_pages", None)),
    )


@contextmanager
def _collection_paused() -> Iterator[None]:
    """Tracing makes a great many objects that stay; looking for garbage among them takes a fifth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _compiler_options() -> dict[str, Any]:
    # LLVM prefers half-width vectors on processors with AVX-512; the matrix-vector products are a few percent faster
    # with whole ones. Other processors ignore it.
    return {"xla_cpu_prefer_vector_width": 512} if jax.default_backend() == "cpu" else {}


# --- the functions that are compiled ---------------------------------------------------------------------------------


def decode_round(
    config: DecoderConfig,
    params: Params,
    state: EngineState,
    last_token: jax.Array,
    slots: jax.Array,
    updates: TableUpdates,
) -> tuple[jax.Array, EngineState]:
    """`decode_step` fed with the token that each slot sampled last (i32[num_slots], on the device)."""
    token_ids = last_token.at[slots].get(mode="fill", fill_value=0)
    return decode_step(config, params, state, DecodeBatch(token_ids, slots, updates))


def prefill_round(
    config: DecoderConfig,
    most_tokens: int,
    params: Params,
    state: EngineState,
    last_token: jax.Array,
    batch: MixedBatch,
) -> tuple[jax.Array, jax.Array, EngineState]:
    """Logits f32[R, vocab] of the wanted tokens, hidden states [most_tokens, hidden] of all, the new state.

    The batch comes without the tokens of its decodes: they are those that each slot sampled last.
    """
    places = decode_places(batch)
    decode_ids = last_token.at[batch.decode_slots].get(mode="fill", fill_value=0)
    token_ids = batch.prefill.token_ids.at[places].set(decode_ids, mode="drop")
    batch = dataclasses.replace(batch, prefill=dataclasses.replace(batch.prefill, token_ids=token_ids))
    hidden, state = mixed_hidden(config, params, state, batch)
    logits = wanted_logits(config, params, hidden, batch.wanted)
    # One shape for all buckets, so that one scoring program serves them.
    return logits, jnp.pad(hidden, ((0, most_tokens - hidden.shape[0]), (0, 0))), state


def score(
    config: DecoderConfig, params: Params, hidden: jax.Array, start: jax.Array, targets: jax.Array
) -> sampler.Sampled:
    """How likely targets i32[SCORED_PER_CALL] are after the positions start .. of hidden [tokens, hidden]."""
    rows = jax.lax.dynamic_slice(hidden, (start, 0), (targets.shape[0], hidden.shape[1]))
    return sampler.report(logits_of(config, params, rows), targets)


# --- their shapes ----------------------------------------------------------------------------------------------------

_Key = tuple[str, Any]
_Task = tuple[_Key, int, Callable[[], Any]]
"""Name and bucket, a measure of the work, and what lowers it."""


def _largest_first(tasks: list[_Task]) -> Iterator[tuple[_Key, Callable[[], Any]]]:
    for key, _, lower in sorted(tasks, key=lambda task: -task[1]):
        yield key, lower


def _tasks(config: DecoderConfig, params: Params, limits: RunnerLimits, buckets: Buckets) -> Iterator[_Task]:
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    state = jax.eval_shape(
        lambda: init_state(
            config,
            num_slots=limits.max_slots,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            max_context=limits.max_context,
        )
    )
    sampling = jax.eval_shape(lambda: sampler.init_sampler(limits.max_slots, limits.vocab_size))
    last_token = integers(limits.max_slots)

    decode = jax.jit(decode_round, static_argnums=0, donate_argnums=2)
    for rows in buckets.decode_rows:
        arguments = (params, state, last_token, integers(rows), updates_of(rows))
        yield ("decode", rows), 2, _lowering(decode, config, *arguments)

    prefill = jax.jit(prefill_round, static_argnums=(0, 1), donate_argnums=3)
    most_tokens = padded_hidden_rows(buckets)
    for tokens, rows in buckets.prefill:
        batch = prefill_shapes(tokens, rows, buckets.mixed_in(tokens), limits)
        arguments = (params, state, last_token, batch)
        yield ("prefill", (tokens, rows)), 3, _lowering(prefill, config, most_tokens, *arguments)

    sample = jax.jit(sampler.sample, donate_argnums=0)
    prefilled = {sampled_rows(rows, buckets.mixed_in(tokens), limits) for tokens, rows in buckets.prefill}
    for rows in sorted({*buckets.decode_rows, *prefilled}):
        logits = jax.ShapeDtypeStruct((rows, limits.vocab_size), jnp.float32)
        yield ("sample", rows), 1, _lowering(sample, sampling, logits, integers(rows))

    setup = jax.jit(sampler.setup_slots, donate_argnums=0)
    settings = jax.eval_shape(lambda: sampler.neutral_settings(limits.max_prefill_rows))
    yield ("setup_slots", None), 0, _lowering(setup, sampling, integers(limits.max_prefill_rows), settings)

    facts = jax.jit(sampler.add_token_facts, donate_argnums=0)
    count, per_token = FACTS_PER_CALL, jax.ShapeDtypeStruct
    flags, bias = per_token((count,), jnp.uint8), per_token((count,), jnp.float32)
    arguments = (sampling, integers(count), integers(count), integers(count), flags, bias)
    yield ("add_token_facts", None), 0, _lowering(facts, *arguments)

    hidden = jax.ShapeDtypeStruct((most_tokens, config.hidden_size), jnp.dtype(config.dtype))
    scoring = jax.jit(score, static_argnums=0)
    arguments = (params, hidden, integers(), integers(SCORED_PER_CALL))
    yield ("score", None), 1, _lowering(scoring, config, *arguments)
    yield from _page_tasks(state.kv, limits.host_pages > 0)


def _page_tasks(kv: Any, with_host: bool) -> Iterator[_Task]:
    pages = integers(PAGES_PER_CALL)
    yield ("copy_pages", None), 0, _lowering(jax.jit(copy_pages, donate_argnums=0), kv, pages, pages, integers())
    if with_host:
        blocks = jax.eval_shape(gather_pages, kv, pages)
        yield ("gather_pages", None), 0, _lowering(jax.jit(gather_pages), kv, pages)
        yield ("scatter_pages", None), 0, _lowering(jax.jit(scatter_pages, donate_argnums=0), kv, blocks, pages)


def _lowering(function: Any, *arguments: Any) -> Callable[[], Any]:
    return lambda: function.lower(*arguments)


def integers(*shape: int) -> Any:
    """The shape of an i32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def updates_of(count: int) -> TableUpdates:
    """The shapes of `count` table updates."""
    return TableUpdates(integers(count), integers(count), integers(count))


def prefill_shapes(tokens: int, rows: int, decodes: int, limits: RunnerLimits) -> MixedBatch:
    """The shapes of what a prefill program is given."""
    updates = updates_of(table_updates(tokens, rows + decodes, limits.page_size))
    prefill = PrefillBatch(integers(tokens), integers(rows + 1), integers(rows), integers(rows), updates)
    return MixedBatch(prefill, integers(decodes), integers(sampled_rows(rows, decodes, limits)))


def sampled_rows(rows: int, decodes: int, limits: RunnerLimits) -> int:
    """Most slots that sample after a prefill of `rows` sequences and so many decodes."""
    return min(rows + decodes, limits.max_slots)


def table_updates(tokens: int, rows: int, page_size: int) -> int:
    """Most pages that `tokens` new positions of `rows` sequences can begin."""
    return tokens // page_size + rows


def padded_hidden_rows(buckets: Buckets) -> int:
    """Rows of the hidden states handed on by prefill: the largest bucket in whole calls of `score`."""
    largest = max(tokens for tokens, _ in buckets.prefill)
    return -(-largest // SCORED_PER_CALL) * SCORED_PER_CALL

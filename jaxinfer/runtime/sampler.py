"""Choosing the next token of every row on the device, from the row's own parameters and random stream.

One compiled program serves every mixture of parameters: what no row of a batch asks for is skipped at run time.
A row's choice depends on its logits, its parameters, its seed and how many tokens it has sampled, on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp

from jaxinfer.runtime.filters import keep_top_k, keep_top_p
from jaxinfer.runtime.lanes import argmax, blocked, max_of, sum_of

MAX_LOGPROBS = 20
"""Most likely tokens that can be reported for each token."""
IN_PROMPT, ENDS_OUTPUT = 1, 2
"""Bits of SamplerState.flags: the token occurs in the prompt; it must not be sampled before min_tokens."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotSettings:
    """Sampling parameters of some slots, all [R]; see SamplingParams for their meaning.

    temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty: f32. top_k: i32, 0 keeps all.
    seed: u32. min_tokens: i32. sampled: i32, tokens sampled so far. edits: bool, whether logits are changed by
    penalties, bias or min_tokens. logprobs: bool, whether log probabilities are wanted.
    """

    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    top_k: jax.Array
    seed: jax.Array
    min_tokens: jax.Array
    sampled: jax.Array
    edits: jax.Array
    logprobs: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerState:
    """What sampling keeps on the device for every slot; donate it.

    settings: [slots]. last_token: i32[slots], sampled last. output_counts: i32[slots, vocab], how often each token was
    sampled. flags: u8[slots, vocab], IN_PROMPT and ENDS_OUTPUT. bias: f32[slots, vocab], added to the logits.
    """

    settings: SlotSettings
    last_token: jax.Array
    output_counts: jax.Array
    flags: jax.Array
    bias: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """One choice per row [R].

    ids: i32. finite: bool, whether every logit of the row is a finite number.
    logprobs: f32, natural log of the model's own probability of the token, before penalties and temperature.
    ranks: i32, 1 for the most likely token. top_ids i32[R, 20], top_logprobs f32[R, 20]: the most likely tokens.
    All but ids and finite are zeros when no row wants log probabilities.
    """

    ids: jax.Array
    finite: jax.Array
    logprobs: jax.Array
    ranks: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def init_sampler(num_slots: int, vocab_size: int) -> SamplerState:
    """Every slot greedy and empty."""
    # Copies: the neutral settings share arrays, and a donated state must not.
    settings = jax.tree.map(jnp.copy, neutral_settings(num_slots))
    per_token = (num_slots, vocab_size)
    return SamplerState(
        settings=settings,
        last_token=jnp.zeros((num_slots,), jnp.int32),
        output_counts=jnp.zeros(per_token, jnp.int32),
        flags=jnp.zeros(per_token, jnp.uint8),
        bias=jnp.zeros(per_token, jnp.float32),
    )


def neutral_settings(rows: int) -> SlotSettings:
    """Greedy settings that change no logit."""
    zeros, ones = jnp.zeros((rows,), jnp.float32), jnp.ones((rows,), jnp.float32)
    none, off = jnp.zeros((rows,), jnp.int32), jnp.zeros((rows,), bool)
    return SlotSettings(
        temperature=zeros,
        top_p=ones,
        min_p=zeros,
        repetition_penalty=ones,
        presence_penalty=zeros,
        frequency_penalty=zeros,
        top_k=none,
        seed=none.astype(jnp.uint32),
        min_tokens=none,
        sampled=none,
        edits=off,
        logprobs=off,
    )


def setup_slots(state: SamplerState, slots: jax.Array, settings: SlotSettings) -> SamplerState:
    """Sequences enter slots i32[R] (padding: number of slots) with settings [R]; what the slots held is erased."""

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[slots].set(new, mode="drop")

    return SamplerState(
        settings=jax.tree.map(put, state.settings, settings),
        last_token=state.last_token,
        output_counts=put(state.output_counts, jnp.zeros((), jnp.int32)),
        flags=put(state.flags, jnp.zeros((), jnp.uint8)),
        bias=put(state.bias, jnp.zeros((), jnp.float32)),
    )


def add_token_facts(
    state: SamplerState, slots: jax.Array, ids: jax.Array, counts: jax.Array, flags: jax.Array, bias: jax.Array
) -> SamplerState:
    """Per-token facts of slots that were just set up, as a list of K entries (padding: slot = number of slots).

    slots, ids: i32[K]. counts: i32[K], added to output_counts. flags: u8[K], set in flags. bias: f32[K], added.
    An (slot, id) pair may come several times.
    """
    has = state.flags
    for bit in (IN_PROMPT, ENDS_OUTPUT):
        sets_bit = jnp.where((flags & bit) > 0, slots, has.shape[0])
        row_bits = has.at[sets_bit, ids].get(mode="fill", fill_value=0)
        has = has.at[sets_bit, ids].set(row_bits | jnp.uint8(bit), mode="drop")
    return SamplerState(
        settings=state.settings,
        last_token=state.last_token,
        output_counts=state.output_counts.at[slots, ids].add(counts, mode="drop"),
        flags=has,
        bias=state.bias.at[slots, ids].add(bias, mode="drop"),
    )


def sample(state: SamplerState, logits: jax.Array, slots: jax.Array) -> tuple[Sampled, SamplerState]:
    """The next token of every row.

    logits: f32[R, vocab]. slots: i32[R]; padding rows have slot = number of slots, and their choice means nothing.
    """
    settings = _rows(state.settings, slots)
    used = slots < state.last_token.shape[0]
    plain = ~jnp.any(settings.edits | (settings.temperature > 0))
    # Where nobody asks for more, the logits need not leave a branch: a copy of them takes longer than the choice.
    ids = jax.lax.cond(plain, lambda: argmax(logits), lambda: _choose(state, settings, logits, slots))
    wanted = jnp.any(settings.logprobs & used)
    sampled = jax.lax.cond(wanted, lambda: report(logits, ids), lambda: _no_report(logits, ids))
    new_sampled = state.settings.sampled.at[slots].add(1, mode="drop")
    replaced = {field.name: getattr(state.settings, field.name) for field in fields(SlotSettings)}
    new_state = SamplerState(
        settings=SlotSettings(**(replaced | {"sampled": new_sampled})),
        last_token=state.last_token.at[slots].set(ids, mode="drop"),
        output_counts=state.output_counts.at[slots, ids].add(1, mode="drop"),
        flags=state.flags,
        bias=state.bias,
    )
    return sampled, new_state


def _choose(state: SamplerState, settings: SlotSettings, logits: jax.Array, slots: jax.Array) -> jax.Array:
    """Token i32[R] of every row, with edits and draws."""
    edited = jax.lax.cond(jnp.any(settings.edits), lambda: _edit(state, settings, logits, slots), lambda: logits)
    ids, draws = argmax(edited), settings.temperature > 0
    return jax.lax.cond(jnp.any(draws), lambda: jnp.where(draws, _draw(settings, edited), ids), lambda: ids)


def report(logits: jax.Array, ids: jax.Array) -> Sampled:
    """Log probability and rank of ids i32[R] under logits f32[R, vocab], and the most likely tokens."""
    largest = max_of(logits)
    log_total = largest + jnp.log(sum_of(jnp.exp(logits - largest[:, None])))
    chosen = jnp.take_along_axis(logits, ids[:, None], axis=1)[:, 0]
    ranks = sum_of((logits > chosen[:, None]).astype(jnp.int32)) + 1
    count = min(MAX_LOGPROBS, logits.shape[1])
    top_logits, top_ids = jax.lax.top_k(logits, count)
    padding = ((0, 0), (0, MAX_LOGPROBS - count))
    return Sampled(
        ids=ids,
        finite=_finite_rows(logits),
        logprobs=chosen - log_total,
        ranks=ranks,
        top_ids=jnp.pad(top_ids.astype(jnp.int32), padding),
        top_logprobs=jnp.pad(top_logits - log_total[:, None], padding),
    )


def _no_report(logits: jax.Array, ids: jax.Array) -> Sampled:
    zeros, table = jnp.zeros(ids.shape, jnp.float32), (*ids.shape, MAX_LOGPROBS)
    no_ids, no_logprobs = jnp.zeros(table, jnp.int32), jnp.zeros(table, jnp.float32)
    return Sampled(ids, _finite_rows(logits), zeros, jnp.zeros_like(ids), no_ids, no_logprobs)


def _finite_rows(logits: jax.Array) -> jax.Array:
    # The largest of magnitudes is NaN or infinite when any is.
    return jnp.isfinite(max_of(jnp.abs(logits)))


def _rows(settings: SlotSettings, slots: jax.Array) -> SlotSettings:
    """Settings [R] of the rows; padding rows get zeros, which means greedy."""
    return jax.tree.map(lambda values: values.at[slots].get(mode="fill", fill_value=0), settings)


def _edit(state: SamplerState, settings: SlotSettings, logits: jax.Array, slots: jax.Array) -> jax.Array:
    """Bias, then the penalties (Keskar et al., 2019, for repetition; OpenAI's API for the others), then min_tokens."""
    counts = state.output_counts.at[slots].get(mode="fill", fill_value=0)
    flags = state.flags.at[slots].get(mode="fill", fill_value=0)
    out = logits + state.bias.at[slots].get(mode="fill", fill_value=0)
    seen = (counts > 0) | ((flags & IN_PROMPT) > 0)
    # Padding rows have penalty 0; they must not divide by it.
    repetition = jnp.where(settings.repetition_penalty > 0, settings.repetition_penalty, 1)[:, None]
    out = jnp.where(seen, jnp.where(out > 0, out / repetition, out * repetition), out)
    out = out - settings.frequency_penalty[:, None] * counts
    out = out - settings.presence_penalty[:, None] * (counts > 0)
    too_early = (settings.sampled < settings.min_tokens)[:, None] & ((flags & ENDS_OUTPUT) > 0)
    return jnp.where(too_early, -jnp.inf, out)


def _draw(settings: SlotSettings, logits: jax.Array) -> jax.Array:
    """One token i32[R] per row by inverse transform sampling from the filtered, tempered distribution."""
    # The largest becomes 0 before the division, so that no temperature makes it infinite.
    scaled = (logits - max_of(logits)[:, None]) / jnp.where(settings.temperature > 0, settings.temperature, 1)[:, None]
    weights = jnp.exp(scaled)
    weights = jnp.where(weights >= settings.min_p[:, None], weights, 0)
    draws = settings.temperature > 0  # padding rows and greedy ones need no filter
    limits_k = draws & (settings.top_k > 0) & (settings.top_k < logits.shape[1])
    weights = jax.lax.cond(
        jnp.any(limits_k), lambda: keep_top_k(weights, logits, settings.top_k, limits_k), lambda: weights
    )
    limits_p = draws & (settings.top_p < 1)
    weights = jax.lax.cond(
        jnp.any(limits_p), lambda: keep_top_p(weights, logits, settings.top_p, limits_p), lambda: weights
    )
    uniform = jax.vmap(_uniform)(settings.seed, settings.sampled)
    return _invert(weights, uniform, fallback=argmax(logits))


def _uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
    """The number in [0, 1) of a seed's stream at a position."""
    return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position))


def _invert(weights: jax.Array, uniform: jax.Array, fallback: jax.Array) -> jax.Array:
    """The first id at which the running sum of weights f32[R, vocab] exceeds uniform f32[R] times their total.

    Two levels, so that the running sums are short. `fallback` i32[R] is taken where no weight is above zero (NaN).
    """
    blocks = blocked(weights)  # [R, n, lanes]
    sums = blocks.sum(-1)
    block_sums = jnp.cumsum(sums, axis=-1)
    target = uniform[:, None] * block_sums[:, -1:]
    block = _first_above(block_sums, target, sums)
    row = jnp.arange(weights.shape[0])
    before = jnp.where(block > 0, block_sums[row, jnp.maximum(block - 1, 0)], 0)
    lanes = blocks[row, block]
    lane = _first_above(before[:, None] + jnp.cumsum(lanes, axis=-1), target, lanes)
    return jnp.where(lanes[row, lane] > 0, block * lanes.shape[1] + lane, fallback).astype(jnp.int32)


def _first_above(running: jax.Array, target: jax.Array, weights: jax.Array) -> jax.Array:
    """Where the running sum [R, n] of weights first exceeds target [R, 1], i32[R]: always at a weight above zero.

    A parallel running sum is rounded differently at each place: it may rise where nothing was added, and its end may
    stay below a sum that was made otherwise. Then the last weight above zero is meant.
    """
    positive = weights > 0
    last = weights.shape[1] - 1 - jnp.argmax(positive[:, ::-1], axis=-1)
    above = (running > target) & positive
    return jnp.where(jnp.any(above, axis=-1), jnp.argmax(above, axis=-1), last).astype(jnp.int32)

"""The device sampler against an oracle in float64: every parameter, alone and mixed, and the random streams."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from sampler_oracle import admits, edited_logits, is_clear, log_softmax, probabilities
from scipy.stats import chisquare

from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.core.step import SlotSetup
from jaxinfer.runtime import sampler
from jaxinfer.runtime.filters import keep_top_k, keep_top_p
from jaxinfer.runtime.lanes import argmax
from jaxinfer.runtime.runner import _settings, _token_facts

VOCAB = 157  # not a multiple of 128
SLOTS = 8


@cache
def programs():
    return (
        jax.jit(sampler.sample, donate_argnums=0),
        jax.jit(sampler.setup_slots, donate_argnums=0),
        jax.jit(sampler.add_token_facts, donate_argnums=0),
        jax.jit(jax.vmap(lambda seed, n: jax.random.uniform(jax.random.fold_in(jax.random.key(seed), n)))),
    )


class Device:
    """A sampler state, driven as the runner does."""

    def __init__(self, slots: int = SLOTS, vocab: int = VOCAB) -> None:
        self.slots = slots
        self.state = sampler.init_sampler(slots, vocab)
        self._sample, self._setup, self._facts, _ = programs()

    def setup(self, setups: list[SlotSetup]) -> None:
        rows = np.full(self.slots, self.slots, np.int32)
        rows[: len(setups)] = [setup.slot for setup in setups]
        self.state = self._setup(self.state, rows, _settings(setups, self.slots))
        facts = [fact for setup in setups for fact in _token_facts(setup)]
        for first in range(0, len(facts), 1024):
            table = np.zeros((5, 1024))
            table[0] = self.slots
            table[:, : len(facts[first:][:1024])] = np.array(facts[first:][:1024]).T
            slots, ids, counts = table[:3].astype(np.int32)
            bits, bias = table[3].astype(np.uint8), table[4].astype(np.float32)
            self.state = self._facts(self.state, slots, ids, counts, bits, bias)

    def sample(self, logits: np.ndarray, slots, rows: int | None = None) -> sampler.Sampled:
        """One round; padded to `rows` (default: all slots), with NaN as the logits of padding."""
        rows = self.slots if rows is None else rows
        padded = np.full(rows, self.slots, np.int32)
        padded[: len(slots)] = slots
        table = np.full((rows, logits.shape[1]), np.nan, np.float32)
        table[: len(slots)] = logits
        choice, self.state = self._sample(self.state, table, padded)
        return jax.tree.map(lambda x: np.asarray(x)[: len(slots)], choice)


def uniforms(seeds, positions) -> np.ndarray:
    return np.asarray(programs()[3](np.array(seeds, np.uint32), np.array(positions, np.int32)), np.float64)


def random_params(numbers: np.random.Generator) -> SamplingParams:
    def sometimes(value, otherwise):
        return value if numbers.random() < 0.5 else otherwise

    biased = numbers.choice(VOCAB, 5, replace=False).tolist()
    return SamplingParams(
        temperature=float(sometimes(numbers.choice([0.3, 0.8, 1.0, 2.0]), numbers.choice([0.0, 1.0]))),
        top_k=int(sometimes(numbers.choice([1, 2, 5, 40, VOCAB, VOCAB + 7]), numbers.choice([-1, 0]))),
        top_p=float(sometimes(numbers.choice([0.0, 1e-8, 0.3, 0.7, 0.95]), 1.0)),
        min_p=float(sometimes(numbers.choice([0.01, 0.1, 0.5]), 0.0)),
        repetition_penalty=float(sometimes(numbers.choice([0.7, 1.3, 2.0]), 1.0)),
        presence_penalty=float(sometimes(numbers.uniform(-2, 2), 0.0)),
        frequency_penalty=float(sometimes(numbers.uniform(-2, 2), 0.0)),
        logit_bias=sometimes(dict(zip(biased, numbers.uniform(-4, 4, 5).tolist(), strict=True)), None),
        min_tokens=int(sometimes(3, 0)),
        logprobs=sometimes(3, None),
        max_tokens=64,
    )


def random_logits(numbers: np.random.Generator, rows: int) -> np.ndarray:
    """Rows with ties, with forbidden tokens, and rounded to bfloat16 (which makes more ties)."""
    logits = numbers.normal(0, 3, (rows, VOCAB)).astype(np.float32)
    kinds = numbers.integers(0, 4, rows)
    logits[kinds == 1] = np.round(logits[kinds == 1] * 2) / 2
    logits[kinds == 2] = logits[kinds == 2].astype(ml_dtypes.bfloat16).astype(np.float32)
    logits[(kinds == 3)[:, None] & (numbers.random((rows, VOCAB)) < 0.3)] = -np.inf
    return logits


@pytest.mark.parametrize("seed", range(12))
def test_random_parameters(seed):
    numbers = np.random.default_rng(seed)
    device = Device()
    setups = []
    for slot in range(SLOTS):
        params = random_params(numbers)
        prompt = tuple(numbers.integers(0, VOCAB, 6).tolist())
        before = tuple(numbers.integers(0, VOCAB, numbers.integers(0, 3)).tolist())
        ends = (3, 150, 7) if params.min_tokens else ()
        setups.append(SlotSetup(slot, params, int(numbers.integers(2**32)), prompt, before, ends))
    device.setup(setups)
    outputs = [list(setup.output_ids) for setup in setups]
    checked = 0
    for _ in range(10):
        logits = random_logits(numbers, SLOTS)
        order = numbers.permutation(SLOTS)[: numbers.integers(1, SLOTS + 1)]
        choice = device.sample(logits[: len(order)], order)
        numbers_drawn = uniforms([setups[s].seed for s in order], [len(outputs[s]) for s in order])
        for row, slot in enumerate(order):
            setup = setups[slot]
            edited = edited_logits(logits[row], setup.params, setup.prompt_ids, outputs[slot], setup.eos_ids)
            token = int(choice.ids[row])
            if is_clear(edited, setup.params):
                checked += 1
                assert admits(probabilities(edited, setup.params), numbers_drawn[row], token)
            outputs[slot].append(token)
            if setup.params.logprobs is not None:
                assert_reported(choice, row, logits[row], token)
    assert checked > 30


def assert_reported(choice: sampler.Sampled, row: int, logits: np.ndarray, token: int) -> None:
    """Log probabilities are the model's own: before bias, penalties and temperature."""
    expected = log_softmax(logits)
    np.testing.assert_allclose(choice.logprobs[row], expected[token], rtol=1e-5, atol=1e-5)
    assert choice.ranks[row] == (logits > logits[token]).sum() + 1
    order = np.argsort(-logits, kind="stable")[:20]
    np.testing.assert_array_equal(choice.top_ids[row], order)
    np.testing.assert_allclose(choice.top_logprobs[row], expected[order], rtol=1e-5, atol=1e-5)


# --- filters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_filters_keep_exactly_what_a_stable_sort_keeps(seed):
    numbers = np.random.default_rng(seed)
    rows = 64
    logits = np.concatenate([random_logits(numbers, rows // 2), numbers.choice([0.0, -0.0, 1.0], (rows // 2, VOCAB))])
    logits = logits.astype(np.float32)
    top_k = numbers.integers(1, VOCAB, rows).astype(np.int32)
    top_p = numbers.choice([0.0, 1e-8, 0.2, 0.51, 0.9, 0.999], rows).astype(np.float32)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    limits = numbers.random(rows) < 0.9
    by_k = np.asarray(jax.jit(keep_top_k)(weights, logits, top_k, limits)) > 0
    by_p = np.asarray(jax.jit(keep_top_p)(weights, logits, top_p, limits)) > 0
    for row in range(rows):
        possible = weights[row] > 0
        only_k = SamplingParams(top_k=int(top_k[row])) if limits[row] else SamplingParams()
        np.testing.assert_array_equal(by_k[row], probabilities(logits[row].astype(np.float64), only_k) > 0)
        only_p = SamplingParams(top_p=float(top_p[row])) if limits[row] else SamplingParams()
        if is_clear(logits[row], only_p):
            np.testing.assert_array_equal(by_p[row], probabilities(logits[row].astype(np.float64), only_p) > 0)
        assert by_p[row][possible].any()


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.5, 2), (0.75, 3), (0.5000001, 3), (0.9999, 4), (0.0, 1)])
def test_top_p_at_the_border_of_equal_tokens(top_p, kept):
    logits = np.full((1, VOCAB), -np.inf, np.float32)
    ids = [5, 80, 131, 156]
    logits[0, ids] = 1.5
    out = keep_top_p(jnp.exp(logits - 1.5), jnp.array(logits), jnp.array([top_p], jnp.float32), jnp.array([True]))
    assert np.flatnonzero(np.asarray(out)[0]).tolist() == ids[:kept]


@pytest.mark.parametrize("top_k", [-1, 0, 4, 99])
def test_four_equal_logits_and_top_k(top_k):
    device = Device(256, 4)
    device.setup([SlotSetup(slot, SamplingParams(top_k=top_k), slot, (0,)) for slot in range(256)])
    ids = device.sample(np.zeros((256, 4), np.float32), range(256)).ids
    assert set(ids.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_tiny_top_p_is_argmax_in_a_batch_with_greedy_rows(dtype):
    numbers = np.random.default_rng(0)
    logits = numbers.normal(0, 1, (SLOTS, VOCAB)).astype(dtype).astype(np.float32)
    device = Device()
    choices = [0.0, 1e-8, 1e-3, None, 0.0, 1e-8, 1e-3, None]
    params = [
        SamplingParams(logprobs=1, **({"temperature": 0.0} if top_p is None else {"top_p": top_p})) for top_p in choices
    ]
    device.setup([SlotSetup(slot, params[slot], slot, (0,)) for slot in range(SLOTS)])
    for _ in range(5):
        choice = device.sample(logits, range(SLOTS))
        np.testing.assert_array_equal(choice.ids, logits.argmax(-1))
        assert np.isfinite(choice.logprobs).all()
        assert np.isfinite(choice.top_logprobs).all()


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-300, 1e-6])
def test_tiny_temperatures_are_greedy(temperature):
    logits = np.random.default_rng(1).normal(0, 5, (SLOTS, VOCAB)).astype(np.float32)
    logits[:, 9] = -np.inf
    device = Device()
    device.setup([SlotSetup(slot, SamplingParams(temperature=temperature), slot, (0,)) for slot in range(SLOTS)])
    np.testing.assert_array_equal(device.sample(logits, range(SLOTS)).ids, logits.argmax(-1))


def test_huge_temperature_is_uniform_over_what_is_allowed():
    device = Device(256, 8)
    params = SamplingParams(temperature=1e300, min_tokens=1)
    device.setup([SlotSetup(slot, params, slot, (0,), (), (0, 1)) for slot in range(256)])
    ids = device.sample(np.tile(np.arange(8, dtype=np.float32), (256, 1)), range(256)).ids
    assert set(ids.tolist()) == {2, 3, 4, 5, 6, 7}


def test_inversion_is_right_at_every_border_of_a_long_sparse_row():
    # Long enough for parallel running sums, which may rise where nothing is added: half of the blocks are empty.
    numbers = np.random.default_rng(3)
    vocab, rows = 100_000, 512
    weights = numbers.random(vocab).astype(np.float32) ** 4
    weights[numbers.random(vocab) < 0.5] = 0
    weights[(np.arange(vocab) // 128) % 2 == 1] = 0
    upper = np.cumsum(weights, dtype=np.float64) / weights.sum(dtype=np.float64)
    lower = upper - weights / weights.sum(dtype=np.float64)
    last_of_block = [first + np.flatnonzero(weights[first : first + 128])[-1] for first in range(0, vocab - 127, 256)]
    near = np.resize(upper[last_of_block], rows)
    steps = np.round(near * 2**23) + np.arange(rows) // len(last_of_block)
    uniform = (np.clip(steps, 0, 2**23 - 1) / 2**23).astype(np.float32)
    best = np.full(rows, weights.argmax(), np.int32)
    ids = np.asarray(jax.jit(sampler._invert)(np.broadcast_to(weights, (rows, vocab)), uniform, best))
    assert (weights[ids] > 0).all()
    assert (lower[ids] - 2e-6 <= uniform).all()
    assert (uniform <= upper[ids] + 2e-6).all()


# --- distributions ---------------------------------------------------------------------------------------------------

DRAWERS, SMALL = 2048, 37


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.7),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.4, min_p=0.02, top_k=12, top_p=0.9),
        SamplingParams(repetition_penalty=1.8, logit_bias={3: 2.0, 4: -1.0}),
    ],
    ids=lambda params: f"t{params.temperature}-k{params.top_k}-p{params.top_p}-m{params.min_p}",
)
def test_draws_follow_the_distribution(params):
    logits = np.random.default_rng(11).normal(0, 1.2, SMALL).astype(np.float32)
    logits[4] = logits[5]
    device = Device(DRAWERS, SMALL)
    rounds = 8
    counts = np.zeros(SMALL)
    for first in range(rounds):
        # The same prompt again; only the seeds differ.
        device.setup([SlotSetup(s, params, 10**6 + s + first * DRAWERS, (1, 4)) for s in range(DRAWERS)])
        ids = device.sample(np.tile(logits, (DRAWERS, 1)), range(DRAWERS)).ids
        counts += np.bincount(ids, minlength=SMALL)
    expected = probabilities(edited_logits(logits, params, (1, 4), (), ()), params) * counts.sum()
    assert counts[expected == 0].sum() == 0
    rare = (expected > 0) & (expected < 8)
    observed = [*counts[expected >= 8], *([counts[rare].sum()] if rare.any() else [])]
    wanted = [*expected[expected >= 8], *([expected[rare].sum()] if rare.any() else [])]
    assert chisquare(observed, wanted).pvalue > 1e-3


def test_positions_of_one_stream_are_independent():
    device = Device(DRAWERS, SMALL)
    device.setup([SlotSetup(slot, SamplingParams(), slot, (1,)) for slot in range(DRAWERS)])
    flat = np.zeros((DRAWERS, SMALL), np.float32)
    first, second = (device.sample(flat, range(DRAWERS)).ids for _ in range(2))
    pairs = np.bincount(first % 6 * 6 + second % 6, minlength=36)
    shares = np.bincount(np.arange(SMALL) % 6, minlength=6) / SMALL
    assert chisquare(pairs, np.outer(shares, shares).ravel() * DRAWERS).pvalue > 1e-3


# --- penalties, bias, min_tokens, by hand ----------------------------------------------------------------------------


def greedy_after(params: SamplingParams, logits: dict[int, float], prompt=(), output=(), ends=()) -> int:
    row = np.full((1, VOCAB), -50, np.float32)
    for token, value in logits.items():
        row[0, token] = value
    device = Device()
    device.setup([SlotSetup(2, params, 0, tuple(prompt), tuple(output), tuple(ends))])
    return int(device.sample(row, [2]).ids[0])


def test_repetition_counts_prompt_and_output_the_others_output_only():
    logits = {10: 2.0, 11: 1.5}
    greedy = {"temperature": 0.0}
    assert greedy_after(SamplingParams(repetition_penalty=2, **greedy), logits, prompt=[10]) == 11
    assert greedy_after(SamplingParams(repetition_penalty=2, **greedy), logits, output=[10]) == 11
    for name in ("presence_penalty", "frequency_penalty"):
        assert greedy_after(SamplingParams(**{name: 1.0}, **greedy), logits, prompt=[10]) == 10
        assert greedy_after(SamplingParams(**{name: 1.0}, **greedy), logits, output=[10]) == 11
    assert greedy_after(SamplingParams(presence_penalty=0.4, **greedy), logits, output=[10, 10]) == 10
    assert greedy_after(SamplingParams(frequency_penalty=0.4, **greedy), logits, output=[10, 10]) == 11


def test_bias_comes_before_the_repetition_penalty():
    params = SamplingParams(temperature=0.0, repetition_penalty=2, logit_bias={10: 4.0})
    assert greedy_after(params, {10: -2.0, 11: 1.5}, prompt=[10]) == 11  # (-2 + 4) / 2, not -2 * 2 + 4 = 0 or 3
    assert greedy_after(params, {10: -0.5, 11: 1.7}, prompt=[10]) == 10


def test_min_tokens_bans_every_end_until_it_is_reached():
    params = SamplingParams(temperature=0.0, min_tokens=2, logit_bias={20: 100.0})
    logits = {20: 9.0, 21: 8.0, 22: 7.0, 30: 6.0}
    assert [greedy_after(params, logits, output=[5] * n, ends=[20, 21, 22]) for n in range(4)] == [30, 30, 20, 20]


def test_a_slot_forgets_what_it_held_before():
    device = Device()
    heavy = SamplingParams(
        temperature=0.0, repetition_penalty=5, presence_penalty=2, logit_bias={9: 50.0}, min_tokens=9, max_tokens=20
    )
    device.setup([SlotSetup(1, heavy, 0, (3, 4), (5, 5), (6,))])
    neutral = SamplingParams(temperature=0.0, repetition_penalty=1.0001)
    device.setup([SlotSetup(1, neutral, 0, ())])
    logits = np.zeros((1, VOCAB), np.float32)
    for token in (3, 4, 5, 6, 7):
        logits[0, token] += 2
        assert device.sample(logits, [1]).ids[0] == token
        logits[0, token] = 0


# --- random streams --------------------------------------------------------------------------------------------------


def test_a_row_depends_on_its_seed_and_position_only():
    numbers = np.random.default_rng(5)
    logits = numbers.normal(0, 1, (6, VOCAB)).astype(np.float32)  # the same for every row, new at each position
    params = [SamplingParams(), SamplingParams(top_k=20, top_p=0.9), SamplingParams(frequency_penalty=1.0)]

    def stream(slots: list[int], rows: int, others: int = 0) -> dict[int, list[int]]:
        """What the sequence with seed 100 + i, which sits in slots[i], draws; `others` greedy rows come before."""
        device = Device()
        device.setup([SlotSetup(slot, params[i % 3], 100 + i, (1,)) for i, slot in enumerate(slots)])
        free = [slot for slot in range(SLOTS) if slot not in slots][:others]
        device.setup([SlotSetup(slot, SamplingParams(temperature=0.0, min_p=0.3), 100, (2,)) for slot in free])
        found = {i: [] for i in range(len(slots))}
        for row in logits:
            choice = device.sample(np.tile(row, (len(slots) + len(free), 1)), [*free, *slots], rows)
            for i in found:
                found[i].append(int(choice.ids[len(free) + i]))
        return found

    together = stream([0, 1, 2, 3, 4, 5], 8)
    assert stream([7, 2, 4, 0, 1, 6], 6) == together
    assert stream([3], 1)[0] == together[0]
    assert stream([3, 5, 1], 8, others=4) == {i: together[i] for i in range(3)}
    assert len({tuple(ids) for ids in together.values()}) > 3


def test_a_stream_goes_on_where_the_output_ends():
    logits = np.random.default_rng(6).normal(0, 1, (6, VOCAB)).astype(np.float32)
    whole = Device()
    params = SamplingParams(presence_penalty=0.5)
    whole.setup([SlotSetup(0, params, 77, (1,))])
    ids = [int(whole.sample(row[None], [0]).ids[0]) for row in logits]
    again = Device()
    again.setup([SlotSetup(4, params, 77, (1,), tuple(ids[:3]))])
    assert [int(again.sample(row[None], [4]).ids[0]) for row in logits[3:]] == ids[3:]


def test_argmax_is_the_first_of_equals_and_0_for_nan():
    rows = np.zeros((4, 300), np.float32)
    rows[0, [130, 290]] = 5
    rows[1] = -np.inf
    rows[2, 299] = 1
    rows[3] = np.nan
    np.testing.assert_array_equal(argmax(jnp.array(rows)), [130, 0, 299, 0])

"""Every family against Hugging Face: logits of each position and greedy ids, however the positions are computed."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.runtime.state import DecodeBatch, EngineState, MixedBatch, PrefillBatch, TableUpdates, init_state
from jaxinfer.runtime.steps import decode_step, logits_of, mixed_step, prefill_hidden, prefill_step
from pallas_kernels import KVPages

NAMES = tuple(sorted(path.parent.name for path in (Path(__file__).parents[1] / "golden").glob("*/expected.npz")))
TOLERANCE = 1e-4
STEPS = decode_step, mixed_step
SLOTS, PAGE, PAGES, CONTEXT, TOKENS = 5, 8, 90, 112, 128


@cache
def compiled(config):
    def prefill(params, state, batch):
        hidden, state = prefill_hidden(config, params, state, batch)
        return logits_of(config, params, hidden), state

    decode, mixed = (jax.jit(lambda *a, step=step: step(config, *a), donate_argnums=1) for step in STEPS)
    return jax.jit(prefill, donate_argnums=1), decode, mixed


class Session:
    """Sequences in slots 0, 1, .. of a cache whose pages lie in random order and hold NaN until they are written."""

    def __init__(self, model, seed: int = 0) -> None:
        self.config, self.params = model.config.for_context(CONTEXT), model.params
        self.prefill_program, self.decode_program, self.mixed_program = compiled(self.config)
        empty = init_state(self.config, num_slots=SLOTS, num_pages=PAGES, page_size=PAGE, max_context=CONTEXT)
        kv = tuple(KVPages(jnp.full_like(pages.data, jnp.nan)) for pages in empty.kv)
        columns = -(-CONTEXT // PAGE)
        order = np.random.default_rng(seed).permutation(np.arange(1, PAGES))
        self.table = order[: SLOTS * columns].reshape(SLOTS, columns)
        self.state = EngineState(kv, empty.page_table, empty.lengths)
        self.lengths = np.zeros(SLOTS, int)

    def _updates(self, counts: list[int], size: int) -> TableUpdates:
        table = np.zeros((3, size), np.int32)
        table[0] = SLOTS
        entries = [
            (slot, column, self.table[slot, column])
            for slot, count in enumerate(counts)
            for column in range(-(-self.lengths[slot] // PAGE), -(-(self.lengths[slot] + count) // PAGE))
        ]
        if entries:
            table[:, : len(entries)] = np.array(entries).T
        return TableUpdates(*table)

    def prefill(self, chunks: list[np.ndarray]) -> list[np.ndarray]:
        """The next positions of slot 0, 1, ..; logits f32[count, vocab] of each."""
        counts = [len(chunk) for chunk in chunks]
        flat = np.zeros(TOKENS, np.int32)
        flat[: sum(counts)] = np.concatenate(chunks)
        starts = np.cumsum([0, *counts]).astype(np.int32)
        # A row without tokens is padding.
        slots = np.array([slot if count else SLOTS for slot, count in enumerate(counts)], np.int32)
        begins = np.array([self.lengths[slot] if count else 0 for slot, count in enumerate(counts)], np.int32)
        batch = PrefillBatch(flat, starts, slots, begins, self._updates(counts, 32))
        logits, self.state = self.prefill_program(self.params, self.state, batch)
        self.lengths[: len(counts)] += counts
        logits = np.asarray(logits)
        return [logits[begin : begin + count] for begin, count in zip(starts, counts, strict=False)]

    def mixed(self, chunks: dict[int, np.ndarray], tokens: dict[int, int]) -> dict[int, np.ndarray]:
        """The next positions of some slots and one token of others; the logits f32[vocab] of the last of each."""
        ids = [*chunks.values(), np.array(list(tokens.values()), int)]
        counts = [len(chunks.get(slot, ())) + (slot in tokens) for slot in range(SLOTS)]
        flat, starts = np.zeros(TOKENS, np.int32), np.zeros(SLOTS + 1, np.int32)
        flat[: sum(counts)] = np.concatenate(ids)
        starts[:] = sum(map(len, chunks.values()))
        starts[: len(chunks) + 1] = np.cumsum([0, *map(len, chunks.values())])
        slots, begins, decode_slots = np.full(SLOTS, SLOTS, np.int32), np.zeros(SLOTS, np.int32), np.full(3, SLOTS)
        slots[: len(chunks)] = list(chunks)
        begins[: len(chunks)] = self.lengths[list(chunks)]
        decode_slots[: len(tokens)] = list(tokens)
        wanted = np.full(SLOTS, TOKENS, np.int32)
        ends = np.cumsum([*map(len, chunks.values()), *[1] * len(tokens)]) - 1
        wanted[: len(ends)] = ends
        prefill = PrefillBatch(flat, starts, slots, begins, self._updates(counts, 32))
        batch = MixedBatch(prefill, decode_slots.astype(np.int32), wanted)
        logits, self.state = self.mixed_program(self.params, self.state, batch)
        self.lengths += counts
        return dict(zip([*chunks, *tokens], np.asarray(logits), strict=False))

    def decode(self, tokens: dict[int, int]) -> dict[int, np.ndarray]:
        """One token for some slots; the logits f32[vocab] of each."""
        slots = np.full(SLOTS, SLOTS, np.int32)
        ids = np.zeros(SLOTS, np.int32)
        slots[: len(tokens)], ids[: len(tokens)] = list(tokens), list(tokens.values())
        counts = [int(slot in tokens) for slot in range(SLOTS)]
        batch = DecodeBatch(ids, slots, self._updates(counts, SLOTS))
        logits, self.state = self.decode_program(self.params, self.state, batch)
        self.lengths += counts
        logits = np.asarray(logits)
        return {slot: logits[row] for row, slot in enumerate(tokens)}


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= TOLERANCE


@pytest.fixture(params=NAMES)
def model(request, golden_models):
    return golden_models[request.param]


def test_prefill_in_one_piece(model):
    session = Session(model)
    for found, expected in zip(session.prefill(model.prompts), model.logits, strict=True):
        assert_close(found, expected)
    np.testing.assert_array_equal(session.state.lengths[:4], [len(prompt) for prompt in model.prompts])


@pytest.mark.parametrize("seed", [0, 1])
def test_prefill_in_random_chunks(model, seed):
    numbers = np.random.default_rng(seed)
    session = Session(model, seed)
    rest, found = list(model.prompts), [[] for _ in model.prompts]
    while any(map(len, rest)):
        counts = [int(numbers.integers(0, min(len(ids), 13) + 1)) for ids in rest]
        for slot, logits in enumerate(session.prefill([ids[:n] for ids, n in zip(rest, counts, strict=True)])):
            found[slot].append(logits)
        rest = [ids[n:] for ids, n in zip(rest, counts, strict=True)]
    for parts, expected in zip(found, model.logits, strict=True):
        assert_close(np.concatenate(parts), expected)


def test_decode_one_token_at_a_time(model):
    session = Session(model)
    for position in range(max(map(len, model.prompts))):
        # The longest comes first, so rows are not in the order of their slots.
        active = [slot for slot in (3, 1, 2, 0) if position < len(model.prompts[slot])]
        for slot, logits in session.decode({slot: model.prompts[slot][position] for slot in active}).items():
            assert_close(logits, model.logits[slot][position])


@pytest.mark.parametrize("seed", [0, 1])
def test_prefill_and_decode_in_one_step(model, seed):
    numbers = np.random.default_rng(seed)
    session = Session(model, seed)
    rest = {slot: list(prompt) for slot, prompt in enumerate(model.prompts)}
    while any(rest.values()):
        left = [slot for slot in numbers.permutation(len(rest)).tolist() if rest[slot]]
        decoding = int(numbers.integers(min(len(left), 4)))  # none up to all but one, at most three
        counts = {slot: int(numbers.integers(1, 14)) for slot in left[decoding:]}
        chunks = {slot: np.array(rest[slot][:count]) for slot, count in counts.items()}
        tokens = {slot: rest[slot][0] for slot in left[:decoding]}
        found = session.mixed(chunks, tokens)
        assert found.keys() == chunks.keys() | tokens.keys()
        for slot, logits in found.items():
            rest[slot] = rest[slot][len(chunks.get(slot, [0])) :]
            assert_close(logits, model.logits[slot][session.lengths[slot] - 1])
        np.testing.assert_array_equal(session.state.lengths, session.lengths)


def test_greedy_ids(model):
    session = Session(model)
    prefilled = session.prefill(model.prompts)
    ids = {slot: [int(logits[-1].argmax())] for slot, logits in enumerate(prefilled)}
    for _ in range(63):
        for slot, logits in session.decode({slot: found[-1] for slot, found in ids.items()}).items():
            ids[slot].append(int(logits.argmax()))
    for slot, expected in enumerate(model.greedy):
        assert ids[slot] == expected.tolist()


def test_prefill_step_gives_the_last_position_of_each_row(golden_models):
    model = golden_models["mistral"]
    session = Session(model)
    prompts, config = model.prompts[1:3], model.config
    flat = np.zeros(32, np.int32)
    flat[:27] = np.concatenate(prompts)
    padded = np.array([0, SLOTS, SLOTS], np.int32)
    padded[1] = 1
    starts = np.array([0, 7, 27, 27], np.int32)
    batch = PrefillBatch(flat, starts, padded, np.zeros(3, np.int32), session._updates([7, 20], 8))
    logits, _ = jax.jit(prefill_step, static_argnums=0, donate_argnums=2)(config, model.params, session.state, batch)
    for row in range(2):
        assert_close(np.asarray(logits[row]), model.logits[1 + row][-1])


BFLOAT16_ERRORS = {
    # Median and 99% quantile of transformers' own error in bfloat16, eager on a CPU, against the spread of the logits.
    "mistral": (0.0109, 0.0646),
    "gemma2": (0.0083, 0.0469),
    "gemma3": (0.0071, 0.0373),
    "phi3-long": (0.0110, 0.0785),
    "olmo2": (0.0054, 0.0285),
    "smollm3": (0.0159, 0.1147),
    "gpt2": (0.0063, 0.0325),
    "opt": (0.0053, 0.0265),
}


@pytest.mark.parametrize("name", BFLOAT16_ERRORS)
def test_bfloat16_is_no_further_from_float32_than_transformers(golden_models, name):
    model = golden_models[name]
    config, params = model.config_as("bfloat16").for_context(CONTEXT), model.params_as("bfloat16")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    session = Session(model)
    session.config, session.params = config, params
    session.prefill_program, *_ = compiled(config)
    kv = tuple(KVPages(pages.data.astype(jnp.bfloat16)) for pages in session.state.kv)
    session.state = EngineState(kv, session.state.page_table, session.state.lengths)
    found = np.concatenate(session.prefill(model.prompts))
    expected = np.concatenate(model.logits)
    assert found.dtype == np.float32
    assert (found != found.astype(jnp.bfloat16)).mean() > 0.9, "the logits themselves are float32"
    error = np.abs(found - expected) / expected.std()
    median, most = BFLOAT16_ERRORS[name]
    assert np.quantile(error, 0.5) < 1.15 * median
    assert np.quantile(error, 0.99) < 1.15 * most
    assert np.quantile(error, 0.5) > 1e-4, "this was not computed in bfloat16"

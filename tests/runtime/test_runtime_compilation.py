"""Once a runner is built nothing compiles, nothing is dispatched outside its programs, the cache is never copied."""

from __future__ import annotations

from contextlib import contextmanager

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from engine_tools import WIDE, PlainTokenizer, poison, random_request

from jaxinfer.engine import Engine

STEPS = 500


@contextmanager
def counted_compilations():
    """A list that grows by the name of every program that XLA compiles (or reads from a compilation cache)."""
    names = []

    def listen(event: str, duration: float, **details) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(details.get("fun_name", "?"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        # Without jax's own caches, even an operation that was used before compiles again and is counted.
        jax.clear_caches()
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def runner(build_runner):
    return build_runner("qwen2", **WIDE)


def test_the_counter_counts():
    jnp.add(np.ones(3), 1).block_until_ready()
    with counted_compilations() as names:
        jnp.add(np.ones(3), 1).block_until_ready()
        assert len(names) == 1, "an operation outside jit"
        jax.jit(lambda x: x * 3 + 1)(np.ones(5)).block_until_ready()
        assert len(names) == 2, "a new program"


def test_nothing_compiles_in_500_steps(runner):
    poison(runner)
    numbers = np.random.default_rng(0)
    engine = Engine(runner, PlainTokenizer())
    alive, added, finished = [], 0, 0
    with counted_compilations() as names:
        for _ in range(STEPS):
            while len(alive) < 8 and numbers.random() < 0.5:
                alive.append(str(added))
                engine.add_request(alive[-1], *random_request(numbers, runner.limits.vocab_size))
                added += 1
            if alive and numbers.random() < 0.03:
                engine.abort(alive.pop(int(numbers.integers(len(alive)))))
            for output in engine.step():
                if output.finished:
                    alive.remove(output.request_id)
                    finished += 1
    assert names == []
    assert finished > 50
    engine.scheduler.check_integrity()


def test_every_step_updates_the_pool_in_place(runner):
    pool = sum(pages.data.nbytes for pages in runner.state.kv)
    assert pool > 60_000_000
    programs = runner.programs.decode | runner.programs.prefill
    assert len(programs) == len(runner.buckets.decode_rows) + len(runner.buckets.prefill)
    for bucket, program in programs.items():
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes >= pool, bucket
        assert memory.temp_size_in_bytes < 0.05 * pool, bucket


def test_the_sampler_state_is_updated_in_place(runner):
    tables = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.sampler))
    for program in (*runner.programs.sample.values(), runner.programs.setup_slots, runner.programs.add_token_facts):
        assert program.memory_analysis().alias_size_in_bytes >= 0.95 * tables


def test_the_pool_stays_where_it_is(runner):
    poison(runner)
    engine = Engine(runner, PlainTokenizer())
    before = [pages.data.unsafe_buffer_pointer() for pages in runner.state.kv]
    engine.add_request("0", list(range(3, 40)))
    for _ in range(4):
        engine.step()
    assert [pages.data.unsafe_buffer_pointer() for pages in runner.state.kv] == before

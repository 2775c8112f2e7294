"""Time of prefill and decode steps, measured with the very programs that serve requests."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.core.step import PrefillRow, StepWork
from jaxinfer.engine.device_rates import DeviceRates, measure_rates
from jaxinfer.engine.kernel_times import random_pages
from jaxinfer.models import DecoderConfig, abstract_params
from jaxinfer.runtime.cost import StepCost, decode_cost, parameter_bytes, prefill_cost, weight_bytes_read
from jaxinfer.runtime.limits import Buckets, RunnerLimits, buckets_for
from jaxinfer.runtime.programs import Progress
from jaxinfer.runtime.runner import Runner
from jaxinfer.runtime.steps import Params
from pallas_kernels.dispatch import current_platform

MOST_STREAMED = 64
"""Decode steps that one stream may have: so many positions more than asked for each sequence has pages for."""


@dataclass(frozen=True)
class StepTime:
    """One kind of step.

    kind: "decode" or "prefill". batch: sequences. tokens: positions computed for each. context: positions that each had
    cached before. seconds: of every repetition as the engine runs it: dispatched, waited for, sampled ids transferred.
    cost: the least work. floor_s: least time by the measured rates; bound: "bandwidth" or "compute".
    stream_s: of a step when many are dispatched back to back and waited for once, the device's own time wherever the
    host keeps ahead.
    """

    kind: str
    batch: int
    tokens: int
    context: int
    seconds: tuple[float, ...]
    cost: StepCost
    floor_s: float
    bound: str
    stream_s: float

    @property
    def median_s(self) -> float:
        """Median time of a step that is waited for."""
        return statistics.median(self.seconds)

    @property
    def tokens_per_s(self) -> float:
        """Positions computed per second, every step waited for."""
        return self.batch * self.tokens / self.median_s

    @property
    def floor_ratio(self) -> float:
        """Median time over the floor; 1 is perfect."""
        return self.median_s / self.floor_s

    @property
    def stream_floor_ratio(self) -> float:
        """Time of a streamed step over the floor; 1 is perfect."""
        return self.stream_s / self.floor_s


@dataclass(frozen=True)
class TimerSizes:
    """What a timer is built for.

    batches: decode batches. contexts: positions that a sequence may have cached at decode. prefills: tokens of a
    prefill. prefill_rows: prompts these are divided among. prefill_contexts: positions that each had cached before.
    """

    batches: tuple[int, ...] = (1, 8)
    contexts: tuple[int, ...] = (1024,)
    prefills: tuple[int, ...] = (512,)
    prefill_rows: tuple[int, ...] = (1,)
    prefill_contexts: tuple[int, ...] = (0,)

    @property
    def prefill_shapes(self) -> tuple[tuple[int, int], ...]:
        """(tokens of each prompt, prompts) of all prefills whose tokens suffice for so many prompts."""
        return tuple((tokens // rows, rows) for tokens in self.prefills for rows in self.prefill_rows if tokens >= rows)

    def limits(self, config: DecoderConfig) -> RunnerLimits:
        """The runner's limits. ValueError when these sizes contradict each other or the model."""
        if min(self.prefill_contexts) < 0:
            raise ValueError(f"A prompt cannot have {min(self.prefill_contexts)} positions cached before.")
        if not self.prefill_shapes:
            raise ValueError(f"A prefill of {max(self.prefills)} tokens cannot be of {min(self.prefill_rows)} prompts.")
        longest = max(*self.contexts, max(self.prefills) + max(self.prefill_contexts))
        if longest > config.max_positions:
            raise ValueError(f"{longest} positions are asked for, but the model was made for {config.max_positions}.")
        page_size = 16 if jax.default_backend() == "cpu" else 64
        rows = max(self.prefill_rows)
        batch, context = max(*self.batches, rows), longest + MOST_STREAMED
        return RunnerLimits(
            max_slots=batch,
            page_size=page_size,
            num_pages=1 + batch * -(-context // page_size),
            max_context=context,
            max_batched_tokens=max(*self.prefills, batch),
            max_prefill_rows=rows,
            vocab_size=config.vocab_size,
        )

    def buckets(self, limits: RunnerLimits) -> Buckets:
        """Of all the runner's batch shapes those that are timed."""
        served = buckets_for(limits, current_platform())
        decode = {served.decode(batch) for batch in self.batches}
        prefill = {served.prefill_for(tokens * rows, rows) for tokens, rows in self.prefill_shapes}
        return dataclasses.replace(served, decode_rows=tuple(sorted(decode)), prefill=tuple(sorted(prefill)))


class StepTimer:
    """A model made ready for timing; keeps no engine, only a runner.

    model, dtype, weight_dtype, attention: as in `EngineOptions`; see `from_params` and `with_random_weights` for models
    without a checkpoint. sizes: what will be asked for.
    Raises ValueError, one sentence, when the model cannot be used or does not fit the memory at these sizes.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        weight_dtype: str = "float",
        attention: str = "auto",
        sizes: TimerSizes | None = None,
        on_progress: Progress | None = None,
    ) -> None:
        # Checkpoint readers are not needed, and need not be installed, where the weights come from elsewhere.
        from jaxinfer.engine.build import EngineOptions, load_model

        loaded = load_model(
            model, EngineOptions(dtype=dtype, weight_dtype=weight_dtype, attention=attention), on_progress
        )
        self._prepare(loaded.config, loaded.params, sizes or TimerSizes(), on_progress)

    @classmethod
    def from_params(
        cls, config: DecoderConfig, params: Params, sizes: TimerSizes, on_progress: Progress | None = None
    ) -> StepTimer:
        """A timer of parameters that are on the device."""
        timer = cls.__new__(cls)
        timer._prepare(config, params, sizes, on_progress)
        return timer

    @classmethod
    def with_random_weights(
        cls, config: DecoderConfig, sizes: TimerSizes, on_progress: Progress | None = None
    ) -> StepTimer:
        """A timer of random parameters made on the device."""
        check_memory(config, sizes.limits(config))
        return cls.from_params(config, random_params(config), sizes, on_progress)

    def _prepare(self, config: DecoderConfig, params: Params, sizes: TimerSizes, on_progress: Progress | None) -> None:
        self.config = config
        limits = sizes.limits(config)
        check_memory(config, limits)
        self.runner = _TimedRunner(config, params, limits, on_progress, sizes.buckets(limits))
        self._fill()

    def decode(self, batch: int, context: int, repeats: int) -> list[float]:
        """Seconds of `repeats` decode steps of `batch` sequences with `context` positions cached each, as the engine
        runs them: each is dispatched, waited for, and its sampled ids come to the host.
        """
        self._check(batch, context)
        return self._rounds(StepWork(decodes=tuple(range(batch))), context, repeats)

    def prefill(self, tokens: int, repeats: int, *, rows: int = 1, context: int = 0) -> list[float]:
        """As `decode`, of `repeats` prefills of `rows` prompts: `tokens` tokens of each after `context` cached ones."""
        return self._rounds(StepWork(prefills=self._prompts(tokens, rows, context)), 0, repeats)

    def decode_stream(self, batch: int, context: int, steps: int) -> float:
        """Seconds of a decode step when `steps` (at most MOST_STREAMED) are dispatched back to back and waited for
        once; `context` is what their sequences have cached on average.
        """
        self._check(batch, context)
        steps = min(steps, MOST_STREAMED)
        slots = tuple(range(batch))
        return self._stream(lambda: self.runner.dispatch_decode(slots), max(1, context - steps // 2), steps)

    def prefill_stream(self, tokens: int, steps: int, *, rows: int = 1, context: int = 0) -> float:
        """As `decode_stream`, of the prefills that `prefill` times."""
        prompts = self._prompts(tokens, rows, context)
        return self._stream(lambda: self.runner.dispatch_prefill(prompts), 0, steps)

    def rates(self) -> DeviceRates:
        """Measure the device."""
        return measure_rates(self.config.dtype)

    def _rounds(self, work: StepWork, context: int, repeats: int) -> list[float]:
        seconds = []
        for repeat in range(repeats + 1):
            self._set_lengths(context)
            begin = time.perf_counter()
            self.runner.execute(work)
            if repeat:  # the first one warms caches
                seconds.append(time.perf_counter() - begin)
        return seconds

    def _stream(self, dispatch: Callable[[], Any], context: int, steps: int, batches: int = 3) -> float:
        self._set_lengths(context)
        jax.block_until_ready(dispatch())
        seconds = []
        for _ in range(batches):
            self._set_lengths(context)
            begin = time.perf_counter()
            results = [dispatch() for _ in range(steps)]
            jax.block_until_ready(results[-1])
            seconds.append((time.perf_counter() - begin) / steps)
        return statistics.median(seconds)

    def _fill(self) -> None:
        """Give every slot its pages in random order, the pages random numbers, and every slot a random last token."""
        runner, limits = self.runner, self.runner.limits
        order = np.random.default_rng(0).permutation(np.arange(1, limits.num_pages))
        table = order.reshape(limits.max_slots, limits.pages_per_sequence).astype(np.int32)
        make = jax.jit(random_pages, static_argnums=(1, 2))
        layers: list[Any] = list(runner.state.kv)
        runner.state = dataclasses.replace(runner.state, kv=(), page_table=jax.device_put(table))
        for index, key in enumerate(jax.random.split(jax.random.key(0, impl="rbg"), len(layers))):
            shape = layers[index].data.shape
            layers[index] = None  # freed before its successor is made
            layers[index] = make(key, shape, self.config.page_dtype)
        runner.state = dataclasses.replace(runner.state, kv=tuple(layers))
        last_token = jax.device_put(np.array(self._token_ids(limits.max_slots), np.int32))
        runner.sampler = dataclasses.replace(runner.sampler, last_token=last_token)

    def _set_lengths(self, context: int) -> None:
        lengths = np.full(self.runner.limits.max_slots, context, np.int32)
        self.runner.state = dataclasses.replace(self.runner.state, lengths=jax.device_put(lengths))
        jax.block_until_ready(self.runner.state.lengths)

    def _prompts(self, tokens: int, rows: int, context: int) -> tuple[PrefillRow, ...]:
        self._check(rows, context + tokens)
        token_ids = tuple(self._token_ids(tokens))
        return tuple(PrefillRow(slot, token_ids, context, sample=True) for slot in range(rows))

    def _token_ids(self, count: int) -> list[int]:
        return np.random.default_rng(1).integers(0, self.config.vocab_size, count).tolist()

    def _check(self, batch: int, positions: int) -> None:
        limits = self.runner.limits
        most = limits.max_context - MOST_STREAMED
        if not 1 <= batch <= limits.max_slots or not 1 <= positions <= most:
            raise ValueError(
                f"This timer holds {limits.max_slots} sequences of {most} positions, not {batch} of {positions}."
            )


class _TimedRunner(Runner):
    """A runner whose steps can also be dispatched without waiting for them."""

    def dispatch_decode(self, slots: Sequence[int]) -> Any:
        """What a decode step will sample, not waited for."""
        return self._decode(slots, ())

    def dispatch_prefill(self, rows: Sequence[PrefillRow]) -> Any:
        """What a prefill will sample, not waited for."""
        return self._prefill(rows, (), ())[0]


def check_memory(config: DecoderConfig, limits: RunnerLimits) -> None:
    """Raise ValueError when weights and KV pool are more than the device's memory, where that is known."""
    weights = parameter_bytes(config)
    pool = limits.num_pages * limits.page_size * config.kv_bytes_per_token
    stats: dict[str, Any] = jax.local_devices()[0].memory_stats() or {}
    on_cpu = jax.default_backend() == "cpu"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if on_cpu else stats.get("bytes_limit")
    if memory is not None and weights + pool > memory:
        raise ValueError(
            f"{weights / 1e9:.1f} GB of weights and {pool / 1e9:.1f} GB of keys and values for {limits.max_slots} "
            f"sequences of {limits.max_context} positions are more than the device's {memory / 1e9:.1f} GB; "
            "take a smaller batch or a shorter context."
        )


def random_params(config: DecoderConfig, seed: int = 0) -> Params:
    """Random parameters of `Decoder(config)`, made on the device one by one: no more than the model itself is held."""

    def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        if jnp.issubdtype(dtype, jnp.integer):  # of a quantized weight
            return jax.random.randint(key, shape, -7, 8, jnp.int8).astype(dtype)
        return (0.02 * jax.random.normal(key, shape, dtype)).astype(dtype)

    make = jax.jit(normal, static_argnums=(1, 2))
    shapes, tree = jax.tree_util.tree_flatten_with_path(abstract_params(config))
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(shapes))
    leaves = [
        jnp.ones(leaf.shape, leaf.dtype)
        if path[-1] == jax.tree_util.DictKey("scale")
        else make(key, leaf.shape, leaf.dtype)
        for key, (path, leaf) in zip(keys, shapes, strict=True)
    ]
    return jax.tree.unflatten(tree, leaves)


def default_dtype() -> str:
    """Type of parameters and activations where nothing else is said."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def measure_steps(timer: StepTimer, rates: DeviceRates, sizes: TimerSizes, *, repeats: int = 20) -> Iterator[StepTime]:
    """All prefills and decodes of these sizes, each against its floor at the measured rates."""
    for context in sizes.prefill_contexts:
        for tokens, rows in sizes.prefill_shapes:
            yield measure_prefill(timer, rates, tokens, max(3, repeats // 4), rows=rows, context=context)
    for context in sizes.contexts:
        for batch in sizes.batches:
            yield measure_decode(timer, rates, batch, context, repeats)


def measure_prefill(
    timer: StepTimer, rates: DeviceRates, tokens: int, repeats: int, *, rows: int = 1, context: int = 0
) -> StepTime:
    """Prefills of `rows` prompts: `tokens` tokens of each after `context` cached ones."""
    seconds = timer.prefill(tokens, repeats, rows=rows, context=context)
    stream = timer.prefill_stream(tokens, repeats, rows=rows, context=context)
    alone, weights = prefill_cost(timer.config, tokens, context), weight_bytes_read(timer.config)
    cost = StepCost(weights + rows * (alone.bytes - weights), rows * alone.flops)
    return _step_time("prefill", rows, tokens, context, seconds, stream, cost, rates)


def measure_decode(timer: StepTimer, rates: DeviceRates, batch: int, context: int, repeats: int) -> StepTime:
    """Decode steps of `batch` sequences with `context` positions cached each."""
    seconds, stream = timer.decode(batch, context, repeats), timer.decode_stream(batch, context, repeats)
    return _step_time("decode", batch, 1, context, seconds, stream, decode_cost(timer.config, batch, context), rates)


def _step_time(
    kind: str,
    batch: int,
    tokens: int,
    context: int,
    seconds: list[float],
    stream_s: float,
    cost: StepCost,
    rates: DeviceRates,
) -> StepTime:
    floor, bound = cost.floor_seconds(rates.bandwidth, rates.flops), cost.bound(rates.bandwidth, rates.flops)
    return StepTime(kind, batch, tokens, context, tuple(seconds), cost, floor, bound, stream_s)

"""Time of prefill and decode steps, measured with the very programs that serve requests."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.core.step import PrefillRow, SlotSetup, StepWork, TableUpdate
from jaxinfer.engine.build import EngineOptions, load_model
from jaxinfer.models import DecoderConfig
from jaxinfer.runtime.cost import StepCost, decode_cost, prefill_cost
from jaxinfer.runtime.limits import RunnerLimits
from jaxinfer.runtime.programs import Progress
from jaxinfer.runtime.runner import Runner


@dataclass(frozen=True)
class DeviceRates:
    """Measured on the spot: read bandwidth in bytes/s and matrix rate in FLOP/s, in the model's type."""

    bandwidth: float
    flops: float


@dataclass(frozen=True)
class StepTime:
    """One kind of step.

    kind: "decode" or "prefill". batch: sequences. tokens: positions computed for each. context: positions that each had
    cached before. seconds: of every repetition, sampling and the transfer of its ids included. cost: the least work.
    floor_s: least time by the measured rates; bound: "bandwidth" or "compute".
    """

    kind: str
    batch: int
    tokens: int
    context: int
    seconds: tuple[float, ...]
    cost: StepCost
    floor_s: float
    bound: str

    @property
    def median_s(self) -> float:
        """Median time of a step."""
        return statistics.median(self.seconds)

    @property
    def tokens_per_s(self) -> float:
        """Positions computed per second."""
        return self.batch * self.tokens / self.median_s

    @property
    def floor_ratio(self) -> float:
        """Median time over the floor; 1 is perfect."""
        return self.median_s / self.floor_s


class StepTimer:
    """A model made ready for timing; keeps no engine, only a runner.

    model, dtype, attention: as in `EngineOptions`. max_batch: sequences at once. max_context: positions that a sequence
    may have cached. max_prefill: tokens of the largest prefill.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        attention: str = "auto",
        max_batch: int = 8,
        max_context: int = 1024,
        max_prefill: int = 512,
        on_progress: Progress | None = None,
    ) -> None:
        options = EngineOptions(dtype=dtype, attention=attention)
        loaded = load_model(model, options, on_progress)
        self.config: DecoderConfig = loaded.config
        page_size = 16 if jax.default_backend() == "cpu" else 64
        context = max(max_context, max_prefill) + 1
        limits = RunnerLimits(
            max_slots=max_batch,
            page_size=page_size,
            num_pages=1 + max_batch * -(-context // page_size),
            max_context=context,
            max_batched_tokens=max(max_prefill, max_batch),
            max_prefill_rows=1,
            vocab_size=self.config.vocab_size,
        )
        self.runner = Runner(self.config, loaded.params, limits, on_progress)
        self._prepare_slots()

    def decode(self, batch: int, context: int, repeats: int) -> list[float]:
        """Seconds of `repeats` decode steps of `batch` sequences with `context` positions cached each."""
        self._check(batch, context)
        work = StepWork(decodes=tuple(range(batch)))
        return self._time(work, context, repeats)

    def prefill(self, tokens: int, repeats: int) -> list[float]:
        """Seconds of `repeats` prefills of one prompt of `tokens` tokens."""
        self._check(1, tokens)
        work = StepWork(prefills=(PrefillRow(0, tuple(self._token_ids(tokens)), 0, sample=True),))
        return self._time(work, 0, repeats)

    def rates(self) -> DeviceRates:
        """Measure the device: one pass over a large array, and a large matrix product."""
        return measure_rates(jnp.dtype(self.config.dtype))

    def _time(self, work: StepWork, context: int, repeats: int) -> list[float]:
        seconds = []
        for repeat in range(repeats + 1):
            self._set_lengths(context)
            begin = time.perf_counter()
            self.runner.execute(work)
            if repeat:  # the first one warms caches
                seconds.append(time.perf_counter() - begin)
        return seconds

    def _prepare_slots(self) -> None:
        """Give every slot its pages and greedy sampling."""
        limits = self.runner.limits
        columns = limits.pages_per_sequence
        pages = np.random.default_rng(0).permutation(np.arange(1, limits.num_pages))
        table = pages.reshape(limits.max_slots, columns).astype(np.int32)
        self.runner.state = dataclasses.replace(self.runner.state, page_table=jax.device_put(table))
        greedy = SamplingParams(temperature=0)
        for slot in range(limits.max_slots):
            token = self._token_ids(1)[0]
            setup = SlotSetup(slot, greedy, seed=0, prompt_ids=(token,))
            first_page = TableUpdate(slot, 0, int(table[slot, 0]))
            row = PrefillRow(slot, (token,), 0, sample=True)
            self.runner.execute(StepWork((first_page,), (setup,), (row,)))

    def _set_lengths(self, context: int) -> None:
        lengths = np.full(self.runner.limits.max_slots, context, np.int32)
        self.runner.state = dataclasses.replace(self.runner.state, lengths=jax.device_put(lengths))
        jax.block_until_ready(self.runner.state.lengths)

    def _token_ids(self, count: int) -> list[int]:
        return np.random.default_rng(1).integers(0, self.config.vocab_size, count).tolist()

    def _check(self, batch: int, positions: int) -> None:
        limits = self.runner.limits
        if not 1 <= batch <= limits.max_slots or not 1 <= positions < limits.max_context:
            raise ValueError(
                f"This timer holds {limits.max_slots} sequences of {limits.max_context - 1} positions, "
                f"not {batch} of {positions}."
            )


def measure_steps(
    timer: StepTimer, batches: Sequence[int], contexts: Sequence[int], prefills: Sequence[int], *, repeats: int = 20
) -> list[StepTime]:
    """Decode at every batch and context, prefill at every length, each against its floor."""
    rates, config, results = timer.rates(), timer.config, []
    for tokens in prefills:
        cost = prefill_cost(config, tokens)
        results.append(_step_time("prefill", 1, tokens, 0, timer.prefill(tokens, max(3, repeats // 4)), cost, rates))
    for context in contexts:
        for batch in batches:
            cost = decode_cost(config, batch, context)
            results.append(_step_time("decode", batch, 1, context, timer.decode(batch, context, repeats), cost, rates))
    return results


def _step_time(
    kind: str, batch: int, tokens: int, context: int, seconds: list[float], cost: StepCost, rates: DeviceRates
) -> StepTime:
    floor, bound = cost.floor_seconds(rates.bandwidth, rates.flops), cost.bound(rates.bandwidth, rates.flops)
    return StepTime(kind, batch, tokens, context, tuple(seconds), cost, floor, bound)


def measure_rates(dtype: jnp.dtype) -> DeviceRates:
    """Best of several passes: a device never does better than its own best.

    Bandwidth is read by a matrix-vector product over 256 MiB (4 GiB on an accelerator), far more than any cache; the
    rate by a product of square matrices.
    """
    on_cpu = jax.default_backend() == "cpu"
    item = dtype.itemsize
    columns = 4096
    rows = (2**28 if on_cpu else 2**32) // item // columns
    matrix, vector = jnp.ones((columns, rows), dtype), jnp.ones((1, columns), dtype)
    # On a CPU a vector of bfloat16 is multiplied far below the speed of memory, so bytes are read as float32 there.
    if on_cpu and item == 2:
        matrix, vector = jnp.ones((columns, rows // 2), jnp.float32), jnp.ones((1, columns), jnp.float32)
    read = matrix.size * matrix.dtype.itemsize
    bandwidth = read / _best_seconds(jax.jit(jnp.dot), vector, matrix)
    del matrix
    side = 2048 if on_cpu else 8192
    square = jnp.ones((side, side), dtype)
    rate = 2 * side**3 / _best_seconds(jax.jit(jnp.dot), square, square)
    return DeviceRates(bandwidth, rate)


def _best_seconds(function: Callable[..., jax.Array], *arguments: jax.Array, passes: int = 7) -> float:
    function(*arguments).block_until_ready()
    best = float("inf")
    for _ in range(passes):
        begin = time.perf_counter()
        function(*arguments).block_until_ready()
        best = min(best, time.perf_counter() - begin)
    return best

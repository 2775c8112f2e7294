"""How long a round takes, for the simulator: by measured steps, or by the roofline of a chip."""

from __future__ import annotations

import bisect
import functools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfer.core.json_files import read_json
from jaxinfer.core.simulator import RoundShape
from jaxinfer.models import DecoderConfig
from jaxinfer.runtime.chips import Target
from jaxinfer.runtime.cost import StepCost, head_weights, matmul_weights, pair_flops, weight_bytes_read
from jaxinfer.runtime.limits import RunnerLimits, buckets_for

_LARGEST_FILE = 2**24
_LARGEST_SIZE = 2**40
_Points = Sequence[tuple[float, float]]
"""(size, seconds), sizes rising."""
_Curves = Sequence[tuple[int, _Points]]
"""(size, seconds by another size), sizes rising."""


class MeasuredSteps:
    """Step times between those that `jaxinfer bench steps --json` measured, in the batch shapes that would run.

    Decode is linear between measured contexts and batches, and beyond the largest. Prefill is linear between measured
    token counts; one token takes what the smallest decode takes. To this comes what prefills of several prompts took
    longer than one of as many tokens, and those after cached positions longer than those without, as far as the file
    has such prefills: linear between measured prompts and positions (their mean over the tokens), for the nearest token
    counts. A round takes its decode and its prefill one after the other, unless they run in one program: then it takes
    a prefill of the tokens of both, and what the context adds to the decode; on a CPU to one of all rows that the
    program has. The programs are those of an engine with these limits on the device of the file (a CPU where it names
    none), but prefills take what they took with the timer's slots.
    streamed: rounds are dispatched one ahead, so that they take what the steps took that were dispatched back to back,
    not what those took that were waited for.
    Raises ValueError, one sentence, when the file is none of `bench steps` or has no decode or no prefill.
    """

    def __init__(self, path: str | Path, limits: RunnerLimits, *, streamed: bool = False) -> None:
        platform, decodes, prefills = _read_steps(Path(path), "stream_s" if streamed else "median_s")
        self._on_cpu, self._buckets = platform == "cpu", buckets_for(limits, platform)
        self._decode = _by_size((batch, context, s) for (batch, context), s in decodes.items())
        one_token = self._decode[0][1][0][1]
        alone = {tokens: s for (rows, tokens, context), s in prefills.items() if rows == 1 and context == 0}
        longer = {tokens: s for tokens, s in alone.items() if tokens > 1}
        self._prefill: _Points = [(1, min((one_token, *longer.values()))), *sorted(longer.items())]
        self._more_rows = _by_size(
            (tokens * rows, rows, s - _between(self._prefill, tokens * rows))
            for (rows, tokens, context), s in prefills.items()
            if context == 0
        )
        self._more_context = _by_size(
            (tokens, context, s - alone[tokens])
            for (rows, tokens, context), s in prefills.items()
            if rows == 1 and tokens in alone
        )

    def __call__(self, shape: RoundShape) -> float:
        """Seconds of a round."""
        decodes, prefills = len(shape.decode_contexts), shape.prefills
        if not decodes:
            return self._prefill_seconds(prefills)
        context = statistics.fmean(shape.decode_contexts)
        if not prefills:
            return self._decode_seconds(decodes, context)
        if not self._buckets.mixes(decodes, sum(tokens for _, tokens in prefills), len(prefills)):
            return self._decode_seconds(decodes, context) + self._prefill_seconds(prefills)
        rows = self._buckets.mixed_rows if self._on_cpu else self._buckets.decode(decodes)
        per_position = _between([(batch, _slope(points)) for batch, points in self._decode], rows)
        return self._prefill_seconds(prefills, decodes) + max(0.0, per_position) * context

    def _decode_seconds(self, decodes: int, context: float) -> float:
        return max(0.0, _between_both(self._decode, self._buckets.decode(decodes), context))

    def _prefill_seconds(self, rows: Sequence[tuple[int, int]], decodes: int = 0) -> float:
        computed = sum(tokens for _, tokens in rows)
        bucket = self._buckets.prefill_for(computed + decodes, len(rows))[0]
        context = sum(start * tokens for start, tokens in rows) / computed
        return max(
            _between(self._prefill, bucket)
            + _between_both(self._more_rows, bucket, len(rows))
            + _between_both(self._more_context, bucket, context),
            self._prefill[0][1],
        )


class RooflineSteps:
    """Rounds that take `floor_ratio` times the least time by the datasheet, on so many of a target's devices.

    The least work is that of `decode_cost` and `prefill_cost`, counted for every sequence by its own context; the
    decodes and the prefill of a round read the weights once, in one program.
    """

    def __init__(self, config: DecoderConfig, target: Target, devices: int, floor_ratio: float = 1.0) -> None:
        self._bandwidth, self._rate = devices * target.chip.bandwidth, devices * target.chip.flops
        self._ratio = floor_ratio
        self._counts = tuple(Counter(config.windows).items())  # (window, layers)
        self._weight_bytes = functools.cache(functools.partial(weight_bytes_read, config))
        self._embedding_bytes = config.hidden_size * (4 if config.dtype == "float32" else 2)
        self._logit_bytes = 4 * config.vocab_size
        self._kv_bytes = config.kv_bytes_per_token
        self._kv_bytes_per_layer = config.kv_bytes_per_token // config.num_layers
        self._pair_flops = pair_flops(config)
        self._token_flops, self._head_flops = 2 * matmul_weights(config), 2 * head_weights(config)

    def __call__(self, shape: RoundShape) -> float:
        """Seconds of a round."""
        cost = self.cost(shape.decode_contexts, shape.prefills)
        return self._ratio * cost.floor_seconds(self._bandwidth, self._rate)

    def cost(self, decode_contexts: Sequence[int], prefills: Sequence[tuple[int, int]]) -> StepCost:
        """The least work of one program for what a `RoundShape` has."""
        rows = [(context, 1) for context in decode_contexts] + list(prefills)
        tokens = sum(computed for _, computed in rows)
        moved = self._weight_bytes(tokens) + len(rows) * self._logit_bytes
        moved += tokens * (self._embedding_bytes + self._kv_bytes)
        # A decode reads its new key and value from memory too; a prefill still has its own.
        visible = [self._visible(context + 1) for context in decode_contexts]
        visible += [self._visible(start) for start, _ in prefills]
        moved += sum(visible) * self._kv_bytes_per_layer
        flops = tokens * self._token_flops + len(rows) * self._head_flops
        flops += sum(self._pairs(start, computed) for start, computed in rows) * self._pair_flops
        return StepCost(moved, flops)

    def _visible(self, length: int) -> int:
        """Positions seen at this length, over all layers."""
        return sum(layers * (length if window is None else min(window, length)) for window, layers in self._counts)

    def _pairs(self, start: int, computed: int) -> int:
        """(query, key) pairs of these new positions, over all layers."""
        pairs = 0
        for window, layers in self._counts:
            growing = computed if window is None else min(max(window - start, 0), computed)
            full = 0 if window is None else (computed - growing) * window
            pairs += layers * (growing * start + growing * (growing + 1) // 2 + full)
        return pairs


def _by_size(measured: Iterable[tuple[int, int, float]]) -> _Curves:
    """(size, other size, seconds), in any order, as curves."""
    curves: dict[int, list[tuple[int, float]]] = {}
    for size, other, seconds in measured:
        curves.setdefault(size, []).append((other, seconds))
    return [(size, sorted(points)) for size, points in sorted(curves.items())]


def _slope(points: _Points) -> float:
    """From the first point to the last; 0 of a single one."""
    (x0, y0), (x1, y1) = points[0], points[-1]
    return (y1 - y0) / (x1 - x0) if x1 > x0 else 0.0


def _between_both(curves: _Curves, size: float, other: float) -> float:
    return _between([(measured, _between(points, other)) for measured, points in curves], size)


def _between(points: _Points, size: float) -> float:
    """Linear between the points and beyond the last; below the first, and with a single point, constant."""
    if len(points) == 1 or size <= points[0][0]:
        return points[0][1]
    index = min(bisect.bisect_left(points, (size, -math.inf)), len(points) - 1)
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


def _read_steps(path: Path, time: str) -> tuple[str, dict[tuple[int, int], float], dict[tuple[int, int, int], float]]:
    """The platform, and seconds of decodes by (batch, context), of prefills by (rows, tokens of each, context).

    time: which seconds.
    """
    measured = read_json(path, _LARGEST_FILE)
    try:
        steps, device = measured["steps"], str(measured.get("device", "cpu"))
        sizes = [tuple(_size(step, key) for key in ("batch", "tokens", "context")) for step in steps]
        timed = [(step["kind"], size, _seconds(step, time)) for step, size in zip(steps, sizes, strict=True)]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path} is not the output of `jaxinfer bench steps --json`.") from error
    decodes = {(batch, context): s for kind, (batch, _, context), s in timed if kind == "decode"}
    prefills = {(rows, tokens, context): s for kind, (rows, tokens, context), s in timed if kind == "prefill"}
    if not decodes or not any(rows == 1 and context == 0 for rows, _, context in prefills):
        raise ValueError(f"{path} needs at least one decode and one prefill step of batch 1; measure both.")
    platform = "cpu" if device == "cpu" else "tpu" if "TPU" in device else "cuda"
    return platform, decodes, prefills


def _size(step: Mapping[str, Any], key: str) -> int:
    least = 0 if key == "context" else 1
    if not isinstance(step[key], int) or not least <= step[key] <= _LARGEST_SIZE:
        raise ValueError(key)
    return step[key]


def _seconds(step: Mapping[str, Any], time: str) -> float:
    times = {name: float(step[name]) for name in ("median_s", "stream_s")}
    if not all(0 < seconds < math.inf for seconds in times.values()):
        raise ValueError("seconds")
    return times[time]

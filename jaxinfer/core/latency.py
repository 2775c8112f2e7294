"""Latencies, throughput, goodput and the bottleneck of a timeline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jaxinfer.core.scheduler_config import SchedulerConfig
from jaxinfer.core.timeline import RoundTimeline, SequenceTimeline, Timeline

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_QUEUE_MATTERS = 0.2
"""Share of the requests' time spent waiting from which on the queue is the bottleneck."""
_IDLE_MATTERS = 0.5
"""Share of the time without any round from which on there is simply too little to do."""
_HOST_MATTERS = 0.3
"""Share of the rounds' time that the device waits for the host from which on the host is the bottleneck."""


@dataclass(frozen=True)
class Distribution:
    """Figures of some values, in their unit; percentiles by linear interpolation between the nearest ranks."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float


def distribution(values: Iterable[float]) -> Distribution | None:
    """The figures of some values; None if there are none."""
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
    return Distribution(len(ordered), statistics.fmean(ordered), p50, p90, p99)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which this share (0 .. 1) of the rising values lies."""
    rank = share * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@dataclass(frozen=True)
class Slo:
    """What a request must keep to count as good, in seconds; None for no such limit.

    ttft_s: to the first token. itl_s: between any two of its tokens, the longest gap counts. tpot_s: mean time of a
    token after the first. e2e_s: to the last token.
    """

    ttft_s: float | None = None
    itl_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """ "ttft:200ms,itl:50ms" as an Slo; ValueError, saying how to write it, for anything else."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition(":")
            field, seconds = f"{name}_s", _seconds(value)
            if field not in cls.__dataclass_fields__ or seconds is None or field in limits:
                raise ValueError(
                    f"{text!r} is no objective; write limits on ttft, itl, tpot or e2e as in ttft:200ms,itl:50ms."
                )
            limits[field] = seconds
        return cls(**limits)

    def met_by(self, sequence: SequenceTimeline) -> bool:
        """Whether a sequence is complete and within every limit."""
        measured = (
            (self.ttft_s, sequence.ttft_s),
            (self.itl_s, max(sequence.itls_s, default=None)),
            (self.tpot_s, sequence.tpot_s),
            (self.e2e_s, sequence.e2e_s),
        )
        return sequence.complete and all(limit is None or value is None or value <= limit for limit, value in measured)


def _seconds(text: str) -> float | None:
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    try:
        value = float(text.removesuffix(unit)) * _UNITS[unit]
    except (KeyError, ValueError):
        return None
    return value if 0 < value < math.inf else None


@dataclass(frozen=True)
class Capacity:
    """The limits that a sequence may have to wait for: see SchedulerConfig. usable_pages: without the padding page.
    max_prefill_rows: None for no such limit."""

    max_slots: int
    usable_pages: int
    max_batched_tokens: int
    static: bool = False
    max_prefill_rows: int | None = None

    @classmethod
    def of_scheduler(cls, config: SchedulerConfig) -> Capacity:
        """What sequences may have to wait for under a scheduler."""
        return cls(
            max_slots=config.max_slots,
            usable_pages=config.num_pages - 1,
            max_batched_tokens=config.max_batched_tokens,
            static=config.mode == "static",
            max_prefill_rows=config.max_prefill_rows,
        )


@dataclass(frozen=True)
class Bottleneck:
    """What would have to be better for requests to be faster.

    name: "arrivals", "slots", "KV pages", "token budget", "prefill rows", "static waves", "host", "prefill" or
        "decode".
    evidence: a sentence with the figures that say so.
    """

    name: str
    evidence: str


@dataclass(frozen=True)
class Summary:
    """A timeline in figures, times in seconds; None for what never happened.

    sequences, complete: how many came, and how many ended by themselves. duration_s: first arrival to the last token.
    prompt_tokens, output_tokens: of all sequences. queue, ttft, tpot, e2e: over sequences. itl: over all gaps between
    tokens. output_rate: tokens per second of each sequence, over its own time. requests_per_s, output_tokens_per_s,
    total_tokens_per_s: over the duration. good, goodput_per_s: sequences within the objective, and per second; None
    without one. kv_mean, kv_peak: share of the pages held by sequences, averaged over the rounds' time and at most.
    hit_rate: share of the known tokens found in the cache. host_pages_peak: most pages in host memory; pages_out,
    pages_in, page_copies: pages moved there, back, and copied inside the pool. device, host: time of each round there;
    they overlap when rounds are scheduled ahead, and a simulation has no host. host_of_decode: host time of the rounds
    with decodes only, as a share of their time on the device. host_exposed: share of the rounds' time in which only the
    host worked and the device waited.
    """

    sequences: int
    complete: int
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    queue: Distribution | None
    ttft: Distribution | None
    itl: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    output_rate: Distribution | None
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    good: int | None
    goodput_per_s: float | None
    kv_mean: float
    kv_peak: float
    preemptions: int
    hit_rate: float
    host_pages_peak: int
    pages_out: int
    pages_in: int
    page_copies: int
    rounds: int
    device: Distribution | None
    host: Distribution | None
    host_of_decode: float | None
    host_exposed: float
    bottleneck: Bottleneck

    @property
    def latencies(self) -> dict[str, Distribution | None]:
        """Its times by the names that people read."""
        times = {"queue": self.queue, "TTFT": self.ttft, "ITL": self.itl, "TPOT": self.tpot, "e2e": self.e2e}
        times["round on the device"] = self.device
        return times if self.host is None else times | {"round on the host": self.host}


def summarize(timeline: Timeline, capacity: Capacity, slo: Slo | None = None) -> Summary:
    """The figures of a timeline. Latencies are those of complete sequences; tokens are counted of all."""
    sequences, rounds = timeline.sequences, timeline.rounds
    complete = [sequence for sequence in sequences if sequence.complete]
    last_token = max((s.token_times[-1] for s in sequences if s.token_times), default=timeline.begin)
    duration = last_token - timeline.begin
    prompt = sum(sequence.num_prompt_tokens for sequence in sequences)
    output = sum(len(sequence.token_times) for sequence in sequences)
    good = None if slo is None else sum(map(slo.met_by, sequences))
    shares = [round_.pages.active / capacity.usable_pages for round_ in rounds]

    def over(value: Callable[[SequenceTimeline], float | None]) -> Distribution | None:
        return distribution(found for sequence in complete if (found := value(sequence)) is not None)

    return Summary(
        sequences=len(sequences),
        complete=len(complete),
        duration_s=duration,
        prompt_tokens=prompt,
        output_tokens=output,
        queue=over(lambda s: s.queue_s),
        ttft=over(lambda s: s.ttft_s),
        itl=distribution(gap for sequence in complete for gap in sequence.itls_s),
        tpot=over(lambda s: s.tpot_s),
        e2e=over(lambda s: s.e2e_s),
        output_rate=over(lambda s: len(s.token_times) / s.e2e_s if s.e2e_s else None),
        requests_per_s=_per(len(complete), duration),
        output_tokens_per_s=_per(output, duration),
        total_tokens_per_s=_per(prompt + output, duration),
        good=good,
        goodput_per_s=None if good is None else _per(good, duration),
        kv_mean=_per(
            sum(share * round_.device_s for share, round_ in zip(shares, rounds, strict=True)),
            sum(round_.device_s for round_ in rounds),
        ),
        kv_peak=max(shares, default=0.0),
        preemptions=sum(len(sequence.preemptions) for sequence in sequences),
        hit_rate=_hit_rate(sequences),
        host_pages_peak=max((round_.host_pages for round_ in rounds), default=0),
        pages_out=sum(round_.pages_out for round_ in rounds),
        pages_in=sum(round_.pages_in for round_ in rounds),
        page_copies=sum(round_.page_copies for round_ in rounds),
        rounds=len(rounds),
        device=distribution(round_.device_s for round_ in rounds),
        host=distribution(round_.host_s for round_ in rounds if round_.host_s),
        host_of_decode=_host_of_decode(rounds),
        host_exposed=_host_exposed(rounds),
        bottleneck=find_bottleneck(timeline, capacity),
    )


def find_bottleneck(timeline: Timeline, capacity: Capacity) -> Bottleneck:
    """Name what requests spend their time on: waiting for a limit, or the execution of steps."""
    rounds = timeline.rounds
    waited = sum(s.queue_s for s in timeline.sequences if s.queue_s is not None)
    lived = sum(s.e2e_s for s in timeline.sequences if s.e2e_s is not None)
    queue_share = _per(waited, lived)
    if queue_share >= _QUEUE_MATTERS and any(round_.waiting for round_ in rounds):
        return _queue_bottleneck(rounds, capacity, queue_share)
    device, exposed = sum(r.device_s for r in rounds), _host_exposed(rounds)
    working = _per(device, 1 - exposed)
    idle = 1 - _per(working, timeline.end - timeline.begin)
    if idle >= _IDLE_MATTERS:
        return Bottleneck("arrivals", f"nothing was to do {_percent(idle)} of the time; more requests would be served.")
    if exposed >= _HOST_MATTERS:
        evidence = f"the device waited for scheduling and outputs on the host {_percent(exposed)} of the rounds' time."
        return Bottleneck("host", evidence)
    return _execution_bottleneck(rounds, device, queue_share)


def _queue_bottleneck(rounds: Sequence[RoundTimeline], capacity: Capacity, queue_share: float) -> Bottleneck:
    """Which limit kept the waiting sequences waiting, by the time they waited in rounds at that limit."""
    waits: dict[str, float] = {}
    for round_ in rounds:
        limit = _limit_reached(round_, capacity)
        waits[limit] = waits.get(limit, 0.0) + round_.waiting * round_.device_s
    name = max(waits, key=lambda limit: waits[limit])
    reasons = {
        "slots": f"with all {capacity.max_slots} slots taken",
        "token budget": f"with the {capacity.max_batched_tokens} tokens of a round used up",
        "prefill rows": f"with the {capacity.max_prefill_rows} prompts that a round computes begun",
        "KV pages": f"with a slot free, but too few of the {capacity.usable_pages} pages",
        "static waves": "for the running wave to end",
    }
    share = _percent(_per(waits[name], sum(waits.values())))
    evidence = f"requests spent {_percent(queue_share)} of their time waiting, {share} of it {reasons[name]}."
    return Bottleneck(name, evidence)


def _limit_reached(round_: RoundTimeline, capacity: Capacity) -> str:
    if capacity.static:
        return "static waves"
    if round_.running >= capacity.max_slots:
        return "slots"
    if round_.decodes + round_.prefill_tokens >= capacity.max_batched_tokens:
        return "token budget"
    if round_.prefill_rows == capacity.max_prefill_rows:
        return "prefill rows"
    return "KV pages"


def _execution_bottleneck(rounds: Sequence[RoundTimeline], device: float, queue_share: float) -> Bottleneck:
    prefill = _per(sum(round_.device_s for round_ in rounds if round_.prefill_rows), device)
    host = ""  # a simulation has none
    if any(round_.host_s for round_ in rounds):
        host = f"it waited for the host {_percent(_host_exposed(rounds))} of the rounds' time; "
    evidence = (
        f"rounds with prefill took {_percent(prefill)} of the device's time, those with decodes only "
        f"{_percent(1 - prefill)}; {host}waiting took {_percent(queue_share)} of the requests' time."
    )
    return Bottleneck("prefill" if prefill > 0.5 else "decode", evidence)


def _hit_rate(sequences: Sequence[SequenceTimeline]) -> float:
    prefills = [span for sequence in sequences for span in sequence.spans if span.kind == "prefill"]
    cached = sum(span.cached_tokens for span in prefills)
    return _per(cached, cached + sum(span.computed_tokens for span in prefills))


def _host_of_decode(rounds: Iterable[RoundTimeline]) -> float | None:
    decodes = [round_ for round_ in rounds if not round_.prefill_rows]
    device = sum(round_.device_s for round_ in decodes)
    return sum(round_.host_s for round_ in decodes) / device if device > 0 else None


def _host_exposed(rounds: Sequence[RoundTimeline]) -> float:
    """The host's time while no round was on the device, as a share of that and the device's time."""
    work = sorted(span for round_ in rounds for span in _host_spans(round_) if span[0] < span[1])
    device = sum(round_.device_s for round_ in rounds)
    exposed, number = 0.0, 0
    for start, end in work:
        exposed += end - start
        while number < len(rounds) and rounds[number].end <= start:
            number += 1
        beside = number
        while beside < len(rounds) and rounds[beside].start < end:
            exposed -= min(end, rounds[beside].end) - max(start, rounds[beside].start)
            beside += 1
    return _per(exposed, exposed + device)


def _host_spans(round_: RoundTimeline) -> tuple[tuple[float, float], tuple[float, float]]:
    return (round_.host_start, round_.dispatched), (round_.end, round_.host_end)


def _per(amount: float, of: float) -> float:
    return amount / of if of > 0 else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"

"""The scheduler and its pool, driven by a clock instead of a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from jaxinfer.core.observer import Load, Observer, RoundFinished
from jaxinfer.core.request import Request, RequestRefused
from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.core.scheduler import Scheduler, SchedulerConfig
from jaxinfer.core.step import SampledToken, StepResult, StepWork
from jaxinfer.core.workload import Feed, Workload, WorkloadRequest

_ANY_TOKEN = 0


@dataclass(frozen=True, slots=True)
class RoundShape:
    """What a round computes, as far as its time depends on it.

    Attributes:
        decode_contexts: positions that each decoding sequence has cached before.
        prefills: (positions cached before, positions computed) of each prefilled sequence.
    """

    decode_contexts: tuple[int, ...]
    prefills: tuple[tuple[int, int], ...]


StepSeconds: TypeAlias = Callable[[RoundShape], float]
"""How long a round takes."""


def one_tick(shape: RoundShape) -> float:
    """Every round takes one tick."""
    return 1.0


class _Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class _Dispatched:
    """A round on the device: see RoundFinished."""

    work: StepWork
    scheduled: float
    start: float
    end: float
    load: Load


class Simulator:
    """Serves workloads one after the other; what is cached stays between them.

    Args:
        config: of the scheduler.
        step_seconds: how long a round takes.
        observer: told of every event.
        start: what the clock shows at first, in seconds.
    """

    def __init__(
        self, config: SchedulerConfig, step_seconds: StepSeconds, observer: Observer, start: float = 0.0
    ) -> None:
        self._clock = _Clock(start)
        self._step_seconds = step_seconds
        self._observer = observer
        self._on_device: deque[_Dispatched] = deque()
        self._device_free_at = start
        self.scheduler = Scheduler(config, self._clock, observer)

    def run(self, workload: Workload) -> tuple[str, ...]:
        """Serve a workload that begins now; the reasons why requests were refused, if any were."""
        feed = Feed(workload, self._clock.now)
        refused = []
        while True:
            for request, arrival in feed.take(self._clock.now, len(self.scheduler.requests)):
                try:
                    request.check_context(self.scheduler.config.max_context)
                    self.scheduler.add(_request(request, arrival))
                except RequestRefused as refusal:
                    refused.append(str(refusal))
            if self.scheduler.has_unfinished:
                self._round()
            elif feed.next_arrival is not None:
                self._clock.now = feed.next_arrival
            else:
                return tuple(refused)

    def _round(self) -> None:
        """Run one round to its end, as the engine's step does."""
        scheduler = self.scheduler
        while len(self._on_device) < scheduler.config.max_rounds_in_flight:
            work = scheduler.schedule()
            if work.is_empty:
                break
            self._on_device.append(self._dispatch(work))
        done = self._on_device.popleft()
        self._clock.now = end = done.end
        owners = scheduler.owners(done.work)
        slots = (*done.work.decodes, *(row.slot for row in done.work.prefills if row.sample))
        scheduler.commit(done.work, StepResult({slot: SampledToken(_ANY_TOKEN) for slot in slots}), end)
        scheduled = done.scheduled
        self._observer(RoundFinished(scheduled, scheduled, done.start, end, end, done.work, owners, *done.load))

    def _dispatch(self, work: StepWork) -> _Dispatched:
        now = self._clock.now
        start = max(now, self._device_free_at)
        self._device_free_at = end = start + self._step_seconds(self._shape(work))
        return _Dispatched(work, now, start, end, self.scheduler.load)

    def _shape(self, work: StepWork) -> RoundShape:
        decoding = set(work.decodes)
        contexts = (sequence.num_cached - 1 for sequence in self.scheduler.running if sequence.slot in decoding)
        prefills = ((row.start, len(row.token_ids)) for row in work.prefills)
        return RoundShape(tuple(contexts), tuple(prefills))


def _request(request: WorkloadRequest, arrival: float) -> Request:
    params = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True, temperature=0.0)
    return Request(
        request.request_id,
        request.prompt_ids,
        params,
        seed=0,
        eos_ids=(),
        arrival=arrival,
        priority=request.priority,
    )

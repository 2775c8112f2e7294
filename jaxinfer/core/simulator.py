"""The scheduler and its pool, driven by a clock instead of a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from jaxinfer.core.observer import Observer, RoundFinished
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
        self.scheduler = Scheduler(config, self._clock, observer)

    def run(self, workload: Workload) -> tuple[str, ...]:
        """Serve a workload that begins now; the reasons why requests were refused, if any were."""
        feed = Feed(workload, self._clock.now)
        refused = []
        while True:
            for request, arrival in feed.take(self._clock.now, len(self.scheduler.requests)):
                try:
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
        scheduler, start = self.scheduler, self._clock.now
        work = scheduler.schedule()
        waiting, running, pages = len(scheduler.waiting), len(scheduler.running), scheduler.pool.usage
        self._clock.now = end = start + self._step_seconds(self._shape(work))
        owners = scheduler.owners(work)
        slots = (*work.decodes, *(row.slot for row in work.prefills if row.sample))
        scheduler.commit(work, StepResult({slot: SampledToken(_ANY_TOKEN) for slot in slots}), end)
        self._observer(RoundFinished(start, start, end, end, work, owners, waiting, running, pages))

    def _shape(self, work: StepWork) -> RoundShape:
        decoding = set(work.decodes)
        contexts = (sequence.num_cached for sequence in self.scheduler.running if sequence.slot in decoding)
        prefills = ((row.start, len(row.token_ids)) for row in work.prefills)
        return RoundShape(tuple(contexts), tuple(prefills))


def _request(request: WorkloadRequest, arrival: float) -> Request:
    params = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True, temperature=0.0)
    return Request(request.request_id, request.prompt_ids, params, seed=0, eos_ids=(), arrival=arrival)

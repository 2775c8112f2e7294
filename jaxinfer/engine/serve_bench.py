"""Serves a workload in this process, in real time, and records what happens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from jaxinfer.core.observer import Observer, Observers, unobserved
from jaxinfer.core.request import RequestRefused
from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.core.scheduler import SchedulerConfig
from jaxinfer.core.timeline import Timeline, TimelineRecorder
from jaxinfer.core.workload import Feed, Workload, WorkloadRequest
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.outputs import OutputKind

_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class ServingRun:
    """What happened, on the clock of time.monotonic, under which limits, and why requests were refused."""

    timeline: Timeline
    config: SchedulerConfig
    refused: tuple[str, ...]


def measure_serving(
    engine: Engine, observers: Observers, workload: Workload, also: Observer = unobserved
) -> ServingRun:
    """Serve a workload after a warm-up with other tokens of the same lengths.

    observers: what the engine was built with. also: an observer that, as the timeline, sees nothing of the warm-up.
    Nothing that the warm-up leaves in the cache is there for the workload.
    """
    limits, config = engine.runner.limits, engine.scheduler.config
    serve(engine, _warm_up(workload, limits.max_slots, limits.vocab_size))
    engine.scheduler.reset()  # an empty cache, in host memory too
    recorder = TimelineRecorder()
    observers.add(recorder)
    observers.add(also)
    refused = serve(engine, workload)
    return ServingRun(recorder.timeline(), config, refused)


def serve(
    engine: Engine,
    workload: Workload,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[str, ...]:
    """Send every request when it is due and run until all are finished; the reasons why requests were refused.

    clock: the engine's. Tokens are greedy and nothing but their number ends a request.
    """
    feed = Feed(workload, clock())
    refused = []
    while True:
        for request, arrival in feed.take(clock(), len(engine.scheduler.requests)):
            params = SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True)
            try:
                request.check_context(engine.scheduler.config.max_context)
                engine.add_request(
                    request.request_id,
                    request.prompt_ids,
                    params,
                    arrival,
                    OutputKind.FINAL_ONLY,
                    priority=request.priority,
                )
            except RequestRefused as refusal:
                refused.append(str(refusal))
        if engine.has_unfinished:
            engine.step()
        elif feed.next_arrival is not None:
            sleep(max(0.0, feed.next_arrival - clock()))
        else:
            return tuple(refused)


def _warm_up(workload: Workload, count: int, vocab_size: int) -> Workload:
    """The first requests with other tokens and short outputs, all at once."""
    return Workload(
        tuple(
            WorkloadRequest(
                request.request_id,
                0.0,
                tuple((token + 1) % vocab_size for token in request.prompt_ids),
                min(request.output_tokens, _WARM_UP_TOKENS),
            )
            for request in workload.requests[:count]
        )
    )

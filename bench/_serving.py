"""Workloads served in this process, one after the other on one runner."""

from __future__ import annotations

from jaxinfer.core.observer import Observers
from jaxinfer.core.workload import Workload
from jaxinfer.engine import Engine
from jaxinfer.engine.build import EngineOptions, engine_on
from jaxinfer.engine.serve_bench import ServingRun, measure_serving


def serve_on(built: Engine, options: EngineOptions, workload: Workload) -> ServingRun:
    """Serve a workload on the runner of an engine, with an empty cache, after a warm-up.

    options: those that the engine was built with, or others that leave the runner as it is: mode, policy, caching,
    chunks. SystemExit when a request was refused.
    """
    observers = Observers()
    engine = engine_on(built.runner, built.tokenizer, options, observers)
    run = measure_serving(engine, observers, workload)
    if run.refused:
        raise SystemExit(f"A request was refused: {run.refused[0]}")
    return run

"""Requests in, text out: the loop between the scheduler and the device."""

from jaxinfer.core.request import RequestRefused
from jaxinfer.engine.engine import Engine, Limits, Runner
from jaxinfer.engine.outputs import CompletionOutput, Logprob, OutputKind, RequestMetrics, RequestOutput

__all__ = [
    "CompletionOutput",
    "Engine",
    "Limits",
    "Logprob",
    "OutputKind",
    "RequestMetrics",
    "RequestOutput",
    "RequestRefused",
    "Runner",
]

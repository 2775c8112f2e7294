"""A JAX/XLA inference engine for language models on TPU, GPU and CPU."""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # typing itself takes time to import

if TYPE_CHECKING:
    from jaxinfer.core.sampling_params import SamplingParams
    from jaxinfer.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from jaxinfer.llm import LLM

__version__ = "0.1.0"

__all__ = ["LLM", "CompletionOutput", "RequestMetrics", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "jaxinfer.llm",
    "CompletionOutput": "jaxinfer.engine.outputs",
    "RequestMetrics": "jaxinfer.engine.outputs",
    "RequestOutput": "jaxinfer.engine.outputs",
    "SamplingParams": "jaxinfer.core.sampling_params",
}
"""Imported when first asked for: the command line must be able to catch Ctrl-C before anything takes time."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

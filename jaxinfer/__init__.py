"""A JAX/XLA inference engine for language models on TPU, GPU and CPU."""

from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxinfer.llm import LLM

__version__ = "0.1.0"

__all__ = ["LLM", "CompletionOutput", "RequestMetrics", "RequestOutput", "SamplingParams", "__version__"]

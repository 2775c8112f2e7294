"""Mistral (Jiang et al., 2023): Llama with a sliding window in every layer."""

from __future__ import annotations

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families._common import Config, Family, llama_like, same_window
from jaxinfer.models.families._rope import one_rope
from jaxinfer.models.families._rules import LLAMA_RULES


def _windows(config: Config, layers: int) -> tuple[int | None, ...]:
    # An absent key means transformers' default of 4,096; an explicit null means full attention.
    return same_window(config, layers, config.get("sliding_window", 4096))


def _read(config: Config) -> DecoderConfig:
    return llama_like(config, ropes=one_rope(), windows=_windows, kv_heads=8, max_positions=131072)


FAMILIES = (Family("mistral", ("MistralForCausalLM",), _read, LLAMA_RULES),)

"""Llama 2, 3 and whatever kept their architecture (Touvron et al., 2023; Grattafiori et al., 2024)."""

from __future__ import annotations

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families._common import Config, Family, attention_biases, flag, llama_like
from jaxinfer.models.families._rope import one_rope
from jaxinfer.models.families._rules import LLAMA_RULES


def _read(config: Config) -> DecoderConfig:
    mlp_bias = flag(config, "mlp_bias", False)
    return llama_like(config, ropes=one_rope(), mlp_bias=mlp_bias, **attention_biases(config))


FAMILIES = (Family("llama", ("LlamaForCausalLM",), _read, LLAMA_RULES, harmless=("sliding_window",)),)

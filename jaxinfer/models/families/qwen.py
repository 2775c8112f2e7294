"""Qwen 2 and 2.5 (Yang et al., 2024), with biases of q, k and v; Qwen 3 (2025), with norms of q and k instead."""

from __future__ import annotations

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families._common import (
    Config,
    Family,
    attention_biases,
    flag,
    layer_kinds,
    llama_like,
    positive_int,
)
from jaxinfer.models.families._rope import one_rope
from jaxinfer.models.families._rules import LLAMA_RULES


def _windows(config: Config, layers: int) -> tuple[int | None, ...]:
    """Windows only with use_sliding_window, in the layers named by layer_types or from max_window_layers on."""
    first = positive_int(config, "max_window_layers", 28, least=0)
    used, stated = flag(config, "use_sliding_window", False), config.get("sliding_window", 4096)
    windowed = used and stated is not None
    default = ("sliding_attention" if windowed and layer >= first else "full_attention" for layer in range(layers))
    kinds = layer_kinds(config, layers, tuple(default))
    return tuple(stated if windowed and kind == "sliding_attention" else None for kind in kinds)


def _read_qwen2(config: Config) -> DecoderConfig:
    return llama_like(config, ropes=one_rope(), windows=_windows, max_positions=32768, qkv_bias=True)


def _read_qwen3(config: Config) -> DecoderConfig:
    return llama_like(
        config,
        ropes=one_rope(),
        windows=_windows,
        max_positions=32768,
        head_dim=128,
        qk_norm="head",
        **attention_biases(config),
    )


FAMILIES = (
    # Qwen 2 has its biases whatever attention_bias says.
    Family("qwen2", ("Qwen2ForCausalLM",), _read_qwen2, LLAMA_RULES, harmless=("attention_bias",)),
    Family("qwen3", ("Qwen3ForCausalLM",), _read_qwen3, LLAMA_RULES),
)

"""SmolLM3 (2025): Llama with layers that have no positions at all."""

from __future__ import annotations

from jaxinfer.models.config import DecoderConfig, RopeConfig
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
from jaxinfer.models.tensors import ModelError


def _rotated(config: Config, layers: int) -> list[bool]:
    """Which layers rotate: those where `no_rope_layers` is 1."""
    interval = positive_int(config, "no_rope_layer_interval", 4)
    stated = config.get("no_rope_layers")
    if stated is None:
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(stated, list) or len(stated) != layers or any(value not in (0, 1) for value in stated):
        raise ModelError("The model's no_rope_layers must be 0 (no RoPE) or 1 for every layer.")
    return [bool(value) for value in stated]


def _ropes(config: Config, head_dim: int, layers: int) -> tuple[RopeConfig | None, ...]:
    ropes = one_rope(theta=2e6)(config, head_dim, layers)
    return tuple(rope if used else None for rope, used in zip(ropes, _rotated(config, layers), strict=True))


def _windows(config: Config, layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window") if flag(config, "use_sliding_window", False) else None
    default = ("full_attention" if window is None or used else "sliding_attention" for used in _rotated(config, layers))
    kinds = layer_kinds(config, layers, tuple(default))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _read(config: Config) -> DecoderConfig:
    return llama_like(
        config,
        ropes=_ropes,
        windows=_windows,
        max_positions=32768,
        kv_heads=4,
        tied_head=True,
        mlp_bias=flag(config, "mlp_bias", False),
        **attention_biases(config),
    )


FAMILIES = (
    Family("smollm3", ("SmolLM3ForCausalLM",), _read, LLAMA_RULES, harmless=("sliding_window", "max_window_layers")),
)

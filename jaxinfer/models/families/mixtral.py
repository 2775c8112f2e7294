"""Mixtral (Jiang et al., 2024): Mistral with experts in every layer."""

from __future__ import annotations

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families._common import Config, Family, llama_like, positive_int, refuse_other_kinds
from jaxinfer.models.families._experts import experts, router
from jaxinfer.models.families._rope import one_rope
from jaxinfer.models.families._rules import HF_LAYER, NORMS_BEFORE, attention, ends
from jaxinfer.models.layer_config import MoEConfig

_MOE, _RENAMED = f"{HF_LAYER}.block_sparse_moe", f"{HF_LAYER}.mlp"
"""In files, and in transformers 5, which saves by the latter name when asked not to undo its own layout."""


def _windows(config: Config, layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    refuse_other_kinds(config, "full_attention" if window is None else "sliding_attention")
    return (window,) * layers


def _read(config: Config) -> DecoderConfig:
    layers = positive_int(config, "num_hidden_layers")
    moe = MoEConfig(
        num_experts=positive_int(config, "num_local_experts", 8),
        experts_per_token=positive_int(config, "num_experts_per_tok", 2),
        intermediate_size=positive_int(config, "intermediate_size", 14336),
        layers=(True,) * layers,
        normalized=True,
    )
    return llama_like(
        config,
        ropes=one_rope(theta=1e6),
        windows=_windows,
        kv_heads=8,
        max_positions=131072,
        norm_eps=1e-5,
        moe=moe,
    )


FAMILIES = (
    Family(
        "mixtral",
        ("MixtralForCausalLM",),
        _read,
        (
            *ends(),
            *NORMS_BEFORE,
            *attention(),
            *router(f"{_MOE}.gate", renamed=f"{_RENAMED}.gate"),
            *experts(f"{_MOE}.experts", "w1", "w3", "w2", fused=f"{_RENAMED}.experts"),
        ),
        harmless=("router_jitter_noise",),
    ),
)

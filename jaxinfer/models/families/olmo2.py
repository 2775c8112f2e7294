"""OLMo 2 (Walsh et al., 2024): norms after attention and MLP instead of before, and over all queries and all keys."""

from __future__ import annotations

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families._common import Config, Family, attention_biases, llama_like
from jaxinfer.models.families._rope import one_rope
from jaxinfer.models.families._rules import HF_LAYER, LAYER, attention, ends, gated_mlp, norm

_RULES = (
    *ends(),
    *norm(f"{LAYER}/attention_post_norm", f"{HF_LAYER}.post_attention_layernorm"),
    *norm(f"{LAYER}/mlp_post_norm", f"{HF_LAYER}.post_feedforward_layernorm"),
    *attention(),
    *gated_mlp(),
)


def _read(config: Config) -> DecoderConfig:
    return llama_like(
        config,
        ropes=one_rope(),
        norm_eps=1e-5,
        norm="rms_float32",
        norm_placement="after",
        qk_norm="projection",
        **attention_biases(config),
    )


FAMILIES = (Family("olmo2", ("Olmo2ForCausalLM",), _read, _RULES),)

"""The model families: how each one's config.json and tensor names map onto the decoder. Data, no computation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.families import (
    deepseek,
    gemma,
    gpt2,
    gpt_oss,
    llama,
    mistral,
    mixtral,
    olmo2,
    opt,
    phi3,
    qwen,
    qwen_moe,
    smollm3,
)
from jaxinfer.models.families._common import Family
from jaxinfer.models.tensors import ModelError

FAMILIES: tuple[Family, ...] = (
    *llama.FAMILIES,
    *mistral.FAMILIES,
    *qwen.FAMILIES,
    *gemma.FAMILIES,
    *phi3.FAMILIES,
    *olmo2.FAMILIES,
    *smollm3.FAMILIES,
    *gpt2.FAMILIES,
    *opt.FAMILIES,
    *mixtral.FAMILIES,
    *qwen_moe.FAMILIES,
    *deepseek.FAMILIES,
    *gpt_oss.FAMILIES,
)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json; raises ModelError, naming the known ones, when there is none."""
    model_type, architectures = config.get("model_type"), config.get("architectures") or []
    architectures = architectures if isinstance(architectures, list) else [architectures]
    for family in FAMILIES:
        known_class = any(name in family.architectures for name in architectures)
        if model_type == family.model_type and (known_class or not architectures):
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    asked = ", ".join(map(str, architectures)) or "unnamed"
    raise ModelError(f"The architecture {asked} (model_type {model_type!r}) is not supported; supported are {known}.")


__all__ = ["FAMILIES", "Family", "family_of"]

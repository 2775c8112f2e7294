"""RoPE settings as config.json spells them: `rope_parameters` of transformers 5, `rope_scaling` of 4."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import RopeConfig
from jaxinfer.models.families._common import Config, Ropes, flag, positive_float, positive_int
from jaxinfer.models.tensors import ModelError

_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor"),
        *("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    ),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
}
"""Of each scaling, the keys that it uses."""
_GENERAL_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


def one_rope(
    *,
    theta: float = 10000.0,
    partial: bool = False,
    original: int | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Ropes:
    """The same rotary embedding in every layer.

    theta: where none is stated. partial: whether the family's class honours partial_rotary_factor. original: the
    original context where config.json states none outside of the RoPE settings. aliases: older names of scalings.
    """

    def read(config: Config, head_dim: int, layers: int) -> tuple[RopeConfig | None, ...]:
        settings = rope_settings(config)
        stated = positive_float(config, "rope_theta", theta)
        kind = _kind(settings, aliases or {})
        rope = rope_of(config, settings, head_dim, theta=stated, kind=kind, partial=partial, original=original)
        return (rope,) * layers

    return read


def rope_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys and values under `rope_parameters` or `rope_scaling`; empty when there are none."""
    given = [config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)]
    if any(not isinstance(settings, Mapping) for settings in given):
        raise ModelError(f"The model's config describes RoPE by {given!r}, which must be keys and values.")
    if len(given) == 2 and given[0] != given[1]:
        raise ModelError("The model's config has both rope_parameters and rope_scaling, and they differ; remove one.")
    return given[0] if given else {}


def rope_of(
    config: Mapping[str, Any],
    settings: Mapping[str, Any],
    head_dim: int,
    *,
    theta: float,
    kind: str | None = None,
    partial: bool = False,
    original: int | None = None,
    interleaved: bool = False,
) -> RopeConfig:
    """One rotary embedding from its settings; see `one_rope`. kind: its scaling; None for what the settings say."""
    kind = kind or _kind(settings, {})
    share = _partial_share(config, settings, partial)
    known = (*_GENERAL_KEYS, *_KEYS[kind])
    for key, value in settings.items():
        if value is not None and key not in known:
            raise ModelError(f"The model's config sets {key} of {kind} RoPE to {value!r}, which is not supported.")
    return RopeConfig(
        theta=positive_float(settings, "rope_theta", theta),
        rotary_dim=int(head_dim * share),
        interleaved=interleaved,
        scaling=kind,
        **_scaling_fields(kind, config, settings, original),
    )


def _kind(settings: Mapping[str, Any], aliases: Mapping[str, str]) -> str:
    kind = _first(settings.get("rope_type"), settings.get("type"), "default")
    if not isinstance(kind, str) or aliases.get(kind, kind) not in _KEYS:
        raise ModelError(f"RoPE scaling {kind!r} is not supported; {', '.join(_KEYS)} are.")
    return aliases.get(kind, kind)


def _partial_share(config: Mapping[str, Any], settings: Mapping[str, Any], allowed: bool) -> float:
    if settings.get("partial_rotary_factor") is not None:
        share = positive_float(settings, "partial_rotary_factor")
    else:
        share = positive_float(config, "partial_rotary_factor", 1.0) if allowed else 1.0
    if share > 1 or (share != 1 and not allowed):
        raise ModelError(f"The model's config sets partial_rotary_factor to {share}, which is not supported.")
    return share


def _scaling_fields(
    kind: str, config: Mapping[str, Any], settings: Mapping[str, Any], original: int | None
) -> dict[str, Any]:
    context = config.get("max_position_embeddings") or 8192
    if kind == "default":
        return {}
    if kind == "linear":
        return {"factor": positive_float(settings, "factor")}
    if kind == "dynamic":
        return {"factor": positive_float(settings, "factor"), "original_max_positions": context}
    values: dict[str, Any] = {"original_max_positions": _original_positions(config, settings, original, context)}
    if kind == "llama3":
        for key in ("factor", "low_freq_factor", "high_freq_factor"):
            values[key] = positive_float(settings, key)
        return values
    factor = positive_float(settings, "factor", context / values["original_max_positions"])
    if kind == "yarn":
        values |= {
            "factor": factor,
            "beta_fast": positive_float(settings, "beta_fast", 32.0),
            "beta_slow": positive_float(settings, "beta_slow", 1.0),
            "truncate": flag(settings, "truncate", True),
            "attention_factor": positive_float(settings, "attention_factor", _yarn_attention(factor, settings)),
        }
        return values
    stretched = math.sqrt(1 + math.log(max(factor, 1)) / math.log(values["original_max_positions"]))
    values["attention_factor"] = positive_float(settings, "attention_factor", stretched)
    values["short_factors"], values["long_factors"] = (
        _numbers(settings, f"{name}_factor") for name in ("short", "long")
    )
    return values


def _original_positions(
    config: Mapping[str, Any], settings: Mapping[str, Any], original: int | None, context: int
) -> int:
    key = "original_max_position_embeddings"
    if original is not None or config.get(key) is not None:
        return positive_int(config, key, original)
    return positive_int(settings, key, context)


def _yarn_attention(factor: float, settings: Mapping[str, Any]) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    # Either of them absent, null or 0 means neither.
    if not (settings.get("mscale") and settings.get("mscale_all_dim")):
        return magnitude(1.0)
    return magnitude(positive_float(settings, "mscale")) / magnitude(positive_float(settings, "mscale_all_dim"))


def _numbers(settings: Mapping[str, Any], key: str) -> tuple[float, ...]:
    values = settings.get(key)
    if not isinstance(values, list) or any(isinstance(v, bool) or not isinstance(v, (int, float)) for v in values):
        raise ModelError(f"The model's config has no list of numbers {key}, which longrope RoPE scaling needs.")
    return tuple(map(float, values))


def _first(*values: Any) -> Any:
    """The first value that is not None."""
    return next(value for value in values if value is not None)

"""Rotary scaling of a GGUF file as Hugging Face's `rope_scaling`.

llama.cpp stores llama3 scaling as one divisor per rotary pair (`rope_freqs.weight`).  Those divisors are no weights of
the model, so they are turned back into the parameters they were computed from; divisors that do not come from llama3
scaling become the equivalent "longrope" entry, which lists divisors as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np


class RopeKeys(Protocol):
    """The metadata access this module needs."""

    values: Mapping[str, Any]
    prefix: str

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        ...

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        ...

    def has(self, key: str) -> bool:
        """Whether the key is set."""
        ...


def rope_scaling(
    keys: RopeKeys, factors: Mapping[str, np.ndarray], theta: float, rotary_dim: int, context: int
) -> dict[str, Any] | None:
    """Hugging Face's `rope_scaling`, or None when positions are not scaled."""
    if "rope_freqs.weight" in factors:
        divisors = factors["rope_freqs.weight"].astype(np.float64)
        return _llama3_from_divisors(divisors, theta, rotary_dim) or _longrope(divisors, divisors, context)
    if "rope_factors_long.weight" in factors and "rope_factors_short.weight" in factors:
        result = _longrope(factors["rope_factors_long.weight"], factors["rope_factors_short.weight"], context)
        original = keys.integer("rope.scaling.original_context_length", context)
        result["original_max_position_embeddings"] = original
        stored, usual = keys.number("rope.scaling.attn_factor", 1.0), _longrope_magnitude(context, original)
        # The file has it as float32.
        result["attention_factor"] = usual if math.isclose(stored, usual, rel_tol=1e-6) else stored
        return result
    return _declared(keys, context)


def _declared(keys: RopeKeys, context: int) -> dict[str, Any] | None:
    kind = keys.values.get(f"{keys.prefix}.rope.scaling.type")
    if kind is None and keys.has("rope.scale_linear"):
        return {"rope_type": "linear", "factor": keys.number("rope.scale_linear")}
    if kind == "linear" and keys.has("rope.scaling.factor"):
        return {"rope_type": "linear", "factor": keys.number("rope.scaling.factor")}
    if kind != "yarn":
        return None
    result: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": keys.number("rope.scaling.factor"),
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length", context),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    return result | _magnitude(keys, result["factor"])


def _magnitude(keys: RopeKeys, factor: float) -> dict[str, float]:
    """What YaRN multiplies sines and cosines by, where it is not what follows from the factor."""
    if keys.has("rope.scaling.yarn_log_multiplier"):
        # The converter writes a tenth of mscale_all_dim; every published model's mscale is the same number.
        mscale = round(10 * keys.number("rope.scaling.yarn_log_multiplier"), 6)
        return {"mscale": mscale, "mscale_all_dim": mscale}
    if keys.has("rope.scaling.yarn_attn_factor"):
        return {"attention_factor": keys.number("rope.scaling.yarn_attn_factor")}
    if keys.has("rope.scaling.attn_factor") and factor > 0:
        usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
        return {"attention_factor": keys.number("rope.scaling.attn_factor") * usual}
    return {}


def _longrope_magnitude(context: int, original: int) -> float:
    return math.sqrt(1 + math.log(context / original) / math.log(original)) if context > original > 1 else 1.0


def _longrope(long: np.ndarray, short: np.ndarray, context: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "long_factor": [float(value) for value in long],
        "short_factor": [float(value) for value in short],
        "original_max_position_embeddings": context,
        "attention_factor": 1.0,
    }


def llama3_divisors(scaling: Mapping[str, Any], theta: float, rotary_dim: int) -> np.ndarray:
    """What each rotary frequency is divided by under llama3 scaling, f64[rotary_dim / 2]."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths = 2 * math.pi * theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    turns = scaling["original_max_position_embeddings"] / wavelengths
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - smooth) / factor + smooth)


def _llama3_from_divisors(divisors: np.ndarray, theta: float, rotary_dim: int) -> dict[str, Any] | None:
    """Solve for the parameters: between the plateaus 1/divisor is linear in the frequency."""
    factor = float(divisors.max(initial=0.0))
    if divisors.size != rotary_dim // 2 or divisors.min(initial=1.0) <= 0 or factor <= 1:
        return None
    frequencies = theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim) / (2 * math.pi)
    smooth = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    between = (smooth > 1e-4) & (smooth < 1 - 1e-4)
    if between.sum() < 2:
        return None
    slope, intercept = np.polyfit(frequencies[between], smooth[between], 1)
    if intercept >= 0 or slope <= 0:
        return None
    # Only ratios are determined, so the low factor is 1 as in every published model.
    scaling = {
        "rope_type": "llama3",
        "factor": _rounded(factor),
        "low_freq_factor": 1.0,
        "high_freq_factor": _rounded(1 - 1 / intercept),
        "original_max_position_embeddings": round(-slope / intercept),
    }
    matches = np.allclose(llama3_divisors(scaling, theta, rotary_dim), divisors, rtol=1e-5)
    return scaling if matches else None


def _rounded(value: float) -> float:
    nearest = round(value, 2)
    return nearest if abs(value - nearest) < 1e-3 else value

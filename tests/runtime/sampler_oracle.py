"""Sampling in float64 numpy, written from the definitions: what each parameter does to a row of logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from jaxinfer.core.sampling_params import SamplingParams


def edited_logits(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], ends: Sequence[int]
) -> np.ndarray:
    """Bias, repetition (prompt and output), frequency and presence (output only), no end before min_tokens."""
    out = logits.astype(np.float64)
    for token, bias in (params.logit_bias or {}).items():
        out[token] += bias
    for token in {*prompt, *output}:
        out[token] = (
            out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
        )
    for token, count in Counter(output).items():
        out[token] -= params.frequency_penalty * count + params.presence_penalty
    if len(output) < params.min_tokens:
        out[list(ends)] = -np.inf
    return out


def probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """What a token is drawn from: temperature, min_p, top_k, top_p, ties in the order of ids."""
    if params.temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    scaled = (logits - logits.max()) / params.temperature
    weights = np.exp(scaled)
    weights[weights < params.min_p] = 0
    order = np.argsort(-logits, kind="stable")
    if params.top_k > 0:
        weights[order[params.top_k :]] = 0
    before = np.concatenate([[0], np.cumsum(weights[order])[:-1]]) / weights.sum()
    late = before >= params.top_p
    late[0] = False
    if params.top_p < 1:
        weights[order[late]] = 0
    return weights / weights.sum()


def is_clear(logits: np.ndarray, params: SamplingParams, margin: float = 1e-5) -> bool:
    """Whether float32 rounding cannot move a token over a border of these filters."""
    if params.temperature == 0:
        best = np.sort(logits)[-2:]
        return best[1] - best[0] > margin or best[1] == best[0]
    full = SamplingParams(temperature=params.temperature, top_k=params.top_k, min_p=params.min_p)
    ratios = np.exp((logits - logits.max()) / params.temperature)
    if params.min_p and np.abs(ratios / params.min_p - 1).min() < margin:
        return False
    border = np.sort(logits)[::-1]
    if 0 < params.top_k < len(logits):
        last, first = border[params.top_k - 1 : params.top_k + 1]
        if last != first and last - first < margin:
            return False
    mass = np.cumsum(np.sort(probabilities(logits, full))[::-1])
    return params.top_p >= 1 or np.abs(mass - params.top_p).min() > margin


def admits(probability: np.ndarray, uniform: float, token: int, slack: float = 1e-5) -> bool:
    """Whether inverse transform sampling gives this token for this number, up to rounding at the borders."""
    upper = np.cumsum(probability)
    lower = upper - probability
    return bool(probability[token] > 0 and lower[token] - slack <= uniform <= upper[token] + slack)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    exact = logits.astype(np.float64)
    exact = exact - exact.max(-1, keepdims=True)
    return exact - np.log(np.exp(exact).sum(-1, keepdims=True))

"""How one request wants its tokens chosen and where it wants them to end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

MAX_LOGPROBS = 20
MAX_COMPLETIONS = 2**16
_SEED_LIMIT = 2**63
_LARGEST_PENALTY = 1e6
"""Far beyond any use, and far inside what float32 holds."""


@dataclass(frozen=True)
class SamplingParams:
    """Generation parameters of one request, with vLLM's names and defaults.

    A value outside its range raises ValueError with one sentence naming the parameter, the value and the range.

    Attributes:
        n: number of completions of the same prompt, 1 .. 65536; completion i uses seed + i.
        presence_penalty: subtracted once from the logit of every token already in the output, -2 .. 2.
        frequency_penalty: subtracted once per occurrence in the output, -2 .. 2.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output, > 0.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: nucleus mass, 0 .. 1; 0 keeps only the most likely token.
        top_k: number of tokens kept; 0 or -1 keeps all.
        min_p: tokens below min_p times the largest probability are dropped, 0 .. 1.
        seed: start of the request's random stream; None draws a fresh one per request.
        stop: strings that end the text; a single string is accepted. Kept as a tuple.
        stop_token_ids: token ids that end the output. Kept as a tuple.
        ignore_eos: go on after an end-of-sequence token.
        max_tokens: most tokens to sample; None means as many as context and cache allow.
        min_tokens: no end-of-sequence token, stop id or stop string ends the output before this many tokens.
        logprobs: number of most likely tokens reported per output token, 0 .. 20; None reports nothing.
        prompt_logprobs: the same for the prompt's tokens.
        logit_bias: token id -> number added to its logit.
        include_stop_str_in_output: keep the stop string (or the stop token's text) at the end of the text.
        skip_special_tokens: leave special tokens out of the text.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Iterable[str] = ()
    stop_token_ids: Iterable[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_COMPLETIONS)
        _check_float("presence_penalty", self.presence_penalty, -2, 2)
        _check_float("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_float("repetition_penalty", self.repetition_penalty, 0, _LARGEST_PENALTY, open_low=True)
        _check_float("temperature", self.temperature, 0, None)
        _check_float("top_p", self.top_p, 0, 1)
        _check_int("top_k", self.top_k, -1, None)
        _check_float("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _check_int("seed", self.seed, -_SEED_LIMIT, _SEED_LIMIT - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens, high_name="max_tokens")
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}.")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0


def _range_text(low: float, high: float | None, high_name: str, open_low: bool) -> str:
    if high is None:
        return f"greater than {low}" if open_low else f"at least {low}"
    if open_low:
        return f"greater than {low} and at most {high:g}"
    return f"between {low} and {high}" + (f" ({high_name})" if high_name else "")


def _check_int(name: str, value: object, low: int, high: int | None, *, high_name: str = "") -> None:
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
    if not fits:
        raise ValueError(f"{name} must be an integer {_range_text(low, high, high_name, False)}, not {value!r}.")


def _check_float(name: str, value: object, low: float, high: float | None, *, open_low: bool = False) -> None:
    fits = (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and _is_finite(value)
        and (value > low if open_low else value >= low)
        and (high is None or value <= high)
    )
    if not fits:
        kind = "a finite number" if isinstance(value, float) and not math.isfinite(value) else "a number"
        raise ValueError(f"{name} must be {kind} {_range_text(low, high, '', open_low)}, not {value!r}.")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _stop_strings(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (stop,)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop must be a non-empty string or a list of them, not {stop!r}.")
    return strings  # pyright: ignore[reportReturnType]


def _token_ids(name: str, ids: object) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not isinstance(ids, Iterable) or isinstance(ids, (str, bytes, Mapping)):
        raise ValueError(f"{name} must be a list of token ids, not {ids!r}.")
    checked = tuple(ids)
    for token_id in checked:
        _check_int(f"every id in {name}", token_id, 0, None)
    return checked


def _checked_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, not {bias!r}.")
    checked: dict[int, float] = {}
    for token_id, value in bias.items():
        _check_int("every id in logit_bias", token_id, 0, None)
        _check_float(f"logit_bias of token {token_id}", value, -100, 100)
        checked[token_id] = float(value)
    return checked

"""Accepts a prompt as text or token ids and refuses, in one sentence, what cannot be a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from jaxinfer.core.detokenizer import TextDecoder
from jaxinfer.core.request import RequestRefused
from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.engine.outputs import OutputKind

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; such a dict may have a "cache_salt" too."""
_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


class Tokenizer(TextDecoder, Protocol):
    """The part of a checkpoint's tokenizer the engine uses."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a sequence."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, beginning with exactly one BOS if the model wants one."""
        ...


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> tuple[str | None, tuple[int, ...]]:
    """The prompt's text (None if it came as ids) and its token ids, at least one, all inside the vocabulary."""
    if isinstance(prompt, Mapping):
        prompt = _mapped_prompt(prompt)
    if isinstance(prompt, str):
        return prompt, _encode_text(prompt, tokenizer)
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise RequestRefused(f"A prompt must be text or a list of token ids, not {type(prompt).__name__}.")
    if not prompt:
        raise RequestRefused("The prompt is empty; give at least one token.")
    for token_id in prompt:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise RequestRefused(f"A prompt's token ids must be integers, not {token_id!r}.")
        check_token_id(token_id, "The prompt", vocab_size)
    return None, tuple(prompt)


def salt_of(prompt: Prompt) -> Any:
    """The "cache_salt" that came with the prompt; an empty text if none did."""
    return prompt.get("cache_salt", "") if isinstance(prompt, Mapping) else ""


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """RequestRefused if these are no sampling parameters or name a token the model does not have."""
    if not isinstance(params, SamplingParams):
        raise RequestRefused(f"Sampling parameters must be a SamplingParams, not {type(params).__name__}.")
    for token_id in params.stop_token_ids:
        check_token_id(token_id, "stop_token_ids", vocab_size)
    for token_id in params.logit_bias or ():
        check_token_id(token_id, "logit_bias", vocab_size)


def check_output_kind(kind: object) -> None:
    """RequestRefused if it is none."""
    if not isinstance(kind, OutputKind):
        raise RequestRefused(f"output_kind must be an OutputKind, not {kind!r}.")


def check_token_id(token_id: int, where: str, vocab_size: int) -> None:
    """RequestRefused if the id is outside the vocabulary."""
    if not 0 <= token_id < vocab_size:
        raise RequestRefused(f"{where} has token id {token_id}, but the vocabulary has ids 0 to {vocab_size - 1}.")


def _mapped_prompt(prompt: Mapping[str, Any]) -> Prompt:
    if "prompt" not in prompt and "prompt_token_ids" not in prompt:
        keys = sorted(map(repr, prompt))
        raise RequestRefused(f"A prompt given as a dict needs 'prompt' or 'prompt_token_ids', not {', '.join(keys)}.")
    for key in prompt:
        if key not in _KEYS:
            raise RequestRefused(f"A prompt given as a dict has the key {key!r}; the keys are {', '.join(_KEYS)}.")
    if "prompt_token_ids" not in prompt:
        return prompt["prompt"]
    if isinstance(prompt["prompt_token_ids"], str):
        raise RequestRefused("prompt_token_ids must be a list of token ids, not str; give a text as 'prompt'.")
    return prompt["prompt_token_ids"]


def _encode_text(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    if not text:
        raise RequestRefused("The prompt is empty; give some text.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestRefused(f"The prompt {text[:40]!a} is not UTF-8 text.") from None
    ids = tokenizer.encode(text)
    if not ids:
        raise RequestRefused(f"The prompt {text[:40]!r} gives no tokens; give some other text.")
    return tuple(ids)

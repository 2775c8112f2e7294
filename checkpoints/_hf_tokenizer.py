"""The tokenizer of a Hugging Face checkpoint directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from checkpoints._errors import CheckpointError
from checkpoints._files import MAX_JSON_BYTES, child, read_json, read_optional_json, read_text
from checkpoints._sentencepiece_backend import SentencePieceBackend
from checkpoints._tokenizer import Backend, Tokenizer
from checkpoints._tokenizers_backend import TokenizersBackend

# Everything a tokenizer may consist of; `convert` copies these.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def hf_tokenizer(directory: Path, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> Tokenizer:
    """Load `tokenizer.json` or `tokenizer.model`; raises `CheckpointError` when neither can be read."""
    settings = read_optional_json(directory, "special_tokens_map.json") | read_optional_json(
        directory, "tokenizer_config.json"
    )
    backend = _backend(directory, settings)
    named = {name: text for name in _NAMED_TOKENS if (text := _token_text(settings.get(name))) is not None}
    bos = _bos_id(backend, settings, named, config)
    eos = [*token_ids(generation_config.get("eos_token_id")), *token_ids(config.get("eos_token_id"))]
    if "eos_token" in named and (found := backend.find(named["eos_token"])) is not None:
        eos.append(found)
    templates = _templates(directory, settings)
    return Tokenizer(
        backend,
        bos_id=bos,
        eos_ids=eos,
        add_bos=_adds_bos(backend, settings, bos),
        chat_template=templates.get("default"),
        tool_template=templates.get("tool_use"),
        special_tokens=named,
    )


def token_ids(value: Any) -> list[int]:
    """The ids in a configuration entry that is null, one id or a list of ids."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if type(item) is int and item >= 0]


def _backend(directory: Path, settings: Mapping[str, Any]) -> Backend:
    fast, slow = child(directory, "tokenizer.json"), child(directory, "tokenizer.model")
    if fast.is_file():
        # Parsed here first, so that its size is bounded and malformed JSON is told with its line.
        read_json(fast)
        try:
            return TokenizersBackend(tokenizers.Tokenizer.from_file(str(fast)))
        except Exception as error:
            # The library has no exception type of its own.
            raise CheckpointError(f"{fast}: not a readable tokenizer ({error}); download it again.") from None
    if slow.is_file():
        return SentencePieceBackend(slow, settings, read_optional_json(directory, "added_tokens.json"))
    raise CheckpointError(
        f"{directory}: there is no tokenizer.json or tokenizer.model; save the tokenizer there with save_pretrained."
    )


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _bos_id(
    backend: Backend, settings: Mapping[str, Any], named: Mapping[str, str], config: Mapping[str, Any]
) -> int | None:
    if "bos_token" in named:
        return backend.find(named["bos_token"])
    # A null bos_token says that there is none, whatever the model's config has.
    declared = [] if "bos_token" in settings else token_ids(config.get("bos_token_id"))
    return declared[0] if declared else None


def _adds_bos(backend: Backend, settings: Mapping[str, Any], bos: int | None) -> bool:
    declared = settings.get("add_bos_token")
    if isinstance(declared, bool):
        return declared
    return bos is not None and bos in backend.encode("", True)[:1]


def _templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    declared = settings.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(declared, str):
        templates["default"] = declared
    elif isinstance(declared, list):
        for entry in declared:
            if (
                isinstance(entry, dict)
                and isinstance(entry.get("name"), str)
                and isinstance(entry.get("template"), str)
            ):
                templates[entry["name"]] = entry["template"]
    file = child(directory, "chat_template.jinja")
    if file.is_file():
        templates["default"] = read_text(file, MAX_JSON_BYTES)
    return templates

"""Build the tokenizer a GGUF file carries in its metadata."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, processors

from checkpoints._errors import CheckpointError
from checkpoints._pre_tokenizers import PRE_TOKENIZERS, PreTokenizer, pre_tokenizer
from checkpoints._sentencepiece_bpe import sentencepiece_bpe
from checkpoints._tokenizer import Tokenizer
from checkpoints._tokenizers_backend import TokenizersBackend

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4


def gguf_tokenizer(metadata: Mapping[str, Any], eos_ids: Iterable[int], source: str) -> Tokenizer:
    """The tokenizer in the metadata; raises `CheckpointError` when it is missing, malformed or of another kind."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _tokens(metadata, source)
    try:
        if kind == "gpt2":
            built = _byte_level_bpe(metadata, tokens, source)
        elif kind == "llama":
            built = _scored_bpe(metadata, tokens, source)
        else:
            raise CheckpointError(
                f"{source}: the tokenizer kind {kind!r} is not supported (gpt2 and llama are); "
                "use the safetensors checkpoint."
            )
        built.add_tokens(_added_tokens(metadata, tokens))
        bos = _special(metadata, "bos", tokens)
        if bos is not None and _adds_bos(metadata):
            # For whoever loads the written tokenizer.json; `Tokenizer` sees to one BOS by itself.
            written = {"id": "bos", "ids": [bos], "tokens": [tokens[bos]]}
            built.post_processor = processors.TemplateProcessing(
                single=["bos", "$A"], pair=["bos", "$A", "$B:1"], special_tokens=[written]
            )
    except CheckpointError:
        raise
    except Exception as error:
        # The library reports a vocabulary and merges that do not fit each other as a bare Exception.
        raise CheckpointError(f"{source}: the tokenizer is inconsistent ({error}); convert the file again.") from None
    bos, eos, unknown, padding = (_special(metadata, name, tokens) for name in ("bos", "eos", "unknown", "padding"))
    named = {"bos_token": bos, "eos_token": eos, "unk_token": unknown, "pad_token": padding}
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        TokenizersBackend(built),
        bos_id=bos,
        eos_ids=[*eos_ids, *([] if eos is None else [eos])],
        add_bos=_adds_bos(metadata),
        chat_template=template if isinstance(template, str) else None,
        special_tokens={name: tokens[value] for name, value in named.items() if value is not None},
    )


def _tokens(metadata: Mapping[str, Any], source: str) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError(f"{source}: the file has no tokenizer; use a file converted with its vocabulary.")
    if len(set(tokens)) != len(tokens):
        raise CheckpointError(f"{source}: the vocabulary holds the same token twice; convert the file again.")
    return tokens


def _special(metadata: Mapping[str, Any], name: str, tokens: list[str]) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if type(value) is int and 0 <= value < len(tokens) else None


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    declared = metadata.get("tokenizer.ggml.add_bos_token")
    if isinstance(declared, bool):
        return declared
    pre = metadata.get("tokenizer.ggml.pre")
    known = PRE_TOKENIZERS.get(pre) if isinstance(pre, str) else None
    return metadata["tokenizer.ggml.model"] == "llama" or (known is not None and known.adds_bos)


def _kinds(metadata: Mapping[str, Any], tokens: list[str]) -> list[int]:
    kinds = metadata.get("tokenizer.ggml.token_type")
    return kinds.tolist() if isinstance(kinds, np.ndarray) and len(kinds) == len(tokens) else [1] * len(tokens)


def _added_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> list[AddedToken]:
    return [
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, _kinds(metadata, tokens), strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
    ]


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str], source: str) -> tokenizers.Tokenizer:
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise CheckpointError(f"{source}: the tokenizer has no merges; convert the file again.")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    pre = _pre_tokenizer(metadata, source)
    built = tokenizers.Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, pairs, ignore_merges=pre.ignore_merges)
    )
    built.pre_tokenizer = pre.build()
    if (normalizer := pre.normalizer()) is not None:
        built.normalizer = normalizer
    built.decoder = decoders.ByteLevel()
    return built


def _pre_tokenizer(metadata: Mapping[str, Any], source: str) -> PreTokenizer:
    # GPT-2's own files are older than the key.
    usual = "gpt-2" if metadata.get("general.architecture") == "gpt2" else None
    return pre_tokenizer(metadata.get("tokenizer.ggml.pre", usual), source)


def _scored_bpe(metadata: Mapping[str, Any], tokens: list[str], source: str) -> tokenizers.Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise CheckpointError(f"{source}: the tokenizer needs one score per token; convert the file again.")
    unknown = _special(metadata, "unknown", tokens)
    return sentencepiece_bpe(
        tokens,
        scores.tolist(),
        _kinds(metadata, tokens),
        unknown=None if unknown is None else tokens[unknown],
        space_prefix=metadata.get("tokenizer.ggml.add_space_prefix", True) is not False,
    )

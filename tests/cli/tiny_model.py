"""A model of a few kilobytes with a tokenizer: the golden Llama weights and one token per ASCII character."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

GOLDEN = Path(__file__).parents[1] / "golden" / "llama-tied"
SPECIAL = ["<unk>", "<s>", "</s>"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SMALL = ("--max-context", "64", "--max-batched-tokens", "64")
"""Engine options that leave little to compile."""


def write_tokenizer(directory: Path, template: str | None) -> None:
    characters = ["\n", *map(chr, range(32, 127))]
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *characters])}
    built = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    built.decoder = decoders.Fuse()
    built.add_special_tokens(SPECIAL)
    built.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def write_model(directory: Path, template: str | None = TEMPLATE, **generation: object) -> Path:
    """The tiny model; `generation` replaces its generation_config.json."""
    shutil.copytree(GOLDEN, directory, ignore=shutil.ignore_patterns("expected.npz"))
    (directory / "generation_config.json").write_text(json.dumps(generation))
    write_tokenizer(directory, template)
    return directory

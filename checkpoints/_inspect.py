"""A readable summary of a checkpoint."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from checkpoints._checkpoint import Checkpoint
from checkpoints._errors import CheckpointError
from checkpoints._tokenizer import Tokenizer

_SHOWN = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "tie_word_embeddings",
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "kv_lora_rank",
    "q_lora_rank",
    "n_embd",
    "n_layer",
    "n_head",
    "n_positions",
)
# A word that no template holds by itself.
_MARK = "zyxgloss"


@dataclass(frozen=True)
class ModuleSummary:
    """The tensors of one kind, over all layers."""

    module: str
    tensors: int
    parameters: int
    stored_bytes: int
    types: tuple[str, ...]


def summarize_modules(checkpoint: Checkpoint) -> list[ModuleSummary]:
    """Parameters by module, layer and expert numbers written as *, in the order of the file."""
    groups: dict[str, list[str]] = {}
    for name in checkpoint.tensors:
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), []).append(name)
    result = []
    for module, names in groups.items():
        infos = [checkpoint.tensors[name] for name in names]
        types = Counter(info.stored_as for info in infos)
        parameters = sum(math.prod(info.shape) for info in infos)
        stored = sum(info.stored_nbytes for info in infos)
        result.append(ModuleSummary(module, len(names), parameters, stored, tuple(types)))
    return result


def print_summary(checkpoint: Checkpoint, console: Console) -> None:
    """Print configuration, modules and tokenizer of a checkpoint."""
    console.print(_facts_table(checkpoint))
    console.print(_module_table(summarize_modules(checkpoint)))
    console.print(_tokenizer_table(checkpoint))


def _cell(value: object) -> Text:
    # Text, never markup: names come from the file. Control characters would let it drive the terminal.
    return Text("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value))[:300])


def _table(title: str, rows: list[tuple[str, object]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows:
        table.add_row(_cell(name), _cell(value))
    return table


def _facts_table(checkpoint: Checkpoint) -> Table:
    config = checkpoint.config
    architectures = config.get("architectures")
    names = ", ".join(map(str, architectures)) if isinstance(architectures, list) else "not named"
    rows: list[tuple[str, object]] = [("source", checkpoint.source), ("format", checkpoint.format)]
    rows += [("architecture", names), ("model type", config.get("model_type", "not named"))]
    rows += [(key, config[key]) for key in _SHOWN if config.get(key) is not None]
    rows.append(("stored types", _stored_types(checkpoint)))
    return _table("Model", rows)


def _stored_types(checkpoint: Checkpoint) -> str:
    tensors: Counter[str] = Counter()
    parameters: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        tensors[info.stored_as] += 1
        parameters[info.stored_as] += math.prod(info.shape)
    parts = [f"{kind} ({tensors[kind]:,} tensors, {count:,} values)" for kind, count in parameters.most_common()]
    return ", ".join(parts) or "none"


def _module_table(modules: list[ModuleSummary]) -> Table:
    table = Table(title="Parameters by module", title_justify="left", show_footer=True)
    table.add_column("module", "total", overflow="fold")
    numbers = (
        ("tensors", sum(m.tensors for m in modules)),
        ("parameters", sum(m.parameters for m in modules)),
        ("bytes", sum(m.stored_bytes for m in modules)),
    )
    for title, total in numbers:
        table.add_column(title, f"{total:,}", justify="right")
    table.add_column("stored as")
    for m in modules:
        cells = (m.module, f"{m.tensors:,}", f"{m.parameters:,}", f"{m.stored_bytes:,}", ", ".join(m.types))
        table.add_row(*map(_cell, cells))
    return table


def _tokenizer_table(checkpoint: Checkpoint) -> Table:
    try:
        tokenizer = checkpoint.tokenizer()
    except CheckpointError as error:
        return _table("Tokenizer", [("cannot be used", error)])

    def named(token_id: int) -> str:
        return f"{token_id} {tokenizer.id_to_piece(token_id)}"

    template = tokenizer.chat_template
    rows: list[tuple[str, object]] = [
        ("vocabulary", f"{tokenizer.vocab_size:,} ids, {len(tokenizer.special_ids):,} special"),
        ("BOS", "none" if tokenizer.bos_id is None else named(tokenizer.bos_id)),
        ("adds BOS", "yes" if tokenizer.adds_bos else "no"),
        ("EOS", ", ".join(map(named, tokenizer.eos_ids)) or "none"),
        ("chat template", "none" if template is None else f"{len(template):,} characters"),
    ]
    if template is not None:
        system = [{"role": "system", "content": _MARK}, {"role": "user", "content": "hi"}]
        rows.append(("system role", _shows(tokenizer, system)))
        tool = {"type": "function", "function": {"name": _MARK, "description": "", "parameters": {"type": "object"}}}
        rows.append(("tools", _shows(tokenizer, [{"role": "user", "content": "hi"}], [tool])))
    return _table("Tokenizer", rows)


def _shows(tokenizer: Tokenizer, messages: list[dict[str, str]], tools: list[dict[str, object]] | None = None) -> str:
    """Whether the template puts the mark into the prompt."""
    try:
        return "in the prompt" if _MARK in tokenizer.apply_chat_template(messages, tools=tools) else "left out"
    except CheckpointError as error:
        return str(error)

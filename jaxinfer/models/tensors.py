"""From a checkpoint's named tensors to the decoder's parameters, by rules that are data.

A rule says for one parameter which tensors it is made of and how they are joined. Every tensor is used once, ignored
by name or a copy of another, every parameter is made; anything else is one error that lists it all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxinfer.models.config import DecoderConfig


class ModelError(ValueError):
    """A checkpoint does not describe a model that this engine runs; the message says what and where."""


Shapes = tuple[tuple[int, ...], ...]
Join = Callable[[list[np.ndarray]], np.ndarray]
"""The tensors of a rule -> its parameter. It moves numbers, and computes none."""
Keep = Callable[[str, tuple[str, ...], Join], Any]
"""(a parameter's path, its tensors' names in the checkpoint, how they are joined) -> the parameter, or None."""


@dataclass(frozen=True)
class Rule:
    """How one parameter is made.

    parameter: its path, with {layer}.
    tensors: the tensor names, with {layer}; a function where their number depends on the config.
    shapes: the shapes that these tensors must have.
    join: the tensors (each as read) -> the parameter. A tensor may be part of several parameters.
    when: whether a model with this config has the parameter.
    layers: the layers that have it; None for all.
    dtype: its type; None for that of the config.
    otherwise: the rule to make it by in a checkpoint that lacks the first of these tensors but has that rule's first.
    """

    parameter: str
    tensors: tuple[str, ...] | Callable[[DecoderConfig], tuple[str, ...]]
    shapes: Callable[[DecoderConfig], Shapes]
    join: Callable[[DecoderConfig, list[np.ndarray]], np.ndarray]
    when: Callable[[DecoderConfig], bool] = lambda config: True
    layers: Callable[[DecoderConfig], Iterable[int]] | None = None
    dtype: str | None = None
    otherwise: Rule | None = None


def assemble_params(
    config: DecoderConfig,
    rules: tuple[Rule, ...],
    ignored: tuple[str, ...],
    copies: tuple[tuple[str, str], ...],
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    place: Callable[[np.ndarray], jax.Array],
    on_progress: Callable[[int, int], None] | None = None,
    *,
    prefixes: tuple[tuple[str, str], ...] = (),
    keep: Keep = lambda path, names, join: None,
) -> dict[str, Any]:
    """Parameters of `Decoder(config)`.

    rules, ignored, copies, prefixes: of the family; `ignored` are regular expressions of tensor names that carry
        nothing, `copies` pairs (tensor, the tensor that it must equal where no rule uses it), `prefixes` pairs (how
        names begin in some checkpoints, how they begin in the rules), of which the first that fits is taken.
    shapes: every tensor of the checkpoint. read: one tensor, by name. place: host array -> device array.
    on_progress: called with (parameters done, parameters in all).
    keep: makes a parameter by itself, in whatever form, or returns None: then it is read, joined and placed in
        config.dtype.
    Raises ModelError listing all missing, unexpected and misshapen tensors, or naming a copy that differs.
    """
    original = _originals(prefixes, shapes)
    shapes = {name: shapes[there] for name, there in original.items()}
    wanted = list(_expand(config, rules, shapes))
    used = {name for _, names, _ in wanted for name in names}
    unused_copies = [pair for pair in copies if pair[0] in shapes and pair[0] not in used]
    _check(config, wanted, (*ignored, *(re.escape(name) for name, _ in unused_copies)), shapes)
    for name, source in unused_copies:
        _check_copy(name, source, shapes, lambda name: read(original[name]))
    params: dict[str, Any] = {}
    for index, (path, names, rule) in enumerate(wanted):
        there = tuple(original[name] for name in names)
        leaf = keep(path, there, partial(rule.join, config))
        if leaf is None:
            joined = rule.join(config, [read(name) for name in there])
            leaf = place(joined.astype(_numpy_dtype(rule.dtype or config.dtype), copy=False))
        _insert(params, path, leaf)
        if on_progress is not None:
            on_progress(index + 1, len(wanted))
    return params


def sources(
    config: DecoderConfig, rules: tuple[Rule, ...], prefixes: tuple[tuple[str, str], ...], names: Iterable[str]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each parameter's path and its tensors' names in a checkpoint that has `names`; none of those that lack one."""
    original = _originals(prefixes, names)
    for path, wanted, _ in _expand(config, rules, original):
        if all(name in original for name in wanted):
            yield path, tuple(original[name] for name in wanted)


def _originals(prefixes: tuple[tuple[str, str], ...], names: Iterable[str]) -> dict[str, str]:
    """The checkpoint's names of its tensors, by the names that the rules know."""
    originals: dict[str, str] = {}
    for name in names:
        begin, known = next((pair for pair in prefixes if name.startswith(pair[0])), ("", ""))
        renamed = known + name[len(begin) :]
        if renamed in originals:
            raise ModelError(f"The checkpoint's tensors {originals[renamed]} and {name} are the same one twice.")
        originals[renamed] = name
    return originals


_Wanted = tuple[str, tuple[str, ...], Rule]
"""One parameter: its path, its tensors' names, its rule."""


def _expand(config: DecoderConfig, rules: tuple[Rule, ...], there: Container[str]) -> Iterator[_Wanted]:
    for rule in rules:
        if not rule.when(config):
            continue
        layers: Iterable[int] = range(config.num_layers) if "{layer}" in rule.parameter else (0,)
        for layer in layers if rule.layers is None else rule.layers(config):
            possible = (each for each in _alternatives(rule) if _names(config, each, layer)[0] in there)
            chosen = next(possible, rule)
            yield rule.parameter.format(layer=layer), _names(config, chosen, layer), chosen


def _alternatives(rule: Rule | None) -> Iterator[Rule]:
    while rule is not None:
        yield rule
        rule = rule.otherwise


def _names(config: DecoderConfig, rule: Rule, layer: int) -> tuple[str, ...]:
    tensors = rule.tensors(config) if callable(rule.tensors) else rule.tensors
    return tuple(name.format(layer=layer) for name in tensors)


def _check(
    config: DecoderConfig, wanted: list[_Wanted], ignored: tuple[str, ...], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    expected: dict[str, tuple[int, ...]] = {}
    for _, names, rule in wanted:
        expected.update(zip(names, rule.shapes(config), strict=True))
    missing = [name for name in expected if name not in shapes]
    harmless = re.compile("|".join(f"(?:{pattern})" for pattern in ignored) or r"(?!)")
    unexpected = [name for name in shapes if name not in expected and not harmless.fullmatch(name)]
    misshapen = [
        f"{name} is {list(shapes[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and tuple(shapes[name]) != shape
    ]
    problems = [
        f"{title}: {_enumerate(names)}"
        for title, names in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
        if names
    ]
    if problems:
        raise ModelError(f"The checkpoint's tensors do not fit its config ({'; '.join(problems)}).")


def _check_copy(
    name: str, original: str, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], np.ndarray]
) -> None:
    # Older readers drop such a tensor, newer ones use it when it differs; no choice would be right for both.
    if tuple(shapes[name]) != tuple(shapes[original]) or not np.array_equal(read(name), read(original)):
        raise ModelError(
            f"The config says that {name} is {original} (tie_word_embeddings), but the checkpoint has both and they "
            "differ; set tie_word_embeddings to false in config.json, or remove the tensor."
        )


def _enumerate(names: list[str], most: int = 8) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _insert(tree: dict[str, Any], path: str, leaf: jax.Array) -> None:
    *parents, last = path.split("/")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = leaf


def _numpy_dtype(name: str) -> np.dtype:
    return np.dtype(jax.numpy.dtype(name))

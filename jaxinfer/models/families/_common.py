"""A family as data, and how config.json is read: every key is used, known to mean nothing here, or refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.models.config import DecoderConfig, RopeConfig
from jaxinfer.models.tensors import ModelError, Rule

Values = tuple[Any, ...]


class Config(Mapping[str, Any]):
    """A config.json that remembers which of its keys were asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def unasked(self) -> Iterator[tuple[str, Any]]:
        """The keys that nobody asked for, with their values."""
        return ((key, value) for key, value in self._values.items() if key not in self.asked)


@dataclass(frozen=True)
class Family:
    """One family of models.

    model_type: its name in config.json. architectures: the classes that config.json may name.
    read: config.json -> DecoderConfig; the keys it asks for are those the family knows.
    rules, ignored, copies, prefixes: see `assemble_params`.
    neutral: further keys that change the computation, each with the values that do not.
    harmless: further keys that never change it, as the family's class in transformers has it.
    """

    model_type: str
    architectures: tuple[str, ...]
    read: Callable[[Config], DecoderConfig]
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)
    copies: tuple[tuple[str, str], ...] = (("lm_head.weight", "model.embed_tokens.weight"),)
    prefixes: tuple[tuple[str, str], ...] = ()
    neutral: Mapping[str, Values] = field(default_factory=dict)
    harmless: tuple[str, ...] = ()

    def decoder(self, config: Mapping[str, Any]) -> DecoderConfig:
        """The decoder that a config.json describes; raises ModelError when it describes none that can be built."""
        keys = Config(config)
        try:
            decoder = self.read(keys)
        except ModelError:
            raise
        except (TypeError, ValueError) as error:
            raise ModelError(f"The model's config is not valid: {error}") from error
        refuse_unknown(keys, self.neutral, self.harmless)
        return decoder


# --- keys that nobody reads ----------------------------------------------------------------------------------------

_NEUTRAL: Mapping[str, Values] = {
    "partial_rotary_factor": (None, 1),
    "logit_scale": (None, 1),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "num_local_experts": (None, 0),
    "num_experts": (None, 0),
}
_HARMLESS = re.compile(
    # What a file is and who made it.
    r"_.*|architectures|model_type|auto_map|name_or_path|.*version|unsloth.*|transformers\.js_config|torch_?dtype|dtype"
    r"|is_llama_config|tokenizer_class|finetuning_task|task_specific_params|problem_type|prefix|.*_?label.*"
    # Training.
    r"|.*drop.*|.*pdrop|initializer_.*|init_.*|.*gradient_checkpointing|router_aux_loss_coef|output_router_logits"
    # How somebody else computes the same.
    r"|use_cache|cache_implementation|.*attn_implementation|chunk_size_feed_forward|pretraining_tp|output_.*"
    r"|return_dict.*|torchscript|is_decoder"
    # Generation, which generation_config.json and the tokenizer say.
    r"|.*_token_ids?|max_length|min_length|do_sample|early_stopping|num_beams|num_beam_groups|temperature|top_k|top_p"
    r"|typical_p|.*_penalty|.*no_repeat_ngram_size|num_return_sequences|.*suppress_tokens|bad_words_ids"
    r"|remove_invalid_values"
    # Asked for where it matters.
    r"|original_max_position_embeddings"
)
_OFF: Values = (None, False, "", [], {})
"""Values of an unknown key that switch nothing on."""


def refuse_unknown(config: Config, neutral: Mapping[str, Values] | None = None, harmless: tuple[str, ...] = ()) -> None:
    """Raise ModelError when a key that was not asked for may change the computation."""
    known = {**_NEUTRAL, **(neutral or {})}
    for key, value in config.unasked():
        if key in known:
            if value not in known[key]:
                raise ModelError(f"The model's config sets {key} to {_brief(value)}, which is not supported.")
        elif key not in harmless and not _HARMLESS.fullmatch(key) and value not in _OFF:
            raise ModelError(
                f"The model's config sets {key} to {_brief(value)}, which is not supported for this architecture; "
                "remove it from config.json if the model computes the same without it."
            )


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# --- keys that are read ----------------------------------------------------------------------------------------------


def positive_int(config: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    """A count of at least `least`; an absent or null key means the default, or is an error without one."""
    value = _value(config, key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ModelError(f"The model's config has {key} {_brief(value)}, which must be {kind}.")
    return value


def positive_float(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A positive finite number; an absent or null key means the default, or is an error without one."""
    value = _value(config, key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ModelError(f"The model's config has {key} {_brief(value)}, which must be a positive number.")
    return float(value)


def optional_float(config: Mapping[str, Any], key: str, default: float | None) -> float | None:
    """A positive finite number, or None for an explicit null; an absent key means the default."""
    return None if config.get(key, default) is None else positive_float(config, key, default)


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """True or False; an absent or null key means the default."""
    value = _value(config, key, default)
    if not isinstance(value, bool):
        raise ModelError(f"The model's config has {key} {_brief(value)}, which must be true or false.")
    return value


def _value(config: Mapping[str, Any], key: str, default: Any) -> Any:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"The model's config has no {key}, which is needed to build it.")
    return value


_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


def activation(config: Mapping[str, Any], key: str, default: str) -> str:
    """The DecoderConfig's name of an activation function."""
    name = _value(config, key, default)
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ModelError(f"The model's {key} {_brief(name)} is not supported; {', '.join(_ACTIVATIONS)} are.")
    return _ACTIVATIONS[name]


def layer_kinds(config: Mapping[str, Any], layers: int, default: tuple[str, ...]) -> tuple[str, ...]:
    """`layer_types`: full_attention or sliding_attention for every layer."""
    kinds = config.get("layer_types")
    if kinds is None:
        return default
    if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise ModelError("The model's layer_types must name full_attention or sliding_attention for every layer.")
    return tuple(kinds)


def refuse_other_kinds(config: Mapping[str, Any], kind: str) -> None:
    """Raise ModelError when `layer_types` names another kind than the only one that the family has."""
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or set(kinds) - {kind}):
        raise ModelError(f"The model's config names layer_types other than {kind}, which is not supported.")


Ropes = Callable[[Config, int, int], "tuple[RopeConfig | None, ...]"]
"""(config, head_dim, layers) -> the rotary embedding of each layer."""
Windows = Callable[[Config, int], "tuple[int | None, ...]"]
"""(config, layers) -> the window of each layer."""


def attention_biases(config: Config, default: bool = False) -> dict[str, Any]:
    """The fields of DecoderConfig for `attention_bias`, which is of q, k, v and the output projection."""
    bias = flag(config, "attention_bias", default)
    return {"qkv_bias": bias, "output_bias": bias}


def same_window(config: Config, layers: int, window: int | None) -> tuple[int | None, ...]:
    """The same window in every layer, or None for full attention everywhere."""
    refuse_other_kinds(config, "full_attention" if window is None else "sliding_attention")
    return (window,) * layers


def no_windows(config: Config, layers: int) -> tuple[int | None, ...]:
    """Full attention everywhere."""
    return same_window(config, layers, None)


def llama_like(
    config: Config,
    *,
    ropes: Ropes,
    windows: Windows = no_windows,
    max_positions: int = 2048,
    norm_eps: float = 1e-6,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    tied_head: bool = False,
    activation_key: str = "hidden_act",
    default_activation: str = "silu",
    **architecture: Any,
) -> DecoderConfig:
    """A decoder by the key names that most families share.

    The named arguments are what absent keys mean: the defaults of the family's class in transformers. architecture:
    further fields of DecoderConfig.
    """
    hidden, heads = positive_int(config, "hidden_size"), positive_int(config, "num_attention_heads")
    layers = positive_int(config, "num_hidden_layers")
    width = positive_int(config, "head_dim", head_dim or max(1, hidden // heads))
    longest = positive_int(config, "max_position_embeddings", max_positions)
    by_layer = ropes(config, width, layers)
    stretch = max((rope.factor for rope in by_layer if rope is not None and rope.scaling == "dynamic"), default=1.0)
    decoder = DecoderConfig(
        vocab_size=positive_int(config, "vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=positive_int(config, "num_key_value_heads", kv_heads or heads),
        head_dim=width,
        intermediate_size=positive_int(config, "intermediate_size"),
        # Dynamic scaling is for sequences beyond the context that is stated.
        max_positions=int(longest * stretch),
        norm_eps=positive_float(config, "rms_norm_eps", norm_eps),
        ropes=by_layer,
        windows=windows(config, layers),
        tied_head=flag(config, "tie_word_embeddings", tied_head),
        activation=activation(config, activation_key, default_activation),
        **architecture,
    )
    return decoder.for_context(decoder.max_positions)

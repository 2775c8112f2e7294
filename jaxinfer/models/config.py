"""What a decoder is made of: every architectural choice as a value, no family names."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from jaxinfer.models.layer_config import MLAConfig, MoEConfig
from pallas_kernels.quantized_matmul import WeightFormat

COMPUTE_DTYPES = ("float32", "bfloat16")
KV_DTYPES = ("auto", "float32", "bfloat16", "int8", "float8_e4m3fn")
ROPE_SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
NORMS = ("rms", "rms_float32", "rms_offset", "layer")
NORM_PLACEMENTS = ("before", "after", "around", "after_sum")
QK_NORMS = ("none", "head", "projection")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer.

    theta: base of the frequencies.
    rotary_dim: features rotated, an even number; the others of a head pass unchanged.
    interleaved: feature 2i is rotated with 2i + 1; otherwise feature i with i + rotary_dim / 2.
    scaling: one of ROPE_SCALINGS, see `rope.inverse_frequencies`.
    factor: positions (linear), low frequencies (llama3, yarn) or the base's context (dynamic) are stretched by it.
    original_max_positions: context before the stretching (dynamic, llama3, yarn, longrope).
    low_freq_factor, high_freq_factor: the wavelength borders of llama3.
    beta_fast, beta_slow, truncate: the rotation borders of yarn, and whether they are rounded to whole features.
    short_factors, long_factors: longrope's divisor of each frequency, for sequences within the original context and
        for longer ones; rotary_dim / 2 of each.
    longest: positions of the longest sequence that will be computed. dynamic and longrope take their frequencies by
        it, once for all sequences: cached keys cannot be rotated anew when a sequence outgrows the original context.
    attention_factor: multiplies cosines and sines.
    """

    theta: float
    rotary_dim: int
    interleaved: bool = False
    scaling: str = "default"
    factor: float = 1.0
    original_max_positions: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    longest: int = 1
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.scaling not in ROPE_SCALINGS:
            raise ValueError(f"RoPE scaling {self.scaling!r} is not supported; {', '.join(ROPE_SCALINGS)} are.")
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"RoPE rotates pairs of features, so rotary_dim must be even, not {self.rotary_dim}.")
        if self.theta <= 0 or self.factor <= 0 or self.attention_factor <= 0:
            raise ValueError("RoPE needs a positive theta, factor and attention_factor.")
        if self.scaling == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("llama3 RoPE scaling needs high_freq_factor above low_freq_factor.")
        if self.scaling == "yarn" and (not 0 < self.beta_slow < self.beta_fast or self.theta == 1):
            raise ValueError("yarn RoPE scaling needs beta_fast above beta_slow above 0, and a theta other than 1.")
        if self.scaling == "dynamic" and self.rotary_dim == 2:
            raise ValueError("dynamic RoPE scaling needs more than one pair of features.")
        if self.scaling == "longrope":
            self._check_factors("short", self.short_factors)
            self._check_factors("long", self.long_factors)

    def _check_factors(self, name: str, factors: tuple[float, ...]) -> None:
        pairs = self.rotary_dim // 2
        if len(factors) != pairs or not all(0 < factor < math.inf for factor in factors):
            raise ValueError(f"longrope RoPE scaling needs {pairs} positive {name} factors, not {len(factors)}.")

    def for_length(self, longest: int) -> RopeConfig:
        """The same embedding for sequences of at most `longest` positions."""
        return dataclasses.replace(self, longest=longest) if self.scaling in ("dynamic", "longrope") else self


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer: blocks of attention and MLP around a residual stream.

    vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim, intermediate_size: the sizes.
    max_positions: context length that the model was made for.
    norm_eps: epsilon of every norm.
    ropes: per layer, its rotary position embedding, or None for none.
    windows: per layer, the sliding window in positions (itself included), or None for full attention.
    tied_head: the LM head is the token embedding.
    qkv_bias, output_bias, mlp_bias: whether these projections add a bias.
    norm: kind of every norm. "rms": RMSNorm whose scale multiplies in `dtype`; "rms_float32": in float32; "rms_offset":
        in float32 by 1 + the parameter; "layer": LayerNorm with scale and bias.
    norm_placement: of attention and MLP alike. "before": x + f(norm(x)); "after": x + norm(f(x)); "around": x +
        norm(f(norm(x))); "after_sum": norm(x + f(x)), and then no norm at the end of the decoder.
    qk_norm: RMSNorm of queries and keys before RoPE: "none", over each "head", or over the whole "projection".
    activation: of the MLP, one of ACTIVATIONS; "gelu" is exact, "gelu_tanh" its usual approximation.
    gated_mlp: down(activation(gate(x)) * up(x)) instead of down(activation(up(x))).
    embedding_scale: multiplies token embeddings, rounded to dtype first.
    embedding_size: features of token embeddings and of the head's rows, which projections without bias connect with the
        residual stream; None for hidden_size, and no such projections.
    position_offset: learned position embeddings are added, that of position p from row p + position_offset; None for
        no such table.
    attention_scale: multiplies every score; None for head_dim ** -0.5.
    attention_sinks: every query head has a learned logit that only adds to its softmax's denominator.
    moe: the layers with experts; None for none.
    mla: latent attention in every layer, and then num_kv_heads is 1 and head_dim the width of what is cached; None for
        grouped-query attention.
    attention_softcap, logit_softcap: scores and logits become softcap * tanh(value / softcap); None for no cap.
    dtype: parameters and activations, "float32" or "bfloat16"; norms, softmax and logits are float32.
    kv_dtype: KV pages, one of KV_DTYPES; "auto" is dtype. int8 and float8_e4m3fn carry a float32 scale for each key and
        each value of a head.
    weights: parameters kept quantized, as (pattern of the path, in the manner of fnmatch, format); the first that
        matches counts.
    attention: lowering of the attention kernels, "auto" or a name of `pallas_kernels.dispatch.LOWERINGS`.

    Raises ValueError when the values contradict each other.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    norm_eps: float
    ropes: tuple[RopeConfig | None, ...]
    windows: tuple[int | None, ...]
    tied_head: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norm: str = "rms"
    norm_placement: str = "before"
    qk_norm: str = "none"
    activation: str = "silu"
    gated_mlp: bool = True
    embedding_scale: float = 1.0
    embedding_size: int | None = None
    position_offset: int | None = None
    attention_scale: float | None = None
    attention_sinks: bool = False
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    dtype: str = "float32"
    kv_dtype: str = "auto"
    weights: tuple[tuple[str, WeightFormat], ...] = ()
    attention: str = "auto"

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "intermediate_size", "max_positions"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, not {value!r}.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly.")
        self._check_layers()
        if self.embedding_size is not None and self.embedding_size < 1:
            raise ValueError(f"embedding_size must be a positive integer or None, not {self.embedding_size}.")
        self._check_parts()
        for name in ("attention_scale", "attention_softcap", "logit_softcap", "embedding_scale"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number, not {value!r}.")
        choices = {"dtype": COMPUTE_DTYPES, "kv_dtype": KV_DTYPES, "activation": ACTIVATIONS, "norm": NORMS}
        choices |= {"norm_placement": NORM_PLACEMENTS, "qk_norm": QK_NORMS}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}.")

    def _check_layers(self) -> None:
        for name in ("windows", "ropes"):
            count = len(getattr(self, name))
            if count != self.num_layers:
                raise ValueError(f"{name} names {count} layers, but the model has {self.num_layers}.")
        for window in self.windows:
            if window is not None and (not isinstance(window, int) or window < 1):
                raise ValueError(f"A sliding window must be a whole number of positions, at least 1, not {window!r}.")
        for rope in self.ropes:
            if rope is not None and rope.rotary_dim > self.head_dim:
                raise ValueError(f"RoPE rotates {rope.rotary_dim} features, but a head has {self.head_dim}.")

    def _check_parts(self) -> None:
        if self.moe is not None and len(self.moe.layers) != self.num_layers:
            raise ValueError(f"moe names {len(self.moe.layers)} layers, but the model has {self.num_layers}.")
        if self.mla is None:
            return
        if (self.num_kv_heads, self.head_dim) != (1, self.mla.row_dim):
            raise ValueError(f"Latent attention has one key/value head of {self.mla.row_dim} features.")
        if any(rope is None or rope.rotary_dim != self.mla.rope_dim for rope in self.ropes):
            raise ValueError(f"Latent attention rotates {self.mla.rope_dim} features in every layer.")

    @property
    def table_width(self) -> int:
        """Features of a token's embedding and of its row in the head."""
        return self.hidden_size if self.embedding_size is None else self.embedding_size

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def page_dtype(self) -> str:
        """Type of the KV pages."""
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def value_dim(self) -> int:
        """Features of a value: head_dim, or with latent attention the first of them that are the latent."""
        return self.head_dim if self.mla is None else self.mla.latent_dim

    @property
    def row_dim(self) -> int:
        """Features of one key/value head's row in a page: key and value, or with latent attention the key alone."""
        return 2 * self.head_dim if self.mla is None else self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values, scales included, that one position takes over all layers."""
        row = {"float32": 4 * self.row_dim, "bfloat16": 2 * self.row_dim}.get(self.page_dtype, self.row_dim + 8)
        return self.num_layers * self.num_kv_heads * row

    def has_experts(self, layer: int) -> bool:
        """Whether the layer has experts instead of the MLP."""
        return self.moe is not None and self.moe.layers[layer]

    def replace(self, **changes: object) -> DecoderConfig:
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]

    def for_context(self, longest: int) -> DecoderConfig:
        """The decoder for sequences of at most `longest` positions (see RopeConfig.longest)."""
        return self.replace(ropes=tuple(None if rope is None else rope.for_length(longest) for rope in self.ropes))

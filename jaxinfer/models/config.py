"""What a decoder is made of: every architectural choice as a value, no family names."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

COMPUTE_DTYPES = ("float32", "bfloat16")
KV_DTYPES = ("auto", "float32", "bfloat16", "int8", "float8_e4m3fn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, rotating feature i with feature i + rotary_dim / 2.

    theta: base of the frequencies.
    rotary_dim: features rotated, an even number.
    scaling: "default", "linear" or "llama3".
    factor: positions (linear) or low frequencies (llama3) are divided by it.
    low_freq_factor, high_freq_factor, original_max_positions: the wavelength borders of llama3 scaling.
    """

    theta: float
    rotary_dim: int
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self) -> None:
        if self.scaling not in ("default", "linear", "llama3"):
            raise ValueError(f"RoPE scaling {self.scaling!r} is not supported; default, linear and llama3 are.")
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"RoPE rotates pairs of features, so rotary_dim must be even, not {self.rotary_dim}.")
        if self.theta <= 0 or self.factor <= 0:
            raise ValueError(f"RoPE needs a positive theta and factor, not {self.theta} and {self.factor}.")
        if self.scaling == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("llama3 RoPE scaling needs high_freq_factor above low_freq_factor.")


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer: pre-norm blocks of grouped-query attention and a gated MLP.

    vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim, intermediate_size: the sizes.
    max_positions: context length that the model was made for.
    norm_eps: epsilon of every RMSNorm.
    rope: rotary position embedding.
    windows: per layer, the sliding window in positions (itself included), or None for full attention.
    tied_head: the LM head is the token embedding.
    qkv_bias, output_bias, mlp_bias: whether these projections add a bias.
    qk_norm: RMSNorm of each query and key head before RoPE.
    activation: gate activation of the MLP, "silu" or "gelu_tanh".
    dtype: parameters and activations, "float32" or "bfloat16"; norms, softmax and logits are float32.
    kv_dtype: KV pages, one of KV_DTYPES; "auto" is dtype. int8 and float8_e4m3fn carry a float32 scale for each key and
        each value of a head.
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
    rope: RopeConfig
    windows: tuple[int | None, ...]
    tied_head: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: str = "silu"
    dtype: str = "float32"
    kv_dtype: str = "auto"
    attention: str = "auto"

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "intermediate_size", "max_positions"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, not {value!r}.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly.")
        if len(self.windows) != self.num_layers:
            raise ValueError(f"windows names {len(self.windows)} layers, but the model has {self.num_layers}.")
        for window in self.windows:
            if window is not None and (not isinstance(window, int) or window < 1):
                raise ValueError(f"A sliding window must be a whole number of positions, at least 1, not {window!r}.")
        if self.rope.rotary_dim > self.head_dim:
            raise ValueError(f"RoPE rotates {self.rope.rotary_dim} features, but a head has {self.head_dim}.")
        if self.dtype not in COMPUTE_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(COMPUTE_DTYPES)}, not {self.dtype!r}.")
        if self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype must be one of {', '.join(KV_DTYPES)}, not {self.kv_dtype!r}.")
        if self.activation not in ("silu", "gelu_tanh"):
            raise ValueError(f"activation must be silu or gelu_tanh, not {self.activation!r}.")

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def page_dtype(self) -> str:
        """Type of the KV pages."""
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values, scales included, that one position takes over all layers."""
        row = {"float32": 4 * self.head_dim, "bfloat16": 2 * self.head_dim}.get(self.page_dtype, self.head_dim + 4)
        return self.num_layers * 2 * self.num_kv_heads * row

    def replace(self, **changes: object) -> DecoderConfig:
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]

"""What layers with experts and layers with latent attention are made of."""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_EXPERTS = 1 << 14
"""Far more than any model has; a file that claims more is refused before its tensors are listed."""
ROUTER_SCORES = ("softmax", "topk_softmax", "sigmoid")


@dataclass(frozen=True)
class MoEConfig:
    """Feed-forward layers of which every position uses a few experts (Shazeer et al., 2017).

    num_experts, experts_per_token: how many there are, and how many a position uses.
    intermediate_size: inner width of one expert.
    layers: per layer of the model, whether it has experts; the others have the model's MLP.
    scores: how logits of the router become weights. "softmax": over all experts, then the best are chosen;
        "topk_softmax": the best are chosen, softmax over those; "sigmoid": of each expert alone.
    normalized: the weights of the chosen are divided by their sum.
    weight_scale: multiplies the weights at the end.
    router_bias: the router's logits have a bias.
    choice_bias: scores get a bias for the choice, not for the weights (Wang et al., 2024).
    groups, groups_per_token: experts lie in so many equal groups, and those of so few groups may be chosen: the groups
        with the best score, with sigmoid scores those with the best sum of their two best (DeepSeek-V3).
    shared_intermediate_size: inner width of an MLP that every position uses besides; 0 for none.
    shared_gate: that MLP's output is multiplied by the sigmoid of a projection of its input (Qwen2-MoE).
    expert_bias: the projections of the experts have biases.
    swiglu_limit, swiglu_alpha: an expert's inner activation is gate * sigmoid(alpha * gate) * (up + 1) with gate cut
        above limit and up beyond -limit .. limit (gpt-oss); a limit of None means the model's activation of the gate,
        times up.

    Raises ValueError when the values contradict each other.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    layers: tuple[bool, ...]
    scores: str = "softmax"
    normalized: bool = False
    weight_scale: float = 1.0
    router_bias: bool = False
    choice_bias: bool = False
    groups: int = 1
    groups_per_token: int = 1
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    expert_bias: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702

    def __post_init__(self) -> None:
        if self.intermediate_size < 1:
            raise ValueError(f"An expert's inner width must be at least 1, not {self.intermediate_size}.")
        if self.num_experts > MOST_EXPERTS:
            raise ValueError(f"A layer has at most {MOST_EXPERTS} experts, not {self.num_experts}.")
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(f"A position cannot use {self.experts_per_token} of {self.num_experts} experts.")
        if self.scores not in ROUTER_SCORES:
            raise ValueError(f"Router scores must be one of {', '.join(ROUTER_SCORES)}, not {self.scores!r}.")
        if self.groups < 1 or self.num_experts % self.groups or not 1 <= self.groups_per_token <= self.groups:
            raise ValueError(
                f"{self.num_experts} experts cannot lie in {self.groups} groups of which {self.groups_per_token} serve."
            )
        size = self.num_experts // self.groups
        if self.groups_per_token * size < self.experts_per_token or (self.ranks_groups and self.best_of_group > size):
            raise ValueError(f"Groups of {size} experts are too small to choose {self.experts_per_token} from them.")
        for name, value in (("weight_scale", self.weight_scale), ("swiglu_limit", self.swiglu_limit)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number, not {value!r}.")

    @property
    def ranks_groups(self) -> bool:
        """Whether the choice is limited to some groups."""
        return self.groups_per_token < self.groups

    @property
    def best_of_group(self) -> int:
        """How many of its best scores rank a group."""
        return 2 if self.scores == "sigmoid" else 1


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, 2024): a position's keys and values of all heads are one latent.

    latent_dim: features of the latent; it is cached, and the value of a position.
    rope_dim: rotated features of every query head and of the one key that all heads share; cached after the latent.
    plain_dim: features of a query head that are not rotated. value_dim: features of a head's output.
    query_rank: features of the queries' own latent; None for queries straight from the hidden state.
    norm_eps: epsilon of the latents' norms.
    """

    latent_dim: int
    rope_dim: int
    plain_dim: int
    value_dim: int
    query_rank: int | None = None
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("latent_dim", "rope_dim", "plain_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.query_rank is not None and self.query_rank < 1:
            raise ValueError(f"query_rank must be at least 1 or None, not {self.query_rank}.")

    @property
    def row_dim(self) -> int:
        """Features that are cached for each position: the key, which begins with the value."""
        return self.latent_dim + self.rope_dim

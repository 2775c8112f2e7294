"""The limits and policies of scheduling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of scheduling.

    Attributes:
        max_slots: most sequences on the device at once.
        page_size: positions in a page.
        num_pages: pages in the pool, the padding page included.
        max_context: most tokens of a sequence, prompt and output together.
        max_batched_tokens: most positions computed in one round; at least max_slots, so that prefill always advances.
        mode: "continuous" admits a sequence whenever there is room; "static" admits the next wave only when the
            previous one has wholly finished.
        max_prefill_rows: most sequences prefilled in one round; None for as many as there are slots.
        policy: who goes first, at admission and for pages: "fcfs" in order of arrival, "priority" by Request.priority,
            the lowest first, then in order of arrival.
        enable_prefix_caching: find the leading full pages of a prompt in the cache instead of computing them.
        enable_chunked_prefill: cut prompts to fit a round's budget beside the decodes. Otherwise a prompt is computed
            whole, in a round without decodes.
        reserve_full: admit a sequence only when the pages for all it can come to need are free, and keep them for it,
            so that nothing is ever preempted. Otherwise what is free now decides.
        max_rounds_in_flight: rounds that may be scheduled before the first of them is committed.
        window: positions that any layer of the model sees, if every layer sees only so many; None keeps all pages.
        host_pages: evicted pages that host memory keeps.
    """

    max_slots: int
    page_size: int
    num_pages: int
    max_context: int
    max_batched_tokens: int
    mode: Literal["continuous", "static"] = "continuous"
    max_prefill_rows: int | None = None
    policy: Literal["fcfs", "priority"] = "fcfs"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    reserve_full: bool = False
    max_rounds_in_flight: int = 1
    window: int | None = None
    host_pages: int = 0

    def __post_init__(self) -> None:
        least_values = {"max_slots": 1, "page_size": 1, "num_pages": 2, "max_context": 2, "max_rounds_in_flight": 1}
        for name, least in least_values.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}.")
        if self.max_batched_tokens < self.max_slots:
            raise ValueError(
                f"max_batched_tokens must be at least max_slots ({self.max_slots}), not {self.max_batched_tokens}."
            )
        if self.mode not in ("continuous", "static"):
            raise ValueError(f"mode must be 'continuous' or 'static', not {self.mode!r}.")
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"policy must be 'fcfs' or 'priority', not {self.policy!r}.")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1, not {self.window}.")
        if self.host_pages < 0:
            raise ValueError(f"host_pages must be at least 0, not {self.host_pages}.")
        if self.max_prefill_rows is not None and self.max_prefill_rows < 1:
            raise ValueError(f"max_prefill_rows must be at least 1, not {self.max_prefill_rows}.")

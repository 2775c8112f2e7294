"""Whether a request can be served at all, and how far."""

from __future__ import annotations

from jaxinfer.core.page_cache import PageCache
from jaxinfer.core.request import Request, RequestRefused
from jaxinfer.core.scheduler_config import SchedulerConfig


def token_limit(request: Request, config: SchedulerConfig, cache: PageCache) -> int:
    """How many tokens the request may sample, as asked and as fits; RequestRefused if it can never fit."""
    prompt, context = len(request.prompt_ids), config.max_context
    if prompt >= context:
        raise RequestRefused(
            f"The prompt has {prompt} tokens, but the context holds {context} including at least one new token;"
            " shorten the prompt."
        )
    if not config.enable_chunked_prefill and prompt > config.max_batched_tokens:
        raise RequestRefused(
            f"The prompt has {prompt} tokens, but without chunked prefill a round computes at most"
            f" {config.max_batched_tokens}; shorten the prompt, raise max_batched_tokens or enable chunked"
            " prefill."
        )
    asked = request.params.max_tokens
    positions = cache.pool.usable_pages * cache.pool.page_size
    if cache.least_pages(context) <= cache.pool.usable_pages:
        positions = context  # however long it gets, a window of it fits
    limit = min(context - prompt, positions + 1 - prompt if asked is None else asked)
    needed = prompt + max(limit, 1) - 1
    if needed > positions:
        raise RequestRefused(
            f"The request needs {needed} cache positions ({prompt} prompt tokens and up to {max(limit, 1)} new"
            f" ones), but the whole cache has {positions}; lower max_tokens, shorten the prompt or enlarge the"
            " cache."
        )
    return limit

"""From a model's name or path to a running engine."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass, fields
from typing import Any, Literal

import jax

from checkpoints import Tokenizer, open_checkpoint
from jaxinfer.core.observer import Observer, unobserved
from jaxinfer.core.pool import ROOM_FOR_CACHE
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.engine import Runner as EngineRunner
from jaxinfer.engine.prompts import Tokenizer as EngineTokenizer
from jaxinfer.models import DecoderConfig
from jaxinfer.models.config import COMPUTE_DTYPES, KV_DTYPES
from jaxinfer.runtime.compilation_cache import enable_compilation_cache
from jaxinfer.runtime.limits import RunnerLimits
from jaxinfer.runtime.loading import check_tokenizer, decoder_config, load_params
from jaxinfer.runtime.programs import Progress
from jaxinfer.runtime.quantizing import WEIGHT_DTYPES
from jaxinfer.runtime.runner import Runner
from jaxinfer.runtime.steps import Params
from pallas_kernels.dispatch import AUTO, LOWERINGS

GIB = 1024**3
CPU_CACHE_GIB = 1.0
"""Pool size on a CPU, where the memory is shared with everything else."""
MOST_SLOTS = 2**16
"""Every slot has counts of the whole vocabulary on the device."""
_CHOICES = {
    "dtype": ("auto", *COMPUTE_DTYPES),
    "weight_dtype": WEIGHT_DTYPES,
    "kv_dtype": KV_DTYPES,
    "attention": (AUTO, *LOWERINGS),
    "mode": ("continuous", "static"),
    "policy": ("fcfs", "priority"),
}


@dataclass(frozen=True)
class EngineOptions:
    """How to serve a model.

    max_slots: sequences that run at once.
    max_context: positions of one sequence, prompt and output together; None for the model's own limit.
    page_size: positions of a page; None for 16 on CPU and 64 elsewhere.
    num_pages: pages of the KV pool; None to size it by kv_cache_gib.
    kv_cache_gib: size of the KV pool in GiB; None for 1 on CPU, elsewhere 90% of the free device memory, but then at
        most 4 times what max_slots sequences of max_context can use: what is over keeps prefixes in the cache.
    host_cache_gib: host memory in GiB for pages that the pool evicts, from where they come back instead of being
        computed again; 0 for none.
    max_batched_tokens: tokens computed in one round, those of decodes included.
    max_prefill_rows: prompts computed at once.
    dtype: "float32", "bfloat16" or "auto" (float32 on CPU, bfloat16 elsewhere).
    weight_dtype: "auto" is "float" on CPU, else "stored". "stored": quantized GGUF weights stay so; "float": all in
        dtype; "int8" or "int4": rounded when they are loaded (see `jaxinfer.models.linear.quantized_weights`).
    kv_dtype: of the KV pages: "float32", "bfloat16", "int8", "float8_e4m3fn" or "auto" (float32 on CPU, else dtype).
    attention: lowering of the attention kernels, "auto" or a name of `pallas_kernels.dispatch.LOWERINGS`.
    mode: "continuous" batching, or "static" waves, to compare with.
    policy: "fcfs", first come, first served, or "priority", the lowest priority number first.
    enable_prefix_caching: keep the pages of prompts and answers, and do not compute a prompt's known beginning again.
    enable_chunked_prefill: cut long prompts, so that running sequences go on beside them.
    async_scheduling: hand the device its next round before the last one's tokens are read.
    seed: makes requests without a seed of their own repeatable.

    A value that can never be right raises ValueError, one sentence with the option and the value.
    """

    max_slots: int = 8
    max_context: int | None = None
    page_size: int | None = None
    num_pages: int | None = None
    kv_cache_gib: float | None = None
    host_cache_gib: float = 0.0
    max_batched_tokens: int = 512
    max_prefill_rows: int = 8
    dtype: str = "auto"
    weight_dtype: str = "auto"
    kv_dtype: str = "auto"
    attention: str = "auto"
    mode: Literal["continuous", "static"] = "continuous"
    policy: Literal["fcfs", "priority"] = "fcfs"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    async_scheduling: bool = True
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_slots", "max_batched_tokens", "max_prefill_rows"):
            _check_positive_int(name, getattr(self, name))
        if self.max_slots > MOST_SLOTS:
            raise ValueError(f"max_slots must be at most {MOST_SLOTS}, not {self.max_slots}.")
        for name in ("max_context", "page_size", "num_pages"):
            if getattr(self, name) is not None:
                _check_positive_int(name, getattr(self, name))
        gib = self.kv_cache_gib
        if gib is not None and not (_is_number(gib) and 0 < gib < float("inf")):
            raise ValueError(f"kv_cache_gib must be a number of GiB above 0, not {gib!r}.")
        gib = self.host_cache_gib
        if not (_is_number(gib) and 0 <= gib < float("inf")):
            raise ValueError(f"host_cache_gib must be a number of GiB of at least 0, not {gib!r}.")
        if gib and self.enable_prefix_caching is False:
            raise ValueError("host_cache_gib keeps cached prefixes, so it needs enable_prefix_caching; leave one out.")
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise ValueError(f"seed must be an integer, not {self.seed!r}.")
        for name in ("enable_prefix_caching", "enable_chunked_prefill", "async_scheduling"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}.")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}.")

    @classmethod
    def from_names(cls, **options: Any) -> EngineOptions:
        """Options by name; ValueError, naming the known ones, for an unknown name."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise ValueError(f"There is no engine option {name!r}; the options are {', '.join(known)}.")
        return cls(**options)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_positive_int(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, not {value!r}.")


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint on the device."""

    config: DecoderConfig
    params: Params
    tokenizer: Tokenizer


def build_engine(
    model: str,
    options: EngineOptions | None = None,
    on_progress: Progress | None = None,
    observer: Observer = unobserved,
) -> Engine:
    """Open a checkpoint, load it, allocate the cache and compile every program.

    model: a named model, a .gguf file, a Hugging Face or Orbax directory, or a hub id.
    on_progress: called with (what is going on, steps done, steps in all).
    observer: told of every event; several are given as `jaxinfer.core.observer.Observers`.
    Raises ValueError, one sentence, when the model, the options or the observer cannot be used.
    """
    options = options or EngineOptions()
    if not callable(observer):
        raise ValueError(
            f"An observer must be callable with an event, not {type(observer).__name__}; "
            "give several as jaxinfer.core.observer.Observers(a, b)."
        )
    loaded = load_model(model, options, on_progress)
    limits = limits_for(loaded.config, options)
    try:
        runner = Runner(loaded.config, loaded.params, limits, on_progress)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        pool = limits.num_pages * limits.page_size * loaded.config.kv_bytes_per_token / GIB
        raise ValueError(
            f"The device has no memory left for a KV cache of {pool:.1f} GiB and its programs; make it smaller "
            "(kv_cache_gib)."
        ) from error
    return engine_on(runner, loaded.tokenizer, options, observer, model)


def engine_on(
    runner: EngineRunner,
    tokenizer: EngineTokenizer,
    options: EngineOptions,
    observer: Observer = unobserved,
    model_version: str = "",
) -> Engine:
    """An engine with the policies of the options, on a runner that exists already; its cache is empty."""
    return Engine(
        runner,
        tokenizer,
        mode=options.mode,
        policy=options.policy,
        enable_prefix_caching=options.enable_prefix_caching,
        enable_chunked_prefill=options.enable_chunked_prefill,
        async_scheduling=options.async_scheduling,
        model_version=model_version,
        seed=options.seed,
        observer=observer,
    )


def load_model(model: str, options: EngineOptions, on_progress: Progress | None = None) -> LoadedModel:
    """The part of `build_engine` before the runner: parameters on the device, and the tokenizer."""
    enable_compilation_cache()
    with open_checkpoint(model, progress=on_progress) as checkpoint:
        config = decoder_config(
            checkpoint,
            dtype=options.dtype,
            kv_dtype=options.kv_dtype,
            weight_dtype=options.weight_dtype,
            attention=options.attention,
        )
        limits_for(config, options)  # refuses contradictions before the long part
        tokenizer = checkpoint.tokenizer()
        check_tokenizer(tokenizer.vocab_size, config)
        return LoadedModel(config, load_params(checkpoint, config, on_progress), tokenizer)


def limits_for(config: DecoderConfig, options: EngineOptions) -> RunnerLimits:
    """The sizes to build a runner for, with what the options leave open filled in.

    Raises ValueError when the options contradict the model or each other.
    """
    max_context = config.max_positions if options.max_context is None else options.max_context
    if max_context > config.max_positions:
        raise ValueError(f"max_context is {max_context}, but the model was made for {config.max_positions} positions.")
    page_size = options.page_size or (16 if jax.default_backend() == "cpu" else 64)
    page_bytes = config.kv_bytes_per_token * page_size
    if options.num_pages is not None:
        num_pages = options.num_pages
        _check_pool(num_pages, page_bytes)
    else:
        num_pages = int(_pool_bytes(options)) // page_bytes
        if num_pages < 2:
            raise ValueError(
                f"The KV cache would hold less than one page of {page_size} positions ({page_bytes / 2**20:.1f} MiB); "
                "give it more memory (kv_cache_gib)."
            )
        if options.kv_cache_gib is None:
            pages_per_sequence = -(-max_context // page_size)
            num_pages = min(num_pages, ROOM_FOR_CACHE * options.max_slots * pages_per_sequence + 1)
    return RunnerLimits(
        max_slots=options.max_slots,
        page_size=page_size,
        num_pages=num_pages,
        max_context=max_context,
        max_batched_tokens=max(options.max_batched_tokens, options.max_slots),
        max_prefill_rows=min(options.max_prefill_rows, options.max_slots),
        vocab_size=config.vocab_size,
        window=common_window(config),
        host_pages=_host_pages(options.host_cache_gib, page_bytes, page_size),
    )


def common_window(config: DecoderConfig) -> int | None:
    """The positions that any layer sees, if all see only so many."""
    windows = [window for window in config.windows if window is not None]
    return max(windows) if len(windows) == config.num_layers else None


def _host_pages(gib: float, page_bytes: int, page_size: int) -> int:
    """Pages that so much host memory holds."""
    memory = _machine_memory()
    if gib * GIB > memory:
        raise ValueError(f"host_cache_gib is {gib}, but the machine has {memory / GIB:.1f} GiB of memory.")
    pages = int(gib * GIB) // page_bytes
    if gib and not pages:
        raise ValueError(
            f"host_cache_gib is {gib}, but one page of {page_size} positions takes {page_bytes / GIB:.2g} GiB; give it"
            " more or leave it out."
        )
    return pages


def _check_pool(num_pages: int, page_bytes: int) -> None:
    """Refuse a pool that no memory here can hold, before anything of its size is built."""
    memory = _total_memory()
    if num_pages * page_bytes > memory:
        raise ValueError(
            f"num_pages is {num_pages}, which takes {num_pages * page_bytes / GIB:.1f} GiB, but there are "
            f"{memory / GIB:.1f} GiB of memory."
        )


def _total_memory() -> float:
    """Bytes of the first device, or of the machine when it computes itself; infinite where that cannot be asked."""
    stats = jax.local_devices()[0].memory_stats()
    if jax.default_backend() != "cpu" and stats:
        return stats["bytes_limit"]
    return _machine_memory()


def _machine_memory() -> float:
    """Bytes of the machine; infinite where that cannot be asked."""
    if sys.platform == "win32":
        return math.inf
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _pool_bytes(options: EngineOptions) -> float:
    if options.kv_cache_gib is None:
        return default_kv_bytes()
    memory = _total_memory() / GIB
    if options.kv_cache_gib > memory:
        raise ValueError(f"kv_cache_gib is {options.kv_cache_gib:g}, but there are {memory:.1f} GiB of memory.")
    return options.kv_cache_gib * GIB


def default_kv_bytes() -> float:
    """Most bytes that the KV pool takes when nobody chose its size; depends on what is free on the first device now."""
    stats = jax.local_devices()[0].memory_stats()
    if jax.default_backend() == "cpu" or not stats:
        return CPU_CACHE_GIB * GIB
    return 0.9 * (stats["bytes_limit"] - stats["bytes_in_use"])

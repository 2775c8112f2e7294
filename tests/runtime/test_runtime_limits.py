"""Sizes that contradict each other, and the buckets that hold every batch."""

from __future__ import annotations

import pytest
from engine_tools import WIDE
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine import build
from jaxinfer.engine.build import EngineOptions, limits_for
from jaxinfer.runtime.limits import RunnerLimits, buckets_for


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_slots": 0}, "max_slots must be a positive integer, not 0"),
        ({"max_slots": True}, "max_slots"),
        ({"max_context": 1}, "max_context must be at least 2"),
        ({"page_size": 12}, "page_size must be a multiple of 8"),
        ({"num_pages": 1}, "num_pages must be at least 2"),
        ({"max_batched_tokens": 3}, "max_batched_tokens is 3, but must be at least max_slots"),
        ({"max_prefill_rows": 1.5}, "max_prefill_rows"),
    ],
)
def test_limits_that_contradict_each_other(changes, reason):
    with pytest.raises(ValueError, match=reason) as error:
        RunnerLimits(vocab_size=160, **(WIDE | changes))
    assert str(error.value).endswith(".")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_context": 257}, "max_context is 257, but the model was made for 256 positions"),
        ({"kv_cache_gib": 0.0}, "kv_cache_gib must be a number of GiB above 0, not 0.0"),
        ({"kv_cache_gib": float("nan")}, "kv_cache_gib must be a number of GiB above 0, not nan"),
        ({"kv_cache_gib": 1e-9}, "less than one page"),
        ({"kv_cache_gib": 1e300}, r"kv_cache_gib is 1e\+300, but there are [0-9.]+ GiB of memory"),
        ({"host_cache_gib": -0.5}, "host_cache_gib must be a number of GiB of at least 0, not -0.5"),
        ({"host_cache_gib": 1e9}, "GiB of memory"),
        ({"host_cache_gib": 1e-9}, "host_cache_gib is 1e-09, but one page of"),
        ({"host_cache_gib": 1.0, "enable_prefix_caching": False}, "needs enable_prefix_caching"),
        ({"max_slots": "8"}, "max_slots must be an integer of at least 1, not '8'"),
        ({"max_slots": 10**7}, "max_slots must be at most 65536, not 10000000"),
        ({"max_context": 1.5}, "max_context must be an integer"),
        ({"page_size": 0}, "page_size must be an integer of at least 1"),
        ({"max_batched_tokens": 0}, "max_batched_tokens must be an integer of at least 1"),
        ({"mode": "dynamic"}, "mode must be one of continuous, static, not 'dynamic'"),
        ({"dtype": "float16"}, "dtype must be one of auto, float32, bfloat16"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching must be True or False"),
        ({"seed": 0.5}, "seed must be an integer"),
        ({"page_size": 24 + 1}, "page_size must be a multiple of 8"),
        ({"num_pages": 1}, "num_pages must be at least 2"),
        ({"max_slots": 0}, "max_slots"),
    ],
)
def test_options_that_contradict_the_model(golden_models, options, reason):
    with pytest.raises(ValueError, match=reason) as error:
        limits_for(golden_models["mistral"].config, EngineOptions(**options))
    assert str(error.value).endswith(".")


def test_an_unknown_option_names_the_known_ones():
    with pytest.raises(ValueError, match=r"no engine option 'max_seqs'; the options are max_slots, .*seed\.$"):
        EngineOptions.from_names(max_seqs=3)


def test_the_pool_has_room_for_cached_prefixes(golden_models, monkeypatch):
    config = golden_models["mistral"].config
    sizes = {"max_slots": 2, "max_context": 100, "page_size": 8}
    page_bytes = config.kv_bytes_per_token * 8

    def pages(**options):
        return limits_for(config, EngineOptions(**sizes, **options)).num_pages

    assert limits_for(config, EngineOptions(**sizes)).pages_per_sequence == 13
    assert pages() == 4 * 2 * 13 + 1
    assert pages(kv_cache_gib=1000 * page_bytes / 2**30) == 1000  # a size that was chosen is taken whole
    assert pages(num_pages=30) == 30
    monkeypatch.setattr(build, "CPU_CACHE_GIB", 50 * page_bytes / 2**30)
    assert pages() == 50  # the memory is the bound


def test_host_pages_and_windows(golden_models):
    config = golden_models["mistral"].config
    page_bytes = config.kv_bytes_per_token * 8
    limits = limits_for(config, EngineOptions(page_size=8, num_pages=9, host_cache_gib=(5.5 * page_bytes) / 2**30))
    assert (limits.host_pages, limits.window) == (5, config.windows[0])
    assert limits_for(config, EngineOptions(num_pages=9)).host_pages == 0
    mixed = config.replace(windows=(None, *config.windows[1:]))
    assert limits_for(mixed, EngineOptions(num_pages=9)).window is None
    wider = config.replace(windows=(*config.windows[:-1], 1000))
    assert limits_for(wider, EngineOptions(num_pages=9)).window == 1000


PLATFORMS = st.sampled_from(["cpu", "cuda", "tpu"])


@st.composite
def random_limits(draw: st.DrawFn, most_context: int, most_tokens: int) -> RunnerLimits:
    slots, rows = draw(st.integers(1, 40)), draw(st.integers(1, 12))
    context, tokens = draw(st.integers(2, most_context)), draw(st.integers(1, most_tokens))
    return RunnerLimits(slots, 16, 100, context, max(tokens, slots), rows, 160)


@given(limits=random_limits(3000, 3000), platform=PLATFORMS, data=st.data())
def test_every_batch_has_a_bucket(limits, platform, data):
    slots, context, rows = limits.max_slots, limits.max_context, limits.max_prefill_rows
    buckets = buckets_for(limits, platform)
    assert len(set(buckets.prefill)) == len(buckets.prefill)
    for count in range(1, slots + 1):
        bucket = buckets.decode(count)
        assert count <= bucket <= max(1, 2 * count - 1, count)
    lengths = data.draw(st.lists(st.integers(1, context), min_size=1, max_size=rows))
    total = min(sum(lengths), limits.max_batched_tokens)
    held_tokens, held_rows = buckets.prefill_for(total, min(len(lengths), total))
    assert held_tokens >= total
    assert held_rows >= min(len(lengths), total)


@given(limits=random_limits(300, 600), platform=PLATFORMS, data=st.data())
def test_decodes_run_with_a_prefill_where_there_is_room(limits, platform, data):
    slots, context, rows = limits.max_slots, limits.max_context, limits.max_prefill_rows
    buckets = buckets_for(limits, platform)
    largest = buckets.prefill[-1][0]
    assert largest <= min(limits.max_batched_tokens, rows * context + slots - 1), "more than can come"
    prefilled_rows = data.draw(st.integers(1, min(rows, slots)))
    decodes = data.draw(st.integers(0, slots - prefilled_rows))
    room = min(limits.max_batched_tokens - decodes, prefilled_rows * context)
    if room < prefilled_rows:
        return
    prefilled = data.draw(st.integers(prefilled_rows, room))
    enough = decodes > 0 and (2 * decodes >= slots or platform == "tpu")
    if platform == "cpu" and decodes + prefilled > largest:
        assert not buckets.mixes(decodes, prefilled, prefilled_rows)
        return
    held = buckets.prefill_for(decodes + prefilled, prefilled_rows)[0]
    small = held <= 192 or platform != "cpu"
    assert buckets.mixes(decodes, prefilled, prefilled_rows) == (enough and small)
    assert decodes <= buckets.mixed_in(held) or not (enough and small)


def test_batch_shapes_are_powers_of_two_and_of_the_larger_ones_those_between():
    buckets = buckets_for(RunnerLimits(32, 16, 100, 1024, 512, 8, 160), "cpu")
    assert buckets.decode_rows == (1, 2, 4, 8, 16, 24, 32)
    assert buckets.prefill == tuple((tokens, 8) for tokens in (32, 64, 96, 128, 192, 256, 384, 512))
    assert buckets.prefill_for(100, 1) == buckets.prefill_for(128, 8) == (128, 8)

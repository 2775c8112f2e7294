"""Named cases of `paged_prefill`."""

from __future__ import annotations

from pallas_kernels.cases import AttentionCase as Case

CASES = (
    # Chunks that start a sequence, continue one, hold one token, or nothing.
    Case("ragged", lengths=(7, 0, 40, 33, 17), chunks=(7, 0, 20, 1, 17), padding=3),
    Case("one", lengths=(50,), chunks=(50,)),
    Case("exact_pages", lengths=(16, 32), chunks=(16, 16)),
    Case("mha", lengths=(9, 20), chunks=(9, 5), q_heads=2, kv_heads=2),
    Case("mqa", lengths=(9, 20), chunks=(9, 5), q_heads=8, kv_heads=1),
    Case("bf16", lengths=(40, 31), chunks=(33, 31), q_heads=8, kv_heads=2, head_dim=128, dtype="bfloat16", padding=5),
    Case("bf16_d64", lengths=(20, 31), chunks=(20, 3), dtype="bfloat16"),
    Case("d80", lengths=(20, 31), chunks=(20, 3), head_dim=80),
    Case("d96", lengths=(20, 31), chunks=(20, 3), head_dim=96, dtype="bfloat16"),
    Case("d128", lengths=(20, 31), chunks=(20, 3), head_dim=128),
    Case("d256", lengths=(20, 31), chunks=(20, 3), head_dim=256, dtype="bfloat16"),
    Case("page_32", lengths=(32, 70), chunks=(32, 40), page_size=32),
    Case("page_64", lengths=(10, 65), chunks=(10, 2), page_size=64, dtype="bfloat16"),
    Case("page_128", lengths=(129, 40), chunks=(10, 40), page_size=128),
    Case("page_256", lengths=(257,), chunks=(12,), page_size=256, dtype="bfloat16"),
    Case("window", lengths=(40, 60), chunks=(40, 13), window=8),
    Case("window_1", lengths=(20,), chunks=(11,), window=1),
    Case("softcap", lengths=(20, 31), chunks=(20, 3), softcap=5.0),
    Case("sinks", lengths=(20, 31), chunks=(20, 3), sinks=True),
    Case("scale", lengths=(20, 31), chunks=(20, 3), scale=0.3),
    Case("int8", lengths=(33, 40), chunks=(33, 9), page_size=32, page_dtype="int8", head_dim=128),
    Case("int8_page_16", lengths=(33, 20), chunks=(33, 5), page_dtype="int8"),
    Case("fp8_bf16", lengths=(33, 40), chunks=(33, 9), page_size=64, dtype="bfloat16", page_dtype="float8_e4m3fn"),
    Case("read_only", lengths=(20, 31), chunks=(20, 3), write=False),
    Case("all_empty", lengths=(0, 0), chunks=(0, 0), padding=4),
    Case(
        "everything",
        lengths=(40, 0, 77),
        chunks=(30, 0, 21),
        page_size=32,
        dtype="bfloat16",
        page_dtype="int8",
        window=24,
        softcap=8.0,
        sinks=True,
        scale=0.2,
        padding=2,
    ),
    Case(
        "many",
        lengths=tuple((37 * i) % 61 for i in range(16)),
        chunks=tuple((37 * i) % 61 // 2 for i in range(16)),
        slow=True,
    ),
    Case(
        "long",
        lengths=(700, 300),
        chunks=(400, 300),
        head_dim=128,
        q_heads=8,
        dtype="bfloat16",
        page_size=64,
        slow=True,
    ),
    Case("long_window", lengths=(700, 300), chunks=(400, 300), window=150, page_size=64, slow=True),
)

LLAMA_3_8B = Case(
    "llama_3_8b",
    lengths=(2048, 1024, 512),
    chunks=(1024, 768, 256),
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    page_size=64,
    dtype="bfloat16",
    max_context=2048,
    slow=True,
)
"""The attention of Llama 3 8B in a ragged chunk of 2,048 tokens: for compile checks and benchmarks."""

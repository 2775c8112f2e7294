"""Named cases of `paged_decode`."""

from __future__ import annotations

from pallas_kernels.cases import AttentionCase as Case

CASES = (
    # Lengths around a page's border, an empty row, one token, and a long one.
    Case("ragged", lengths=(1, 0, 16, 17, 33, 100)),
    Case("mha", lengths=(5, 40), q_heads=2, kv_heads=2),
    Case("mqa", lengths=(5, 40), q_heads=8, kv_heads=1),
    Case("wide_group", lengths=(20,), q_heads=12, kv_heads=1),
    Case("bf16", lengths=(1, 31, 64), q_heads=8, kv_heads=2, head_dim=128, dtype="bfloat16"),
    Case("bf16_d64", lengths=(3, 50), dtype="bfloat16"),
    Case("d80", lengths=(3, 50), head_dim=80),
    Case("d96", lengths=(3, 50), head_dim=96, dtype="bfloat16"),
    Case("d128", lengths=(3, 50), head_dim=128),
    Case("d256", lengths=(3, 50), head_dim=256, dtype="bfloat16"),
    Case("page_32", lengths=(32, 70), page_size=32),
    Case("page_64", lengths=(10, 65), page_size=64, dtype="bfloat16"),
    Case("page_128", lengths=(128, 200), page_size=128),
    Case("page_256", lengths=(255, 257), page_size=256, dtype="bfloat16"),
    Case("window", lengths=(3, 8, 9, 60), window=8),
    Case("window_1", lengths=(1, 33), window=1),
    Case("softcap", lengths=(3, 50), softcap=5.0),
    Case("sinks", lengths=(3, 50), sinks=True),
    Case("scale", lengths=(3, 50), scale=0.3),
    Case("int8", lengths=(1, 33, 70), page_size=32, page_dtype="int8", head_dim=128),
    Case("int8_bf16", lengths=(1, 33, 70), page_size=32, dtype="bfloat16", page_dtype="int8"),
    Case("int8_page_16", lengths=(1, 0, 33), page_dtype="int8"),
    Case("fp8", lengths=(1, 33, 70), page_size=32, page_dtype="float8_e4m3fn", head_dim=128),
    Case("fp8_bf16", lengths=(1, 33, 70), page_size=64, dtype="bfloat16", page_dtype="float8_e4m3fn"),
    Case("read_only", lengths=(3, 0, 50), write=False),
    Case("read_only_int8", lengths=(3, 40), page_size=32, write=False, page_dtype="int8"),
    Case("latent", lengths=(1, 0, 16, 17, 70), q_heads=8, kv_heads=1, head_dim=128, latent_values=96),
    Case("latent_bf16", lengths=(3, 50), q_heads=16, kv_heads=1, head_dim=640, latent_values=512, dtype="bfloat16"),
    Case("latent_int8", lengths=(1, 33), kv_heads=1, head_dim=128, latent_values=64, page_size=32, page_dtype="int8"),
    Case("latent_read_only", lengths=(3, 40), kv_heads=1, head_dim=128, latent_values=128, write=False),
    Case("all_empty", lengths=(0, 0)),
    Case("wide_table", lengths=(5, 40), max_context=1024),
    Case(
        "everything",
        lengths=(0, 1, 40, 77),
        page_size=32,
        dtype="bfloat16",
        page_dtype="int8",
        window=24,
        softcap=8.0,
        sinks=True,
        scale=0.2,
    ),
    Case("everything_f32", lengths=(7, 0, 0, 41), head_dim=96, window=20, softcap=8.0, sinks=True),
    Case("many", lengths=tuple((37 * i) % 61 for i in range(24)), slow=True),
    Case("long", lengths=(1500, 2048), head_dim=128, q_heads=8, dtype="bfloat16", page_size=64, slow=True),
    Case("long_window", lengths=(1500, 2048), window=700, page_size=64, slow=True),
    Case(
        "deepseek_v3",
        lengths=(700, 1024),
        q_heads=128,
        kv_heads=1,
        head_dim=640,
        latent_values=512,
        page_size=64,
        dtype="bfloat16",
        slow=True,
    ),
    Case("long_int8", lengths=(1500, 2048), page_dtype="int8", page_size=64, slow=True),
)

LLAMA_3_8B = Case(
    "llama_3_8b", lengths=(2048,) * 64, q_heads=32, kv_heads=8, head_dim=128, page_size=64, dtype="bfloat16", slow=True
)
"""The attention of Llama 3 8B at 64 sequences of 2,048 positions: for compile checks and benchmarks."""

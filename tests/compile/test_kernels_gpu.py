"""The Mosaic GPU kernels: compiled for an H100 that is not attached, and interpreted against the float32 oracles.

Interpret mode runs each warpgroup as a thread, with barriers, copies and wgmma simulated; only the product of weights
and values differs (a plain dot, see `add_weighted_values`). It does not know shared-memory layouts, copy alignment or
timing: those are the compiler's and the chip's part.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax_cuda13_plugin", reason="compiling for CUDA needs jax-cuda13-plugin")

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _gpu_attention as gpu
from pallas_kernels.cases import AttentionCase, abstract_arguments, build_arguments, on_device
from pallas_kernels.kv_write import oracle as kv_write_oracle
from pallas_kernels.kv_write import pallas_mosaic_gpu as kv_write_gpu
from pallas_kernels.kv_write import specs as kv_write_specs
from pallas_kernels.paged_decode import oracle as decode_oracle
from pallas_kernels.paged_decode import pallas_mosaic_gpu as decode_gpu
from pallas_kernels.paged_decode import specs as decode_specs
from pallas_kernels.paged_prefill import oracle as prefill_oracle
from pallas_kernels.paged_prefill import pallas_mosaic_gpu as prefill_gpu
from pallas_kernels.paged_prefill import specs as prefill_specs
from pallas_kernels.spec import AttentionSpec

if jax.__version_info__ < gpu.OLDEST_JAX:
    pytest.skip(f"the GPU kernels need jax 0.11, this is {jax.__version__}", allow_module_level=True)

LLAMA_PAGES = [dataclasses.replace(decode_specs.LLAMA_3_8B, name=f"llama_page_{p}", page_size=p) for p in (16, 32, 64)]
LLAMA_INT8 = dataclasses.replace(decode_specs.LLAMA_3_8B, name="llama_int8", page_dtype="int8")
DECODE_COMPILED = [*LLAMA_PAGES, LLAMA_INT8, *(c for c in decode_specs.CASES if c.name != "all_empty")]
PREFILL_COMPILED = [
    *(dataclasses.replace(prefill_specs.LLAMA_3_8B, name=f"llama_page_{p}", page_size=p) for p in (16, 32, 64)),
    *(c for c in prefill_specs.CASES if c.name != "all_empty"),
]
# Splits of a sequence, and the rows of a split that holds nothing.
SPLIT = AttentionCase(
    "split", lengths=(1100, 0, 300), q_heads=2, kv_heads=1, dtype="bfloat16", page_size=64, max_context=2048, sinks=True
)
SPLIT_WINDOW = dataclasses.replace(SPLIT, name="split_window", window=600)


@pytest.fixture(scope="module")
def h100_device():
    """An H100 described by its target configuration."""
    config = (Path(__file__).parent / "h100_target_config.txtpb").read_text()
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h100", topology="1x1x1", target_config=config
    )
    return topology.devices[0]


@pytest.fixture
def h100(h100_device):
    """A sharding on an H100, with kernels lowered for it in this test alone: others compute on this machine."""
    target = jax.sharding.AbstractDevice(device_kind=h100_device.device_kind, num_cores=None, platform="cuda")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=target)):
        yield jax.sharding.SingleDeviceSharding(h100_device)


def check_compiled(compiled, pool, kernels: int) -> None:
    """The program calls that many Mosaic GPU kernels, and the pool stays where it is."""
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert len(re.findall(r'custom_call_target="mosaic_gpu', text)) == kernels
    pool_bytes = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(pool))
    assert memory.alias_size_in_bytes >= pool_bytes
    shape = ",".join(map(str, pool.data.shape))
    assert not re.search(rf"= \w+\[{shape}\]\S* copy\(", text)
    if pool_bytes > 2**27:
        assert memory.temp_size_in_bytes < 0.05 * pool_bytes


@pytest.mark.parametrize("case", DECODE_COMPILED, ids=lambda case: case.name)
def test_decode_compiles_for_h100(h100, case):
    arguments = abstract_arguments(case, h100)
    reason = decode_gpu.unsupported(*arguments.positional(case.spec), sinks=arguments.sinks)
    if reason is not None:
        assert case.name == "int8_page_16" or case.latent_values is not None, reason
        return

    def step(q, k, v, pages, table, lengths, sinks):
        return decode_gpu.paged_decode(q, k, v, pages, table, lengths, case.spec, sinks=sinks)

    call = (arguments.q, arguments.k, arguments.v, arguments.pages, arguments.page_table, arguments.lengths)
    compiled = jax.jit(step, donate_argnums=3).lower(*call, arguments.sinks).compile()
    check_compiled(compiled, arguments.pages, kernels=2 if case.write else 1)


@pytest.mark.parametrize("case", PREFILL_COMPILED, ids=lambda case: case.name)
def test_prefill_compiles_for_h100(h100, case):
    arguments = abstract_arguments(case, h100)
    reason = prefill_gpu.unsupported(*arguments.positional(case.spec), sinks=arguments.sinks)
    if reason is not None:
        assert case.name == "int8_page_16" or case.latent_values is not None, reason
        return

    def step(q, k, v, pages, table, starts, lengths, sinks):
        return prefill_gpu.paged_prefill(q, k, v, pages, table, starts, lengths, case.spec, sinks=sinks)

    call = (arguments.q, arguments.k, arguments.v, arguments.pages, arguments.page_table, arguments.query_starts)
    lowered = jax.jit(step, donate_argnums=3).lower(*call, arguments.lengths, arguments.sinks)
    check_compiled(lowered.compile(), arguments.pages, kernels=2 if case.write else 1)


@pytest.mark.parametrize("case", kv_write_specs.CASES, ids=lambda case: case.name)
def test_kv_write_compiles_for_h100(h100, case):
    arguments = kv_write_specs.abstract_arguments(case, h100)
    assert kv_write_gpu.unsupported(*arguments) is None
    compiled = jax.jit(kv_write_gpu.kv_write, donate_argnums=2).lower(*arguments).compile()
    check_compiled(compiled, arguments[2], kernels=1)


# --- interpret mode --------------------------------------------------------------------------------------------------
# Each batch of cases runs in a process of its own: a thread that waits at a barrier occupies one of the CPU client's
# threads, so the client is given more of them than this machine has cores, and only at start.


def quick(cases) -> list[str]:
    return [case.name for case in cases if not case.slow]


def interpret(kind: str, names: list[str], fault: str = "") -> str:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=16"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, __file__, kind, ",".join(names), fault]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)
    return done.stdout if done.returncode == 0 else done.stdout + done.stderr


def test_decode_equals_the_oracle():
    names = [*quick(decode_specs.CASES), SPLIT.name, SPLIT_WINDOW.name]
    assert interpret("decode", names) == "".join(f"{name} ok\n" for name in names)


@pytest.mark.parametrize("part", range(4))
def test_prefill_equals_the_oracle(part):
    names = quick(prefill_specs.CASES)[part::4]
    assert interpret("prefill", names) == "".join(f"{name} ok\n" for name in names)


def test_kv_write_equals_the_oracle():
    names = quick(kv_write_specs.CASES)
    assert interpret("kv_write", names) == "".join(f"{name} ok\n" for name in names)


@pytest.mark.parametrize(
    ("fault", "case"),
    [("mask", "wide_table"), ("swap", "bf16"), ("page", "bf16"), ("last", "bf16"), ("clear", "bf16")],
)
def test_faults_are_seen(fault, case):
    assert "wrong" in interpret("decode", [case], fault)


@pytest.mark.parametrize("fault", ["swap", "page", "clear"])
def test_faults_in_prefill_are_seen(fault):
    assert "wrong" in interpret("prefill", ["bf16"], fault)


# --- arithmetic outside the kernels ----------------------------------------------------------------------------------


def test_blocks_cover_every_token_once():
    random = np.random.default_rng(0)
    for tokens, block_tokens in ((64, 64), (200, 64), (200, 128), (7, 64), (513, 128)):
        for rows in (1, 3, 9):
            used = int(random.integers(0, tokens + 1))
            cuts = np.sort(random.integers(0, used + 1, size=rows - 1))
            starts = np.array([0, *cuts, used], np.int32)
            counts = np.diff(starts)
            lengths = (counts + random.integers(0, 50, size=rows) * (counts > 0)).astype(np.int32)
            table = prefill_gpu.block_table(tokens, block_tokens, jnp.array(starts), jnp.array(lengths))
            rows_of, positions = prefill_oracle.token_positions(tokens, starts, lengths)
            seen = np.zeros(tokens, int)
            blocks = {name: np.asarray(column) for name, column in table.items()}
            for block in range(len(blocks["row"])):
                row, token, skip, stop, position, limit = (
                    int(blocks[name][block]) for name in ("row", "token", "skip", "stop", "position", "limit")
                )
                assert token % block_tokens == 0
                mine = np.arange(token + skip, token + max(stop, skip))
                seen[mine] += 1
                if limit:
                    assert (rows_of[mine] == row).all()
                    assert (positions[mine] == position + mine - token).all()
                    assert limit == positions[mine].max() + 1
                else:
                    assert (positions[mine] == -1).all()
            assert (seen == 1).all()


def test_splits_cover_every_tile_once():
    operands = gpu.Operands(128, 128, jnp.bfloat16, jnp.bfloat16, 1, 1)
    for window in (None, 1, 100, 5000):
        plan = decode_gpu.plan_of(1, 4, 2, 8192, operands)
        assert plan is not None
        assert plan.splits > 1
        for length in (0, 1, 63, 64, 65, 1000, 8192):
            tiles: list[int] = []
            for split in range(plan.splits):
                begin, count, first = decode_gpu.tiles_of_split(jnp.int32(length), split, plan, window)
                tiles += range(int(begin), int(begin) + int(count))
            assert first == (0 if window is None else max(0, length - window))
            assert tiles == list(range(int(first) // plan.tile, -(-length // plan.tile)))


def test_online_softmax_in_blocks_equals_one_softmax():
    random = np.random.default_rng(1)
    raw = random.normal(size=(8, 192)).astype(np.float32) * 8
    raw[3, :64] = -np.inf
    raw[5] = -np.inf
    values = random.normal(size=(192, 16)).astype(np.float32)
    sums, highest, total = jnp.zeros((8, 16)), jnp.full((8,), gpu.LOWEST), jnp.zeros((8,))
    for start in range(0, 192, 64):
        scores = gpu.base2_scores(jnp.array(raw[:, start : start + 64]), AttentionSpec(0.5))
        weights, highest, total, factor = gpu.softmax_step(scores, highest, total)
        sums = sums * factor[:, None] + weights @ values[start : start + 64]
    got = np.asarray(gpu.normalized(sums, total))
    weights = np.exp(raw * 0.5 - np.where(np.isinf(raw.max(1)), 0, raw.max(1) * 0.5)[:, None])
    want = weights @ values / np.maximum(weights.sum(1, keepdims=True), 1e-30)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert (got[5] == 0).all()


def test_terms_keep_sixteen_bits():
    x = np.random.default_rng(2).normal(size=1000).astype(np.float32)
    parts = gpu.split_terms(jnp.array(x), 2, jnp.bfloat16)
    rebuilt = sum(np.asarray(part, np.float32) for part in parts)
    assert np.abs(rebuilt / x - 1).max() < 2**-16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"page_size": 12}, "page size"),
        ({"head_dim": 72}, "multiple of 16"),
        ({"page_dtype": "int8", "page_size": 16}, "scales"),
        ({"q_heads": 130}, "query heads"),
        ({"head_dim": 256, "dtype": "float32"}, "shared memory"),
    ],
)
def test_what_cannot_run_is_named(change, words):
    case = AttentionCase("case", **{"lengths": (20,), "page_size": 32, **change})
    arguments = abstract_arguments(case)
    reason = decode_gpu.unsupported(*arguments.positional(case.spec))
    assert reason is not None
    assert words in reason


def test_other_chips_are_refused():
    for kind, refused in (("NVIDIA A100-SXM4-80GB", True), ("NVIDIA B200", True), ("NVIDIA H200", False)):
        target = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="cuda")
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=target)):
            assert (gpu.unsupported_here() is not None) == refused


# --- the interpreting process ----------------------------------------------------------------------------------------


def plant(fault: str) -> None:
    """Break one piece of the kernels, or of what reaches them."""
    if fault == "mask":
        decode_gpu.attend = with_arguments(decode_gpu.attend, lengths=lambda lengths: lengths + 1)
    elif fault == "last":
        decode_gpu.attend = with_arguments(decode_gpu.attend, lengths=lambda lengths: jnp.maximum(lengths - 1, 0))
    elif fault == "page":
        decode_gpu.attend = with_arguments(decode_gpu.attend, table=lambda table: jnp.roll(table, 1, axis=1))
        tiles = prefill_gpu.block_table
        prefill_gpu.block_table = lambda *given: {**tiles(*given), "row": tiles(*given)["row"][::-1]}
    elif fault == "swap":
        write = kv_write_gpu.kv_write
        kv_write_gpu.kv_write = lambda k, v, *rest, **options: write(v, k, *rest, **options)
    elif fault == "clear":
        gpu.clear_rows = lambda ref, keep: None


def with_arguments(attend, lengths=lambda x: x, table=lambda x: x):
    return lambda q, pages, rows, visible, *rest: attend(q, pages, table(rows), lengths(visible), *rest)


def check(name: str, got, want, limit: float) -> None:
    got = np.asarray(got, np.float32)
    error = np.abs(got - want)
    good = bool(np.isfinite(got).all()) and (error.size == 0 or error.max() <= limit * max(1.0, np.abs(want).max()))
    print(name, "ok" if good else f"wrong by {error.max()}")


def interpret_attention(kind: str, names: list[str]) -> None:
    cases = {case.name: case for case in (*decode_specs.CASES, SPLIT, SPLIT_WINDOW)}
    module, oracle, operation = decode_gpu, decode_oracle.paged_decode, "paged_decode"
    if kind == "prefill":
        cases = {case.name: case for case in prefill_specs.CASES}
        module, oracle, operation = prefill_gpu, prefill_oracle.paged_prefill, "paged_prefill"
    for name in names:
        case = cases[name]
        arguments = build_arguments(case, seed=3)
        *arrays, spec = on_device(arguments).positional(case.spec)
        sinks = None if arguments.sinks is None else jnp.asarray(arguments.sinks)
        if module.unsupported(*arrays, spec, sinks=sinks) is not None:
            print(name, "ok")
            continue
        run = functools.partial(
            getattr(module, operation), spec=spec, sinks=sinks, interpret=plgpu.InterpretGPUParams()
        )
        got, pages = jax.jit(run)(*arrays)
        if pages.scales is not None:
            # Compiled and numpy division may round to different neighbours: attend over the pages as written.
            arguments = dataclasses.replace(arguments, k=None, v=None, pages=jax.tree.map(np.asarray, pages))
        want, _ = oracle(*arguments.positional(case.spec), sinks=arguments.sinks)
        check(name, got, want, 1e-4 if case.dtype == "float32" else 1e-2)


def interpret_kv_write(names: list[str]) -> None:
    cases = {case.name: case for case in kv_write_specs.CASES}
    for name in names:
        arguments = kv_write_specs.build_arguments(cases[name], seed=3)
        want = kv_write_oracle.kv_write(*arguments)
        write = jax.jit(lambda *a: kv_write_gpu.kv_write(*a, interpret=plgpu.InterpretGPUParams()))
        got = write(*jax.tree.map(jnp.asarray, arguments))
        leaves = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
        # Page 0 belongs to nobody.
        same = [same_rows(np.asarray(ours)[1:], np.asarray(theirs)[1:]) for ours, theirs in leaves]
        print(name, "ok" if all(same) else "wrong")


def same_rows(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Equal bytes; a quantized value may fall on the other side of a rounding border, but few do."""
    if ours.dtype.itemsize > 1:
        return np.allclose(np.float32(ours), np.float32(theirs), rtol=1e-6, atol=0)
    apart = np.abs(np.float32(ours) - np.float32(theirs))
    near = apart <= np.maximum(1, np.abs(np.float32(theirs)) / 8)
    return bool(near.all()) and float((apart > 0).mean()) < 0.01


if __name__ == "__main__":
    plant(sys.argv[3])
    if sys.argv[1] == "kv_write":
        interpret_kv_write(sys.argv[2].split(","))
    else:
        interpret_attention(sys.argv[1], sys.argv[2].split(","))

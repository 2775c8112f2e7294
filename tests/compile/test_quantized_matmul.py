"""Quantized products through the compilers of chips that are not attached, and the GPU kernel in interpret mode.

Each compiler, and interpret mode with its many threads, runs in a process of its own (this file as a script): all of
them need their environment before jax is imported.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"}
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None or sys.version_info < (3, 12),
    reason="the CUDA plugin of a jax with Mosaic GPU is not installed",
)
CUDA = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
QUICK_ON_GPU = ("int8_bf16", "q6_k", "q4_1_bf16", "q8_0_bf16")
FAULTS = ("next_scales", "next_offsets", "nibbles", "inputs", "columns")


def script(*arguments: str, environment: dict[str, str]) -> list[dict[str, Any]]:
    found = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, env=found, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check_compiled(found: dict[str, Any], most_temporary: int) -> None:
    """One kernel that streams the weight: nothing of its size is written anywhere."""
    assert "error" not in found, found
    assert found["kernels"] == 1, found
    assert found["argument_bytes"] <= 1.01 * found["stored_bytes"] + 2**20, found
    assert found["temp_bytes"] <= most_temporary, found


@needs_libtpu
@pytest.mark.parametrize("chip", ["v6e", "v7x"])
def test_llama_shapes_on_tpu_move_little_beyond_the_weight(chip: str) -> None:
    for found in script("tpu", chip, "llama", environment={"JAX_PLATFORMS": "cpu"}):
        check_compiled(found, most_temporary=2**20)
        assert 0.98 * found["stored_bytes"] <= found["moved_bytes"] <= 1.15 * found["stored_bytes"], found


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("chip", list(TOPOLOGIES))
def test_every_case_compiles_for_tpu(chip: str) -> None:
    refused = {"odd_outputs", "odd_inputs", "table_q8_0", "table_q4_1", "smollm2_down"}
    for found in script("tpu", chip, "cases", environment={"JAX_PLATFORMS": "cpu"}):
        assert ("refused" in found) == (found["case"] in refused), found
        assert "error" not in found, found


@needs_cuda
@pytest.mark.parametrize("chip", ["h100", "h200"])
def test_llama_shapes_compile_for_hopper(chip: str) -> None:
    names = ("llama_gate_int8", "llama_gate_int4", "llama_down_q8_0")
    for found in script("cuda", chip, ",".join(names), environment=CUDA):
        # Sums of parts of the inputs, which stay in the second-level cache of 50 MB.
        check_compiled(found, most_temporary=6 * 2**20)


@needs_cuda
@pytest.mark.slow
def test_every_llama_shape_compiles_for_h100() -> None:
    for found in script("cuda", "h100", "llama", environment=CUDA):
        if found["case"] == "llama_head_int8":
            assert "this is a table" in found["refused"]
        else:
            check_compiled(found, most_temporary=6 * 2**20)


@needs_cuda
@pytest.mark.slow
def test_every_case_compiles_for_h100() -> None:
    found = script("cuda", "h100", "cases", environment=CUDA)
    assert not [each for each in found if "error" in each]
    assert sum("refused" not in each for each in found) >= 8


INTERPRET = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=16"}


@needs_cuda
def test_gpu_kernel_equals_the_oracle_in_interpret_mode() -> None:
    found = script("interpret", ",".join(QUICK_ON_GPU), "", environment=INTERPRET)
    assert [each["case"] for each in found] == list(QUICK_ON_GPU)
    assert all(each["error"] < 1.2e-2 for each in found), found


@needs_cuda
@pytest.mark.slow
def test_planted_faults_show_in_interpret_mode() -> None:
    for fault in FAULTS:
        (found,) = script("interpret", "q4_1_bf16", fault, environment=INTERPRET)
        assert found["error"] > 5e-2, (fault, found)


def check_decode_steps(found: list[dict[str, Any]]) -> None:
    """The decode steps with float, int8 and int4 weights: nothing is expanded, and bytes fall as weights shrink."""
    by_type = {each["weight_dtype"]: each for each in found}
    weights = {name: each["weight_bytes"] for name, each in by_type.items()}
    assert weights["int8"] < 0.51 * weights["float"]
    assert weights["int4"] < 0.48 * weights["float"]  # the two token tables, most of this model, stay int8
    for each in found:
        assert each["in_place"]
        assert each["argument_bytes"] <= 1.02 * (each["weight_bytes"] + each["pool_bytes"]), each
        assert each["temp_bytes"] < 0.1 * each["weight_bytes"], each
        if each["moved_bytes"] is not None:
            assert 0.97 * each["least_bytes"] <= each["moved_bytes"] <= 1.15 * each["least_bytes"], each


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("target", ["v6e-1", "v6e-4"])
def test_decode_step_on_tpu_reads_weights_as_they_are_stored(target: str) -> None:
    found = script("steps", target, environment={"JAX_PLATFORMS": "cpu"})
    assert all(each["moved_bytes"] for each in found)
    check_decode_steps(found)


@needs_cuda
@pytest.mark.slow
def test_decode_step_on_h200_reads_weights_as_they_are_stored() -> None:
    check_decode_steps(script("steps", "h200", environment=CUDA))


# --- the script ------------------------------------------------------------------------------------------------------


def cases_of(which: str) -> Any:
    from pallas_kernels.quantized_matmul import specs

    if which in ("llama", "cases"):
        return specs.LLAMA_3_8B if which == "llama" else specs.CASES
    return [case for case in (*specs.CASES, *specs.LLAMA_3_8B) if case.name in which.split(",")]


def figures(name: str, case: Any, device: Any) -> dict[str, Any]:
    """What the compiler says about one case; `refused` or `error` alone where there is none."""
    import jax

    from jaxinfer.runtime.hlo_traffic import memory_traffic
    from pallas_kernels.quantized_matmul import specs, stored_bytes

    lowering = importlib.import_module(f"pallas_kernels.quantized_matmul.{name}")
    x, weight = specs.abstract_arguments(case, jax.sharding.SingleDeviceSharding(device))
    reason = lowering.unsupported(x, weight)
    if reason is not None:
        return {"refused": reason}
    multiply = jax.jit(lambda x, weight: lowering.quantized_matmul(x, weight, out_dtype=x.dtype))
    try:
        compiled = multiply.lower(x, weight).compile()
    except jax.errors.JaxRuntimeError as error:
        return {"error": str(error)[:2000]}
    memory, text = compiled.memory_analysis(), compiled.as_text()
    return {
        "stored_bytes": sum(stored_bytes(leaf) for leaf in jax.tree.leaves(weight)),
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "moved_bytes": memory_traffic(text) if name == "pallas_mosaic_tpu" else None,
        "kernels": text.count('custom_call_target="tpu_custom_call"') + text.count('custom_call_target="mosaic_gpu'),
    }


def compile_cases(platform: str, chip: str, which: str) -> None:
    from jaxinfer.runtime.compiler_environment import compiler_environment

    os.environ.update(compiler_environment(platform))
    import jax
    from jax.experimental import topologies

    from jaxinfer.runtime.chips import gpu_target_config, parse_target

    if platform == "tpu":
        device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices[0]
    else:
        config = gpu_target_config(parse_target(chip).chip)
        described = topologies.get_topology_desc(
            platform="cuda", topology_name=chip, topology="1x1x1", target_config=config
        )
        device = described.devices[0]
    cores = 1 if platform == "tpu" else None
    target = jax.sharding.AbstractDevice(device_kind=device.device_kind, num_cores=cores, platform=platform)
    name = "pallas_mosaic_tpu" if platform == "tpu" else "pallas_mosaic_gpu"
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=target)):
        for case in cases_of(which):
            print(json.dumps({"case": case.name, **figures(name, case, device)}), flush=True)


STEP_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 163840,
    "hidden_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 8192,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
"""Like Llama-3-8B, smaller; but no device's part of a table fits a TPU's vector memory, where XLA would copy it."""


def compile_steps(target_name: str) -> None:
    from jaxinfer.runtime.chips import parse_target
    from jaxinfer.runtime.compiler_environment import compiler_environment

    target = parse_target(target_name)
    os.environ.update(compiler_environment(target.chip.platform))
    from jaxinfer.models import family_of
    from jaxinfer.models.linear import quantized_weights
    from jaxinfer.runtime.aot import compile_report
    from jaxinfer.runtime.limits import Buckets, RunnerLimits

    config = family_of(STEP_MODEL).decoder(STEP_MODEL).replace(dtype="bfloat16")
    limits = RunnerLimits(
        max_slots=8,
        page_size=64,
        num_pages=65,
        max_context=512,
        max_batched_tokens=512,
        max_prefill_rows=1,
        vocab_size=config.vocab_size,
    )
    for weight_dtype in ("float", "int8", "int4"):
        weights = () if weight_dtype == "float" else quantized_weights(weight_dtype)
        reports = compile_report(config.replace(weights=weights), limits, Buckets((8,), ()), target)
        decode, whole = reports
        found = {
            "weight_dtype": weight_dtype,
            "weight_bytes": whole.weight_bytes,
            "pool_bytes": whole.pool_bytes,
            "argument_bytes": decode.argument_bytes,
            "temp_bytes": decode.temp_bytes,
            "moved_bytes": decode.bytes_accessed,
            "least_bytes": decode.cost.bytes,
            "in_place": decode.in_place,
        }
        print(json.dumps(found), flush=True)


def planted(fault: str, weight: Any) -> Any:
    """The weight that the kernel is given instead of the right one."""
    import numpy as np

    values, scales = weight.values, weight.scales
    wrong = {
        "": {},
        "next_scales": {"scales": np.roll(scales, 1, 0)},
        "next_offsets": {"offsets": np.roll(weight.offsets, 1, 0)} if fault == "next_offsets" else {},
        "nibbles": {"values": values.reshape(len(values), -1, 2)[..., ::-1].reshape(values.shape)},
        "inputs": {"values": np.roll(values, 1, 0)},
        "columns": {"scales": np.roll(scales, 1, 1)},
    }
    return dataclasses.replace(weight, **wrong[fault])


def interpret(names: list[str], fault: str) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.quantized_matmul import oracle, pallas_mosaic_gpu, specs

    by_name = {case.name: case for case in specs.CASES}
    for name in names:
        x, weight = specs.build_arguments(by_name[name], seed=3)
        assert pallas_mosaic_gpu.unsupported(x, weight) is None
        given = jax.tree.map(jnp.asarray, (x, planted(fault, weight)))
        multiply = jax.jit(
            lambda x, weight: pallas_mosaic_gpu.quantized_matmul(
                x, weight, out_dtype=jnp.float32, interpret=plgpu.InterpretGPUParams()
            )
        )
        want = oracle.quantized_matmul(x, weight)
        error = np.abs(np.asarray(multiply(*given)) - want).max() / np.abs(want).max()
        print(json.dumps({"case": name, "error": float(error)}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "interpret":
        interpret(sys.argv[2].split(","), sys.argv[3])
    elif sys.argv[1] == "steps":
        compile_steps(sys.argv[2])
    else:
        compile_cases(sys.argv[1], sys.argv[2], sys.argv[3])

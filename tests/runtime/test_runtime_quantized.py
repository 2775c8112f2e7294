"""Weights kept quantized: rounded on loading, taken from files as they are, cut over devices, and what they cost."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from test_runtime_parallel import PROGRAM

from checkpoints import QuantizedTensor, TensorInfo, open_checkpoint
from jaxinfer.models import abstract_params, family_of
from jaxinfer.models.linear import TABLES, check_groups, flattened, quantized_weights
from jaxinfer.runtime.cost import parameter_bytes, tree_bytes, weight_bytes_read
from jaxinfer.runtime.loading import decoder_config, load_params
from jaxinfer.runtime.quantizing import keep_quantized, weight_formats
from pallas_kernels.quantized_matmul import WeightFormat, is_quantized_weight
from pallas_kernels.quantized_matmul.oracle import written_out

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"


def leaves_of(params: Any) -> dict[str, Any]:
    """Parameters by path, a quantized weight as one."""
    found = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized_weight)
    return {"/".join(key.key for key in path): leaf for path, leaf in found}


def loaded(path: Path, weight_dtype: str) -> tuple[Any, dict[str, Any]]:
    with open_checkpoint(path) as checkpoint:
        config = decoder_config(checkpoint, weight_dtype=weight_dtype)
        return config, leaves_of(load_params(checkpoint, config))


@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
@pytest.mark.parametrize("name", ["qwen2", "llama-tied", "deepseek-v3"])
def test_loaded_weights_are_the_nearest_of_their_format(name: str, weight_dtype: str) -> None:
    _, exact = loaded(GOLDEN / name, "float")
    config, rounded = loaded(GOLDEN / name, weight_dtype)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), rounded) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), leaves_of(abstract_params(config))
    )
    quantized = {path for path, leaf in rounded.items() if is_quantized_weight(leaf)}
    assert {"embedding", "layers_0/attention/out/kernel"} <= quantized
    assert not [path for path in quantized if "experts" in path or "router" in path or "norm" in path]
    for path, leaf in rounded.items():
        if path not in quantized:
            assert np.array_equal(leaf, exact[path])
            continue
        original = np.asarray(exact[path]).T if path in TABLES else flattened(np.asarray(exact[path]))
        # Scales and offsets in bfloat16 may leave a group's end out of reach by a part of a step.
        steps = np.repeat(np.asarray(leaf.scales, np.float32), leaf.group, 0)
        assert (
            np.abs(written_out(leaf) - original) <= (0.51 if path in TABLES or weight_dtype == "int8" else 0.6) * steps
        ).all()


def test_auto_leaves_weights_that_are_not_quantized() -> None:
    config, params = loaded(GOLDEN / "llama", "auto")
    assert config.weights == ()
    assert not any(map(is_quantized_weight, params.values()))
    with (
        open_checkpoint(GOLDEN / "llama") as checkpoint,
        pytest.raises(ValueError, match="weight_dtype must be one of"),
    ):
        decoder_config(checkpoint, weight_dtype="int2")


def test_bytes_count_what_is_stored() -> None:
    with open_checkpoint(GOLDEN / "llama") as checkpoint:
        floats = decoder_config(checkpoint)
    sizes = {}
    for weight_dtype in ("int8", "int4"):
        config = floats.replace(weights=quantized_weights(weight_dtype))
        found = leaves_of(abstract_params(config))
        sizes[weight_dtype] = parameter_bytes(config)
        assert sizes[weight_dtype] == tree_bytes(abstract_params(config))
        assert weight_bytes_read(config) == sizes[weight_dtype] - tree_bytes(found["embedding"])
    kernel = found["layers_0/mlp/down/kernel"]  # of 80 inputs, in groups of 16
    assert tree_bytes(kernel) == 80 * 48 // 2 + 2 * 2 * 5 * 48
    assert sizes["int4"] < sizes["int8"] < parameter_bytes(floats)


# --- as a file has them ----------------------------------------------------------------------------------------------


@dataclass
class FakeCheckpoint:
    """Quantized tensors by name. reads: the names that were expanded."""

    stored: dict[str, QuantizedTensor]
    kinds: dict[str, str]
    reads: list[str] = field(default_factory=list)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(tensor.values.shape, np.dtype(np.float32), 0, self.kinds[name], 0)
            for name, tensor in self.stored.items()
        }

    def read_quantized(self, name: str) -> QuantizedTensor | None:
        return self.stored[name]

    def read(self, name: str) -> np.ndarray:
        self.reads.append(name)
        return self.stored[name].dequantized()


def tensor_of(kind: str, outputs: int, inputs: int, seed: int = 0) -> QuantizedTensor:
    random = np.random.default_rng(seed)
    bits, group = {"Q8_0": (8, 32), "Q6_K": (6, 16), "Q4_0": (4, 32), "Q4_1": (4, 32), "Q5_1": (5, 32)}[kind]
    unsigned = kind.endswith("_1")
    low, high = (0, 2**bits) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    values = random.integers(low, high, (outputs, inputs)).astype(np.int8)
    groups = (outputs, inputs // group)
    scales = random.uniform(0.001, 0.01, groups).astype(np.float16)
    minimums = random.normal(size=groups).astype(np.float16) * np.float16(0.05) if unsigned else None
    return QuantizedTensor(values, scales, minimums, bits, group)


def test_auto_is_float_on_a_cpu_and_as_stored_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_checkpoint(GOLDEN / "llama") as checkpoint:
        family, config = family_of(checkpoint.config), decoder_config(checkpoint)
    names = [f"model.layers.{layer}.mlp.gate_proj.weight" for layer in range(config.num_layers)]
    tensors = {name: tensor_of("Q6_K", config.intermediate_size, config.hidden_size) for name in names}
    fake: Any = FakeCheckpoint(tensors, dict.fromkeys(names, "Q6_K"))
    stored = weight_formats(fake, family, config, "stored")
    assert [path for path, _ in stored] == ["layers_0/mlp/gate/kernel", "layers_1/mlp/gate/kernel"]
    assert weight_formats(fake, family, config, "auto") == ()
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert weight_formats(fake, family, config, "auto") == stored


FILE_KINDS = [
    ("Q8_0", "Q8_0", WeightFormat(8, 32)),
    ("Q4_0", "Q4_0", WeightFormat(4, 32)),
    ("Q4_1", "Q4_1", WeightFormat(4, 32, offsets=True)),
    ("Q4_1", "Q6_K", WeightFormat(8, 16, offsets=True)),
    ("Q8_0", "Q5_1", WeightFormat(8, 32, offsets=True)),
]


@pytest.mark.parametrize(("keys", "values", "expected"), FILE_KINDS, ids=lambda kind: str(kind)[:12])
def test_quantized_tensors_keep_their_integers(keys: str, values: str, expected: WeightFormat) -> None:
    """Keys and values of one parameter, in heads of 16; types that differ meet in one that holds both exactly."""
    with open_checkpoint(GOLDEN / "llama") as checkpoint:
        family, config = family_of(checkpoint.config), decoder_config(checkpoint)
    (rule,) = (rule for rule in family.rules if rule.parameter.endswith("attention/kv/kernel"))
    outputs = config.num_kv_heads * config.head_dim
    stored = {"k": tensor_of(keys, outputs, 64, 1), "v": tensor_of(values, outputs, 64, 2)}
    fake: Any = FakeCheckpoint(stored, {"k": keys, "v": values})
    path = "layers_0/attention/kv/kernel"

    def join(tensors: list[np.ndarray]) -> np.ndarray:
        return rule.join(config, tensors)

    kept = keep_quantized(fake, config.replace(weights=((path, expected),)), path, ("k", "v"), join)
    assert kept is not None
    assert fake.reads == []
    assert (kept.bits, kept.group, kept.offsets is not None) == (expected.bits, expected.group, expected.offsets)
    right = flattened(join([tensor.dequantized() for tensor in stored.values()]))
    np.testing.assert_allclose(written_out(kept), right, rtol=0, atol=2e-9)
    # Another format means rounding the expanded numbers.
    rounded = keep_quantized(fake, config.replace(weights=((path, WeightFormat(8)),)), path, ("k", "v"), join)
    assert rounded is not None
    assert rounded.groups == 1
    assert fake.reads == ["k", "v"]


@pytest.mark.model
@pytest.mark.slow
def test_default_model_stays_as_its_file_has_it() -> None:
    """SmolLM2 in Q4_1 and Q8_0: every kept weight is the one that expanding gives, in a fifth of the bytes."""
    model = "smollm2-135m-instruct"
    with open_checkpoint(model) as checkpoint:
        floats = decoder_config(checkpoint)
        config = decoder_config(checkpoint, weight_dtype="stored")
        assert config.weights == weight_formats(checkpoint, family_of(checkpoint.config), floats, "stored")
        params = leaves_of(load_params(checkpoint, config))
        kept = [path for path, leaf in params.items() if is_quantized_weight(leaf)]
        assert len(kept) == 30 * 6 + 1
        assert parameter_bytes(config) < 0.22 * parameter_bytes(floats)
        exact = leaves_of(load_params(checkpoint, floats))
    for path in (*kept[:8], "embedding"):
        right = np.asarray(exact[path]).T if path in TABLES else flattened(np.asarray(exact[path]))
        np.testing.assert_allclose(written_out(params[path]), right, rtol=0, atol=1e-7)


@pytest.mark.model
@pytest.mark.slow
def test_perplexity_of_a_slice_stays_within_the_bounds() -> None:
    """int8 within 1% of float32, int4 within 5%; the whole text by `python bench/perplexity.py`."""
    command = [sys.executable, str(ROOT / "bench" / "perplexity.py"), "--tokens", "512", "--window", "256"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    changes = {line.split()[0]: float(line.split()[2].rstrip("%")) for line in done.stdout.splitlines()}
    assert abs(changes["int8"]) < 1
    assert abs(changes["int4"]) < 5


# --- several devices -------------------------------------------------------------------------------------------------

ROUNDED = """
from jaxinfer.models.linear import TABLES, flattened, format_of
from pallas_kernels.quantized_matmul import WeightFormat, quantize
kernels = WeightFormat({bits}, {group}, offsets={offsets})
config = config.replace(weights=(("*/kernel", kernels), ("embedding", WeightFormat(8)), ("head", WeightFormat(8))))
def rounded(path, leaf):
    name = "/".join(key.key for key in path)
    found = format_of(config, name)
    if found is None:
        return spread(leaf)
    return quantize(spread(leaf), found, 1) if name in TABLES else quantize(flattened(spread(leaf)), found)
params = jax.tree_util.tree_map_with_path(rounded, init_params(config.replace(weights=()), jax.random.key(0)))
"""


@pytest.mark.parametrize(("bits", "group", "offsets"), [(8, None, False), (4, 16, True)])
def test_four_devices_answer_as_one(bits: int, group: int | None, offsets: bool) -> None:
    program = PROGRAM.format(tied=False, kv_dtype="auto", part=2e-5, architecture={})
    plain = "params = jax.tree.map(spread, init_params(config, jax.random.key(0)))"
    assert plain in program
    program = program.replace(plain, ROUNDED.format(bits=bits, group=group, offsets=offsets))
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.stdout.strip() == "equal", done.stderr[-3000:]


def test_groups_that_would_be_torn_apart_are_refused() -> None:
    with open_checkpoint(GOLDEN / "llama") as checkpoint:
        config = decoder_config(checkpoint, weight_dtype="int4")
    with pytest.raises(
        ValueError, match="The 3 groups of 16 quantized inputs of layers_0/attention/out/kernel cannot be cut"
    ):
        check_groups(abstract_params(config), 4)
    check_groups(abstract_params(config.replace(weights=quantized_weights("int8"))), 4)

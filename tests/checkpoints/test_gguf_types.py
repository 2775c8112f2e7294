"""Every GGUF tensor type, bit for bit as the gguf package decodes it, and as integers with scales."""

from __future__ import annotations

import warnings

import gguf
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import HEADS, KV_HEADS, TinyGGUF
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind

from checkpoints import QuantizedTensor, open_checkpoint

Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
DOWN, NORM = "model.layers.0.mlp.down_proj.weight", "model.norm.weight"
EXPERT = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
PLAIN = {
    Kind.F32: np.float32,
    Kind.F16: np.float16,
    Kind.BF16: ml_dtypes.bfloat16,
    Kind.F64: np.float64,
    Kind.I8: np.int8,
    Kind.I16: np.int16,
    Kind.I32: np.int32,
    Kind.I64: np.int64,
}
# bits, group size, whether there are minimums
GROUPED = {
    Kind.Q4_0: (4, 32, False),
    Kind.Q4_1: (4, 32, True),
    Kind.Q5_0: (5, 32, False),
    Kind.Q5_1: (5, 32, True),
    Kind.Q8_0: (8, 32, False),
    Kind.Q4_K: (4, 32, True),
    Kind.Q5_K: (5, 32, True),
    Kind.Q6_K: (6, 16, False),
}


def decodable() -> list[Kind]:
    """The block types that the installed gguf package decodes."""
    kinds = []
    for kind in Kind:
        try:
            gguf.quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            continue
        kinds.append(kind)
    return kinds


def random_blocks(rows: int, width: int, kind: Kind) -> np.ndarray:
    """Random bytes: every code, and scales that are huge, tiny, negative, infinite or no number."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    return np.random.default_rng(kind.value).integers(0, 256, (rows, width // block * block_bytes), np.uint8)


def written(path, kind: Kind) -> dict[str, np.ndarray]:
    """A llama file with Q, K, a matrix and a stack of experts of one type; returns what is in it by GGUF name."""
    raw = {
        "blk.0.attn_q.weight": random_blocks(HEADS * 16, 512, kind),
        "blk.0.attn_k.weight": random_blocks(KV_HEADS * 16, 512, kind),
        "blk.0.ffn_down.weight": random_blocks(5, 768, kind),
        "blk.0.ffn_gate_exps.weight": random_blocks(3 * 7, 256, kind).reshape(3, 7, -1),
    }
    TinyGGUF(blocks={name: (value, kind) for name, value in raw.items()}).write(path)
    return raw


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Hugging Face rows in the order of the file."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(expected).tobytes()


def test_the_package_decodes_the_types_people_use():
    assert {Kind.Q4_0, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K, Kind.IQ2_XXS, Kind.MXFP4, Kind.TQ1_0} < set(decodable())


@pytest.mark.parametrize("kind", [k for k in decodable() if k not in PLAIN], ids=lambda kind: kind.name)
def test_quantized_types_are_the_packages_own(tmp_path, kind):
    raw = written(tmp_path / "m.gguf", kind)
    with np.errstate(all="ignore"):
        expected = {name: gguf.quants.dequantize(value, kind) for name, value in raw.items()}
    with warnings.catch_warnings(), open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        warnings.simplefilter("error")  # the user is not told of a stranger's scales
        assert checkpoint.tensors[Q].stored_as == kind.name
        assert_same_bits(interleaved(checkpoint.read(Q), HEADS), expected["blk.0.attn_q.weight"])
        assert_same_bits(interleaved(checkpoint.read(K), KV_HEADS), expected["blk.0.attn_k.weight"])
        assert_same_bits(checkpoint.read(DOWN), expected["blk.0.ffn_down.weight"])
        assert_same_bits(checkpoint.read(EXPERT), expected["blk.0.ffn_gate_exps.weight"][1])


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.name)
def test_plain_types_keep_their_bits_and_their_type(tmp_path, kind):
    raw = written(tmp_path / "m.gguf", kind)
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        assert_same_bits(checkpoint.read(DOWN), raw["blk.0.ffn_down.weight"].view(PLAIN[kind]))
        assert_same_bits(checkpoint.read(EXPERT), raw["blk.0.ffn_gate_exps.weight"][1].view(PLAIN[kind]))
        assert_same_bits(
            interleaved(checkpoint.read(Q), HEADS), raw["blk.0.attn_q.weight"].view(PLAIN[kind]).reshape(-1, 512)
        )
        assert checkpoint.read_quantized(DOWN) is None


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("kind", GROUPED, ids=lambda kind: kind.name)
def test_integers_with_scales_are_the_same_weights(tmp_path, kind):
    written(tmp_path / "m.gguf", kind)
    bits, group, has_minimums = GROUPED[kind]
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        for name in (Q, K, DOWN, EXPERT):
            tensor = checkpoint.read_quantized(name)
            assert tensor is not None
            outputs, inputs = checkpoint.tensors[name].shape
            assert (tensor.bits, tensor.group_size, tensor.minimums is not None) == (bits, group, has_minimums)
            assert (tensor.values.dtype, tensor.values.shape) == (np.int8, (outputs, inputs))
            assert tensor.scales.shape == (outputs, inputs // group)
            lowest = 0 if has_minimums else -(1 << bits - 1)
            assert lowest <= tensor.values.min() <= tensor.values.max() < lowest + (1 << bits)
            assert len(np.unique(tensor.values)) > 0.9 * (1 << bits)
            # A product with a scale that is no number has no sign worth comparing.
            got, expected = tensor.dequantized(), checkpoint.read(name)
            np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
            assert_same_bits(np.nan_to_num(got), np.nan_to_num(expected))


def test_other_formats_have_no_integers_with_scales(tmp_path):
    written(tmp_path / "m.gguf", Kind.IQ4_NL)
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        assert checkpoint.read_quantized(Q) is None
        assert checkpoint.read_quantized(NORM) is None


def test_parts_that_do_not_fit_are_refused():
    values, scales = np.zeros((2, 64), np.int8), np.ones((2, 2), np.float16)
    with pytest.raises(ValueError, match="do not fit groups of 32"):
        QuantizedTensor(values, scales[:, :1], None, 4, 32)
    with pytest.raises(ValueError, match="minimums must be float16"):
        QuantizedTensor(values, scales, scales.astype(np.float32), 4, 32)

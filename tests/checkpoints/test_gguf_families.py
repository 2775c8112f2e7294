"""Files that llama.cpp's own converter wrote of every family, against what transformers saved of the same models."""

from __future__ import annotations

import hashlib
import json
import lzma
import math
from pathlib import Path

import gguf
import numpy as np
import pytest

from checkpoints import CheckpointError, open_checkpoint
from checkpoints._gguf_names import ARCHITECTURES
from jaxinfer.models import family_of
from jaxinfer.runtime.loading import load_params

GOLDEN = Path(__file__).parent / "golden" / "gguf"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.json"))
# Keys of config.json that say nothing of the computation, or nothing that the tensors do not say.
NOT_COMPUTED = {
    *("dtype", "transformers_version", "initializer_range", "use_cache", "output_router_logits", "pretraining_tp"),
    *("router_aux_loss_coef", "router_jitter_noise", "resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"),
    *("max_window_layers", "use_bidirectional_attention", "_sliding_window_pattern", "num_nextn_predict_layers"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    *("pad_token_id", "rope_parameters", "qk_head_dim"),
}
# What a config without the key means.
IMPLIED = {
    **{"swiglu_alpha": 1.702, "rope_interleave": True, "reorder_and_upcast_attn": False, "scale_attn_weights": True},
    **{"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False, "mlp_bias": False},
}
# Layer types that transformers derives from other keys where they are not given.
DERIVED = {
    "gemma2": ["sliding_attention", "full_attention"],
    **dict.fromkeys(("qwen2", "qwen3"), ["full_attention"] * 2),
    "smollm3": ["full_attention"] * 4,
}
# Where published files and transformers' own writing differ in the spelling only.
SPELLED = {
    # Without a window a Mistral is a Llama, and the file says no more.
    "mistral": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen3moe": {"num_local_experts": None, "num_experts": 4},
    **{name: {"head_dim": None} for name in ("deepseek-v2", "deepseek-v2-lite", "deepseek-v3")},
}


@pytest.fixture(scope="module", params=NAMES)
def pair(request, tmp_path_factory):
    """(name, checkpoint, what transformers wrote)."""
    path = tmp_path_factory.mktemp(request.param) / "m.gguf"
    path.write_bytes(lzma.decompress((GOLDEN / f"{request.param}.gguf.xz").read_bytes()))
    with open_checkpoint(path) as checkpoint:
        yield request.param, checkpoint, json.loads((GOLDEN / f"{request.param}.json").read_text())


def test_every_family_has_a_file():
    assert len(NAMES) == 17


def test_tensors_are_the_ones_that_transformers_saved(pair):
    _, checkpoint, golden = pair
    assert set(checkpoint.tensors) == set(golden["tensors"])
    for name, (shape, digest) in golden["tensors"].items():
        got = checkpoint.read(name)
        assert list(got.shape) == list(checkpoint.tensors[name].shape) == shape, name
        assert got.dtype == checkpoint.tensors[name].dtype == np.float32
        assert hashlib.sha256(np.ascontiguousarray(got).tobytes()).hexdigest()[:16] == digest, name


def rope_of(config: dict, sliding: bool = False) -> dict:
    """One layer type's rotary settings, whether spelled as transformers 4 or 5 does."""
    given = config.get("rope_parameters")
    if given is None:
        given = {"rope_theta": config["rope_theta"]} | (config.get("rope_scaling") or {})
        if sliding:
            given = {"rope_theta": config["rope_local_base_freq"]}
    if "sliding_attention" in given:
        given = given["sliding_attention" if sliding else "full_attention"]
    result = {"rope_type": "default", "partial_rotary_factor": 1.0} | given
    if result["rope_type"] == "longrope" and "attention_factor" not in result:
        longer = config["max_position_embeddings"] / result["original_max_position_embeddings"]
        factor = math.sqrt(1 + math.log(longer) / math.log(result["original_max_position_embeddings"]))
        result |= {"attention_factor": pytest.approx(factor)}
    return result


def test_config_is_the_one_that_transformers_saved(pair):
    name, checkpoint, golden = pair
    ours, theirs = checkpoint.config, golden["config"] | SPELLED.get(name, {})
    defaults = IMPLIED | {"layer_types": DERIVED.get(name)}
    for key, value in theirs.items():
        if key not in NOT_COMPUTED:
            assert ours.get(key, defaults.get(key)) == value or (key == "head_dim" and value is None), key
    if name != "gpt2":
        assert rope_of(ours) == rope_of(theirs)
    if name == "gemma3":
        assert rope_of(ours, sliding=True)["rope_theta"] == rope_of(theirs, sliding=True)["rope_theta"]


def test_decoder_is_the_same_as_of_transformers_config(pair):
    _, checkpoint, golden = pair
    ours, theirs = (family_of(config).decoder(config) for config in (checkpoint.config, golden["config"]))
    assert ours == theirs
    load_params(checkpoint, ours)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in ("qwen2moe", "gemma")])
def test_names_are_those_of_the_packages_table(name):
    arch = ARCHITECTURES[name]
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    table = gguf.get_tensor_name_map(number, 1)
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[number]}
    for part, theirs in [*arch.top.items(), *((f"blk.0.{part}", theirs) for part, theirs in arch.block.items())]:
        stem = part.removesuffix(".weight").removesuffix(".bias")
        if stem.replace("blk.0.", "blk.{bid}.") not in known:
            continue  # an older file may have it
        prefix = arch.layer.format(0) + "." if part.startswith("blk") else ""
        # The package's table has a stack of experts under one name, and the bias of another kind under none.
        whole = f"{prefix}{theirs}".replace(".{}", "").removesuffix("_bias")
        mapped = table.get_name(whole, try_suffixes=(".weight", ".bias"))
        assert mapped == stem or (mapped is None and ("exps" in part or "exp_probs" in part)), (part, whole)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("blk.1.attn_v_b.weight"), "belongs to it is missing"),
        (lambda t: t.pop("blk.1.attn_k_b.weight"), "belongs to it is missing"),
        (lambda t: t.update({"blk.1.attn_v_b.weight": np.zeros((3, 12, 16), np.float32)}), "do not fit"),
        (lambda t: t.update({"blk.1.ffn_up_exps.weight": np.zeros((3, 12), np.float32)}), "no stack of matrices"),
        (lambda t: t.update({"blk.1.attn_kv_b.weight": np.zeros((80, 16), np.float32)}), "two tensors are both"),
        (lambda t: t.update({"x.attn_k_b.weight": np.zeros((3, 12, 16), np.float32)}), "missing"),
    ],
)
def test_parts_that_do_not_fit_are_one_sentence(tmp_path, change, words):
    path = tmp_path / "m.gguf"
    path.write_bytes(lzma.decompress((GOLDEN / "deepseek-v2.gguf.xz").read_bytes()))
    rewritten = rewrite(path, tmp_path / "changed.gguf", change)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint(rewritten)
    assert "\n" not in str(caught.value)


def rewrite(source: Path, target: Path, change) -> Path:
    """The same file with other tensors."""
    reader = gguf.GGUFReader(source)
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    change(tensors)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith(f"{architecture}."):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target

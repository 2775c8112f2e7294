"""`jaxinfer plan`: published and hand-computed figures come out."""

from __future__ import annotations

import json

import pytest

from jaxinfer.cli import main
from jaxinfer.engine.plan import make_plan
from jaxinfer.models import family_of
from jaxinfer.runtime.chips import CHIPS, parse_target

GIB, MIB, KIB = 2**30, 2**20, 2**10

LLAMA_3_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
QWEN_7B_SHAPE = LLAMA_3_8B | {"num_key_value_heads": 32, "vocab_size": 151936, "intermediate_size": 11008}
SMOLLM2_135M = LLAMA_3_8B | {
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "tie_word_embeddings": True,
}


def decoder(config, **changes):
    return family_of(config).decoder(config).replace(**({"dtype": "bfloat16"} | changes))


@pytest.fixture
def config_file(tmp_path):
    def write(config) -> str:
        path = tmp_path / "config.json"
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return str(path)

    return write


@pytest.fixture
def plan_json(config_file, capsys):
    def run(config, *options) -> dict:
        assert main(["plan", "--config", config_file(config), "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_kv_bytes_of_the_llama_shape(plan_json):
    plan = plan_json(LLAMA_3_8B, "--max-context", "4096", "--batch", "1,4")
    assert plan["kv_bytes_per_token"] == 128 * KIB
    assert plan["contexts"][-1] == {
        "context": 4096,
        "bytes": 512 * MIB,
        "bytes_per_layer": 16 * MIB,
        "requests": None,
    }
    decodes = {step["batch"]: step["kv_bytes"] for step in plan["steps"] if step["kind"] == "decode"}
    assert decodes == {1: 512 * MIB, 4: 2 * GIB}


def test_requests_of_the_qwen_shape(plan_json):
    plan = plan_json(QWEN_7B_SHAPE, "--kv-gib", "12")
    (row,) = [row for row in plan["contexts"] if row["context"] == 2048]
    assert (row["bytes_per_layer"], row["bytes"]) == (32 * MIB, GIB)
    requests = {row["context"]: row["requests"] for row in plan["contexts"]}
    assert {length: requests[length] for length in (512, 2048, 4096, 8192)} == {512: 48, 2048: 12, 4096: 6, 8192: 3}


@pytest.mark.parametrize(
    ("kv_dtype", "bytes_of_a_head"), [("float32", 512), ("bfloat16", 256), ("int8", 132), ("float8_e4m3fn", 132)]
)
def test_kv_types(plan_json, kv_dtype, bytes_of_a_head):
    plan = plan_json(LLAMA_3_8B, "--kv-dtype", kv_dtype)
    assert plan["kv_bytes_per_token"] == 32 * 2 * 8 * bytes_of_a_head


@pytest.mark.parametrize(
    ("config", "published"), [(LLAMA_3_8B, 8_030_261_248), (SMOLLM2_135M, 134_515_008)], ids=["llama", "smollm2"]
)
def test_parameters_are_those_published(plan_json, config, published):
    plan = plan_json(config)
    assert plan["parameters"] == published
    assert plan["weight_bytes"] == 2 * published
    assert sum(module["parameters"] for module in plan["modules"]) == published


def test_parameters_by_module():
    modules = {module.name: module for module in make_plan(decoder(LLAMA_3_8B)).modules}
    assert modules["embedding"].parameters == modules["head"].parameters == 128256 * 4096
    assert modules["layers/attention/q"].parameters == 32 * 4096 * 32 * 128
    assert modules["layers/attention/kv"].parameters == 32 * 4096 * (8 + 8) * 128
    assert modules["layers/mlp/down"].copies == 32
    assert modules["final_norm"].parameters == 4096


def test_floors_by_hand():
    chip = CHIPS["h100"]
    plan = make_plan(decoder(LLAMA_3_8B), target=parse_target("h100"), max_context=1024, batches=(1,), prefills=(4096,))
    prefill, decode = plan.steps
    read = 2 * (8_030_261_248 - 128256 * 4096)  # the embedding table is read by rows
    moved = read + 4096 * 2 + 1024 * 128 * KIB + 128 * KIB + 128256 * 4
    assert decode.cost.bytes == pytest.approx(moved, rel=1e-4)
    assert (decode.bound, decode.floor_s) == ("bandwidth", pytest.approx(moved / chip.bandwidth, rel=1e-4))
    per_token = 2 * 32 * (4096 * 48 * 128 + 4096 * 4096 + 3 * 4096 * 14336)
    attention = 4 * 32 * 32 * 128 * (4096 * 4097 // 2)
    flops = 4096 * per_token + attention + 2 * 128256 * 4096
    assert prefill.cost.flops == flops
    assert (prefill.bound, prefill.floor_s) == ("compute", pytest.approx(flops / chip.flops))


def test_memory_of_a_target_cut_over_its_devices():
    plan = make_plan(decoder(LLAMA_3_8B), target=parse_target("v6e-4"))
    norms = 65 * 4096 * 2
    share = norms + (plan.weight_bytes - norms) // 4  # norms are whole on every device
    assert plan.weight_bytes_per_device == share
    assert plan.kv_bytes == 4 * (int(32 * GIB * 0.96) - share)
    one = make_plan(decoder(LLAMA_3_8B), target=parse_target("v6e-4"), devices=1)
    assert one.steps[1].floor_s == pytest.approx(4 * plan.steps[1].floor_s)


def test_weights_that_do_not_fit(config_file, capsys):
    assert main(["plan", "--config", config_file(LLAMA_3_8B), "--target", "v5e-1", "--dtype", "float32"]) == 0
    printed = capsys.readouterr().out
    assert "The weights do not fit v5e-1: 14.56 GiB are missing." in printed


def test_tables(config_file, capsys):
    assert main(["plan", "--config", config_file(LLAMA_3_8B), "--target", "v6e-4"]) == 0
    printed = capsys.readouterr().out
    assert "8,030,261,248" in printed
    assert "128 KiB a token" in printed
    assert "Floors of 4 x v6e at 1640 GB/s and 918 TFLOP/s each" in printed


@pytest.mark.parametrize(
    ("config", "options", "named"),
    [
        (LLAMA_3_8B, ("--target", "v6e-16"), "8 key/value heads cannot be cut evenly over 16"),
        (LLAMA_3_8B, ("--target", "magic"), "no target 'magic'"),
        (LLAMA_3_8B, ("--target", "h100", "--tp", "2"), "h100-1 has 1 devices"),
        (LLAMA_3_8B, ("--tp", "2"), "One device without a target"),
        (LLAMA_3_8B, ("--max-context", "9000"), "2 to 8192"),
        (LLAMA_3_8B, ("--prefill", "9000"), "8192 positions"),
        (LLAMA_3_8B, ("--kv-gib", "0"), "--kv-gib must be above 0"),
        (LLAMA_3_8B, ("--kv-gib", "nan"), "--kv-gib must be above 0"),
        (LLAMA_3_8B, ("--model", "m"), "not both"),
        (LLAMA_3_8B | {"model_type": "magic"}, (), "'magic'"),
        (LLAMA_3_8B, ("--batch", "9" * 400), "more than 64 bits"),
        (LLAMA_3_8B, ("--page-size", "9" * 400), "more than 64 bits"),
        (LLAMA_3_8B | {"intermediate_size": 10**300}, (), "more than 2^60 parameters"),
        (LLAMA_3_8B | {"intermediate_size": 2**50}, (), "more than 2^60 parameters"),
        ('{"vocab_size": ' + "9" * 5000 + "}", (), "is not JSON"),
        ("[1]", (), "no JSON object"),
        ("[" * 100000, (), "is not JSON"),
        ("{", (), "is not JSON"),
    ],
)
def test_mistakes(config_file, capsys, config, options, named):
    assert main(["plan", "--config", config_file(config), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert named in captured.err
    assert captured.err.count("\n") == 1


def test_an_empty_name_is_no_default(capsys):
    for option in ("--config", "--model"):
        assert main(["plan", option, ""]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_file_without_an_end(capsys):
    assert main(["plan", "--config", "/dev/zero"]) == 2
    assert "/dev/zero is longer than" in capsys.readouterr().err


def test_a_config_that_is_not_there(tmp_path, capsys):
    assert main(["plan", "--config", str(tmp_path / "none.json")]) == 2
    assert "none.json: No such file or directory." in capsys.readouterr().err

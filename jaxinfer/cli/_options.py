"""Command-line options of the engine and of sampling: one table each, by the fields of the dataclasses they fill."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxinfer.cli._errors import UserMistake, user_mistakes
from jaxinfer.cli._parser import id_and_bias, number, whole_number, whole_numbers
from jaxinfer.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxinfer.engine.build import EngineOptions  # imports jax, which --help and bad arguments must not wait for

DEFAULT_MAX_TOKENS = 256
DEFAULT_MODEL = "smollm2-135m-instruct"  # as `checkpoints` has it, whose import --help need not wait for


@dataclass(frozen=True)
class Flag:
    """The option that fills one field of a dataclass; without the option the field keeps its default.

    field: the field; the option is its name with dashes. help: what it means, default included. convert: text to
    value. metavar: what the value is called. choices: the values allowed. settings: further arguments of add_argument.
    """

    field: str
    help: str
    convert: Callable[[str], Any] | None = None
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    settings: Mapping[str, Any] | None = None

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        """Declare the option."""
        settings = dict(self.settings or {})
        if "action" not in settings or settings["action"] in ("append", "extend"):
            settings |= {"type": self.convert, "metavar": self.metavar, "choices": self.choices}
        settings.setdefault("default", argparse.SUPPRESS)
        flag = settings.pop("flag", self.field)
        group.add_argument(f"--{flag.replace('_', '-')}", dest=self.field, help=self.help, **settings)


SAMPLING_FLAGS = (
    Flag("max_tokens", f"most tokens to generate (default: {DEFAULT_MAX_TOKENS})", whole_number, "N"),
    Flag(
        "temperature",
        "0 always takes the likeliest token; above 0 samples, the higher the freer (default: the model's own, else 0)",
        number,
        "T",
    ),
    Flag("top_k", "sample among the K likeliest tokens (default: the model's own, else all)", whole_number, "K"),
    Flag("top_p", "sample among the likeliest tokens that together reach this probability", number, "P"),
    Flag("min_p", "drop tokens below this share of the likeliest one's probability", number, "P"),
    Flag("repetition_penalty", "above 1 makes tokens of prompt and output less likely", number, "R"),
    Flag("presence_penalty", "subtracted from the logit of every token already in the output", number, "R"),
    Flag("frequency_penalty", "subtracted once for each time a token is in the output", number, "R"),
    Flag(
        "logit_bias",
        "add BIAS to the logit of token ID; may be given several times",
        id_and_bias,
        "ID=BIAS",
        settings={"action": "append"},
    ),
    Flag("seed", "makes sampling repeatable: the same seed, prompt and model give the same text", whole_number, "N"),
    Flag("n", "answers for each prompt (default: 1)", whole_number, "N"),
    Flag("min_tokens", "do not end before this many tokens", whole_number, "N"),
    Flag("ignore_eos", "go on after the model has ended its text", settings={"action": "store_true"}),
    Flag("stop", "end before this text; may be given several times", str, "TEXT", settings={"action": "append"}),
    Flag(
        "stop_token_ids",
        "end at any of these token ids",
        whole_numbers,
        "ID,ID,...",
        settings={"action": "extend"},
    ),
    Flag(
        "include_stop_str_in_output", "keep the text or token that ended the output", settings={"action": "store_true"}
    ),
    Flag(
        "skip_special_tokens",
        "show special tokens in the text",
        settings={"action": "store_false", "flag": "no_skip_special_tokens"},
    ),
    Flag(
        "logprobs", "with --json: log probabilities, with those of the N likeliest tokens (0 .. 20)", whole_number, "N"
    ),
    Flag("prompt_logprobs", "with --json: the same for the prompt's tokens", whole_number, "N"),
)
"""Every field of SamplingParams."""

_AUTO = "auto"
WEIGHT_DTYPES = (_AUTO, "stored", "float", "int8", "int4")
ENGINE_FLAGS = (
    Flag(
        "dtype",
        "type to compute in (default: auto, float32 on CPU and bfloat16 elsewhere)",
        str,
        None,
        (_AUTO, "float32", "bfloat16"),
    ),
    Flag(
        "weight_dtype",
        "type of the weights: stored keeps GGUF's quantized weights as they are, float is --dtype for all, int8 and "
        "int4 round them (default: auto, float on CPU and stored elsewhere)",
        str,
        None,
        WEIGHT_DTYPES,
    ),
    Flag(
        "kv_dtype",
        "type of the KV cache (default: auto, float32 on CPU and that of --dtype elsewhere)",
        str,
        None,
        (_AUTO, "float32", "bfloat16", "int8", "float8_e4m3fn"),
    ),
    Flag(
        "attention",
        "attention kernels (default: auto, the best for the device)",
        str,
        None,
        (_AUTO, "xla", "pallas_mosaic_tpu", "pallas_mosaic_gpu"),
    ),
    Flag(
        "max_context", "positions of a sequence, prompt and output together (default: the model's)", whole_number, "N"
    ),
    Flag(
        "max_slots",
        "sequences that run at once (default: as many as there are to generate, at most 8)",
        whole_number,
        "N",
    ),
    Flag("max_batched_tokens", "tokens computed in one round, decodes included (default: 512)", whole_number, "N"),
    Flag("max_prefill_rows", "prompts computed at once (default: 8)", whole_number, "N"),
    Flag(
        "kv_cache_gib",
        "size of the KV cache in GiB (default: 1 on CPU, else 90%% of the free device memory, "
        "but at most 4 times what the slots can use)",
        number,
        "GIB",
    ),
    Flag(
        "host_cache_gib",
        "host memory in GiB that keeps the pages evicted from the KV cache until they are needed again (default: 0)",
        number,
        "GIB",
    ),
    Flag("num_pages", "size of the KV cache in pages (default: by --kv-cache-gib)", whole_number, "N"),
    Flag("page_size", "positions of a page (default: 16 on CPU, else 64)", whole_number, "N"),
    Flag(
        "mode",
        "continuous batching, or static waves to compare with (default: continuous)",
        str,
        None,
        ("continuous", "static"),
    ),
    Flag(
        "policy",
        "who goes first: first come, first served, or by priority (default: fcfs)",
        str,
        None,
        ("fcfs", "priority"),
    ),
    Flag(
        "enable_prefix_caching",
        "compute every prompt from its beginning, even if the cache has it",
        settings={"action": "store_false", "flag": "no_enable_prefix_caching"},
    ),
    Flag(
        "enable_chunked_prefill",
        "compute prompts whole, while running sequences wait",
        settings={"action": "store_false", "flag": "no_enable_chunked_prefill"},
    ),
    Flag(
        "async_scheduling",
        "schedule a round only when the last one's tokens are read",
        settings={"action": "store_false", "flag": "no_async_scheduling"},
    ),
)
"""Every field of EngineOptions but `seed`, which is the requests' own here."""

MODEL_HELP = (
    "a directory in Hugging Face or Orbax layout, a .gguf file, a hub id such as organisation/name, or a named model "
    f"(default: {DEFAULT_MODEL}, fetched on first use)"
)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Declare --model."""
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="M", help=MODEL_HELP)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Declare an option for every field of SamplingParams."""
    group = parser.add_argument_group("sampling")
    for flag in SAMPLING_FLAGS:
        flag.add_to(group)


def add_engine_options(
    parser: argparse.ArgumentParser, only: tuple[str, ...] | None = None, without: tuple[str, ...] = ()
) -> None:
    """Declare an option for every field of EngineOptions, or for some of them."""
    group = parser.add_argument_group("engine")
    for flag in ENGINE_FLAGS:
        if (only is None or flag.field in only) and flag.field not in without:
            flag.add_to(group)


def engine_options(options: argparse.Namespace, **defaults: Any) -> EngineOptions:
    """What was given, over the command's own defaults."""
    from jaxinfer.engine.build import EngineOptions

    with user_mistakes():
        return EngineOptions.from_names(**(defaults | _given(options, ENGINE_FLAGS)))


def sampling_params(options: argparse.Namespace, generation_config: Mapping[str, Any]) -> SamplingParams:
    """What was given, over the model's own defaults, over those for a person at a terminal."""
    defaults: dict[str, Any] = {"max_tokens": DEFAULT_MAX_TOKENS} | model_defaults(generation_config)
    try:
        SamplingParams(**defaults)
    except ValueError as error:
        raise UserMistake(f"The model's generation_config.json cannot be used: {error}") from error
    given = _given(options, SAMPLING_FLAGS)
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    if "max_tokens" not in given:
        defaults["max_tokens"] = max(DEFAULT_MAX_TOKENS, given.get("min_tokens", 0))
    with user_mistakes():
        return SamplingParams(**(defaults | given))


def model_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling that a model's generation_config.json asks for; greedy when it asks for none."""
    config = {name: value for name, value in generation_config.items() if value is not None}
    defaults: dict[str, Any] = {"temperature": 0.0}
    if "repetition_penalty" in config:
        defaults["repetition_penalty"] = config["repetition_penalty"]
    if config.get("do_sample", "temperature" in config):
        defaults["temperature"] = config.get("temperature", 1.0)
        defaults |= {name: config[name] for name in ("top_k", "top_p", "min_p") if name in config}
    return defaults


def _given(options: argparse.Namespace, flags: tuple[Flag, ...]) -> dict[str, Any]:
    return {flag.field: getattr(options, flag.field) for flag in flags if flag.field in options}

"""The whole engine with experts, sinks and latent caches: chunks, preemption and known beginnings change no id."""

from __future__ import annotations

import pytest
from engine_tools import PlainTokenizer, finish, poison

from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.engine import Engine

# Pages for half of what three sequences need; every prompt but the first in chunks.
TIGHT = {
    "max_slots": 3,
    "page_size": 8,
    "num_pages": 22,
    "max_context": 112,
    "max_batched_tokens": 8,
    "max_prefill_rows": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss"])
def test_greedy_ids_are_those_of_hugging_face(golden_models, build_runner, name):
    model, runner = golden_models[name], build_runner(name, **TIGHT)
    poison(runner)
    engine = Engine(runner, PlainTokenizer())
    greedy = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    for turn in ("first", "again"):
        for index, prompt in enumerate(model.prompts):
            engine.add_request(f"{turn} {index}", prompt.tolist(), greedy)
        outputs = finish(engine)
        for index, expected in enumerate(model.greedy):
            assert outputs[f"{turn} {index}"].outputs[0].token_ids == tuple(expected)
        engine.scheduler.check_integrity()

from __future__ import annotations

import dataclasses

import pytest

from jaxinfer.core.sampling_params import SamplingParams


def test_defaults():
    assert dataclasses.asdict(SamplingParams()) == {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "logit_bias": None,
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
    }


def test_lists_and_single_strings_become_tuples():
    params = SamplingParams(stop="end", stop_token_ids=[5, 6], logit_bias={3: 1})
    assert params.stop == ("end",)
    assert params.stop_token_ids == (5, 6)
    assert params.logit_bias == {3: 1.0}
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()
    assert hash(params) == hash(SamplingParams(stop=["end"], stop_token_ids=(5, 6)))


@pytest.mark.parametrize(
    "values",
    [
        {"top_k": -1},
        {"top_k": 10**6},
        {"top_p": 0},
        {"temperature": 0},
        {"temperature": 7.5},
        {"logprobs": 0},
        {"logprobs": 20},
        {"max_tokens": None, "min_tokens": 99},
        {"seed": -5},
        {"presence_penalty": -2, "frequency_penalty": 2},
    ],
)
def test_borders_are_accepted(values):
    SamplingParams(**values)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"n": 0}, "n must be an integer between 1 and 65536, not 0."),
        ({"n": True}, "n must be an integer between 1 and 65536, not True."),
        ({"presence_penalty": 2.5}, "presence_penalty must be a number between -2 and 2, not 2.5."),
        ({"frequency_penalty": -3}, "frequency_penalty must be a number between -2 and 2, not -3."),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number greater than 0 and at most 1e+06, not 0."),
        ({"temperature": -0.1}, "temperature must be a number at least 0, not -0.1."),
        ({"temperature": float("nan")}, "temperature must be a finite number at least 0, not nan."),
        ({"temperature": "hot"}, "temperature must be a number at least 0, not 'hot'."),
        ({"top_p": 1.01}, "top_p must be a number between 0 and 1, not 1.01."),
        ({"top_k": -2}, "top_k must be an integer at least -1, not -2."),
        ({"top_k": 2.0}, "top_k must be an integer at least -1, not 2.0."),
        ({"min_p": 2}, "min_p must be a number between 0 and 1, not 2."),
        ({"max_tokens": 0}, "max_tokens must be an integer at least 1, not 0."),
        ({"min_tokens": 17}, "min_tokens must be an integer between 0 and 16 (max_tokens), not 17."),
        ({"logprobs": 21}, "logprobs must be an integer between 0 and 20, not 21."),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be an integer between 0 and 20, not -1."),
        ({"stop": ["a", ""]}, "stop must be a non-empty string or a list of them, not ['a', '']."),
        ({"stop": 3}, "stop must be a non-empty string or a list of them, not 3."),
        ({"stop_token_ids": "ab"}, "stop_token_ids must be a list of token ids, not 'ab'."),
        ({"stop_token_ids": [1, -1]}, "every id in stop_token_ids must be an integer at least 0, not -1."),
        ({"logit_bias": [1]}, "logit_bias must map token ids to numbers, not [1]."),
        ({"logit_bias": {4: 101}}, "logit_bias of token 4 must be a number between -100 and 100, not 101."),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, not 1."),
    ],
)
def test_out_of_range_is_one_sentence(values, sentence):
    with pytest.raises(ValueError, match=r"\.$") as error:
        SamplingParams(**values)
    assert str(error.value) == sentence

"""Templates that no sandbox inside a process can stop, and the process that renders them."""

from __future__ import annotations

import gc
import time

import pytest

from checkpoints import CheckpointError
from checkpoints._template_process import TemplateProcess

VALUES = {"messages": [{"role": "user", "content": "hi"}]}
DOUBLED = "{% set n = namespace(a=[1]) %}{% for i in range(40) %}{% set n.a = [n.a, n.a] %}{% endfor %}"
TOO_LONG = {
    "loops over texts": "{% set s = 'a' * 1000000 %}{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}",
    "prints a list that holds itself twice": DOUBLED + "{{ n.a }}",
    "compares such lists": DOUBLED + "{% set m = n.a %}" + DOUBLED + "{{ m == n.a }}",
    "lorem ipsum": "{{ lipsum(100000000) }}",
}
TOO_LARGE = {
    "replace": "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "join": "{{ ('b' * 1000000).join('a' * 1000000) }}",
    "batch": "{{ [1] | batch(1000000000, 'x') | list }}",
    "indent": "{{ 'a\\nb' | indent(10000000000) }}",
    "tojson": "{{ [[[1]]] | tojson(indent=10000000000) }}",
}


@pytest.fixture(scope="module")
def process():
    return TemplateProcess(seconds=1.5)


def alive(process: TemplateProcess) -> bool:
    return process.render("{{ messages[0].content }}", VALUES) == "hi"


@pytest.mark.parametrize("name", TOO_LONG)
def test_what_takes_too_long_is_ended(process, name):
    assert alive(process)
    started = time.monotonic()
    with pytest.raises(CheckpointError, match=r"takes more than 1\.5 seconds"):
        process.render(TOO_LONG[name], VALUES)
    assert time.monotonic() - started < 10
    assert alive(process)


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_takes_too_much_memory_is_refused(process, name):
    with pytest.raises(CheckpointError, match=r"too much memory|want of memory|takes more than"):
        process.render(TOO_LARGE[name], VALUES)
    assert alive(process)


def test_two_gigabytes_are_too_much_memory():
    with pytest.raises(CheckpointError, match=r"too much memory|want of memory"):
        TemplateProcess().render("{{ (('a' * 1000000) | replace('a', 'b' * 2000)) | length }}", VALUES)


def test_refusals_come_back_as_they_are(process):
    with pytest.raises(CheckpointError, match=r"refuses these messages: it says: only <é> here\.$"):
        process.render("{{ raise_exception('only <é> here') }}", VALUES)


def test_any_text_passes_unchanged(process):
    text = 'é 你 😀 \u0000 \u2028 \ud800 "quoted" \\ \n'
    assert process.render("{{ messages[0].content }}", {"messages": [{"content": text}]}) == text
    long = "x" * 3_000_000
    assert process.render("{{ messages[0].content }}", {"messages": [{"content": long}]}) == long


def test_what_is_no_plain_data(process):
    with pytest.raises(CheckpointError, match="must be plain JSON data"):
        process.render("x", {"messages": [object()]})


def test_a_process_that_was_ended_is_started_again(process):
    assert alive(process)
    process._process.kill()
    process._process.wait()
    assert alive(process)


def test_the_process_ends_with_its_owner():
    owner = TemplateProcess()
    assert alive(owner)
    child = owner._process
    del owner
    gc.collect()
    assert child.poll() is not None

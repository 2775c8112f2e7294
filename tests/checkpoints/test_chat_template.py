"""Chat templates are strangers' programs: what they may do, and how they are stopped."""

from __future__ import annotations

import time

import pytest

from checkpoints import CheckpointError
from checkpoints._chat_template import check_messages, render_chat


def render(template, **values):
    return render_chat(template, {"messages": [{"role": "user", "content": "<é>"}]} | values)


def test_what_hugging_face_templates_rely_on():
    assert render("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}") == "x\n"
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "<é>"}]'
    assert render("{{ {'b': 1} | tojson(indent=2) }}") == '{\n  "b": 1\n}'
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{{ 1 ~ '-' ~ none ~ messages[0].role }}{{ '%s %03d' % ('a', 7) }}") == "1-Noneusera 007"
    assert render("{{ '%s %03d' | format('2024', 7) }}{{ '{} {:>4}'.format(20240, 7) }}") == "2024 00720240    7"
    assert render("{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a * 3 }}{{ 'ab' * 2 }}") == "6abab"


def test_refusal_is_shown_to_the_user():
    with pytest.raises(CheckpointError, match=r"refuses these messages: it says: only\s+user roles\.$") as caught:
        render("{{ raise_exception('only\n user roles.') }}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
    ],
)
def test_sandbox_gives_nothing_away(template):
    try:
        text = render(template)
    except CheckpointError:
        return
    assert text.strip() in ("", "None")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "loops over more than"),
        ("{% for a in range(10**9) %}{% endfor %}", "loops over more than"),
        ("{{ 'a' * 10**9 }}", "operation"),
        ("{{ [0] * 999999999 }}", "operation"),
        ("{{ 9 ** (9 ** 9) }}", "operation"),
        ("{% for a in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "writes more than"),
        (
            "{% set n = namespace(x='aa') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "builds a text",
        ),
        (
            "{% set n = namespace(x='aa') %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
            "builds a text",
        ),
        ("{{ '%99999999d' % 1 }}", "excessive width"),
        ("{{ '%99999999d' | format(1) }}", "excessive width"),
        ("{{ '{:99999999}'.format(1) }}", "excessive width"),
        ("{{ 'a'.ljust(99999999) }}", "excessive width"),
        ("{{ '%*d' % (999999999, 1) }}", "excessive width"),
        ("{% for %}", "malformed at line 1"),
        ("{{ nothing.here }}", "cannot render"),
        ("{{ 1 / 0 }}", "cannot render"),
        ("x" * (1 << 21), "longer than"),
    ],
)
def test_bounds_and_mistakes_are_one_sentence(template, words):
    started = time.monotonic()
    with pytest.raises(CheckpointError, match=words) as caught:
        render(template)
    assert time.monotonic() - started < 5
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("messages", [[], "text", [1], [{"content": "x"}], [{"role": 1}], {"role": "user"}])
def test_what_is_no_list_of_messages(messages):
    with pytest.raises(CheckpointError, match="message"):
        check_messages(messages)

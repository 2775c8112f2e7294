"""The chat on a terminal, typed by a list of lines."""

from __future__ import annotations

import json

import pytest
from tiny_model import SMALL

from jaxinfer.cli import main
from jaxinfer.engine import Engine


@pytest.fixture
def chat(engine_builds, tiny_model, monkeypatch, capsys, standard_input):
    """Type lines (or raise exceptions) at the prompt; returns exit code, output, errors and the prompts' texts."""
    asked: list[str] = []
    real_add = Engine.add_request

    def add_request(engine, request_id, prompt, *arguments, **settings):
        asked.append(engine.tokenizer.decode(prompt))
        return real_add(engine, request_id, prompt, *arguments, **settings)

    def run(*lines: str | BaseException | type[BaseException], options: tuple[str, ...] = ()):
        standard_input(b"", terminal=True)
        typed = iter(lines)

        def answer(_prompt):
            line = next(typed, EOFError)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", answer)
        monkeypatch.setattr(Engine, "add_request", add_request)
        code = main(["generate", "--model", tiny_model, *SMALL, "--max-tokens", "3", *options])
        return code, *capsys.readouterr(), asked

    return run


def test_the_conversation_is_remembered(chat):
    code, out, err, asked = chat("Hi", "  ", "And?")
    assert code == 0
    first_answer = out.split("\n", 1)[1][:3]
    assert asked[0] == "user: Hi\nassistant: "
    assert asked[1] == f"user: Hi\nassistant: {first_answer}\nuser: And?\nassistant: "
    assert err.count(" tok/s (cut at 3 tokens)\n") == 2
    assert "/reset" in out


def test_reset_and_the_system_message(chat):
    _, _, _, asked = chat("Hi", "/reset", "Yo", options=("--system", "Be"))
    assert asked == ["system: Be\nuser: Hi\nassistant: ", "system: Be\nuser: Yo\nassistant: "]


def test_ways_to_leave(chat):
    code, _, _, asked = chat("/exit", "Hi")
    assert (code, asked) == (0, [])
    code, out, _, asked = chat(KeyboardInterrupt, EOFError, "Hi")
    assert (code, asked) == (0, [])
    assert out.count("Ctrl-D leaves") == 2


def test_a_conversation_that_outgrew_the_context(chat):
    code, _, err, asked = chat("Hello there, how are you?", "And what is your name, please?", "/reset", "Hi")
    assert code == 0
    refusals = [line for line in err.splitlines() if line.startswith("jaxinfer: ")]
    assert len(refusals) == 1
    assert "the context holds 64" in refusals[0]
    assert asked[-1] == "user: Hi\nassistant: "


def test_a_question_that_did_not_fit_is_forgotten(chat):
    _, _, err, asked = chat("x" * 80, "Hi")
    assert "context" in err
    assert asked == ["user: Hi\nassistant: "]


def test_ctrl_c_stops_the_answer_only(chat, ctrl_c_in_round):
    ctrl_c_in_round(2)
    code, _, _, asked = chat("Hi", "Yo", options=("--max-tokens", "20", "--ignore-eos"))
    assert code == 0
    assert len(asked) == 2
    remembered = asked[1].removeprefix("user: Hi\nassistant: ").removesuffix("\nuser: Yo\nassistant: ")
    assert len(remembered) == 2  # two rounds, one character each


def test_a_question_that_is_no_text_is_refused_and_the_chat_goes_on(chat):
    code, _, err, asked = chat("caf\udce9", "Hi")
    assert code == 0
    assert "jaxinfer: the text is not valid Unicode at " in err
    assert asked == ["user: Hi\nassistant: "]


def test_a_chat_is_traced(chat, tmp_path):
    code, _, _, _ = chat("Hi", "/reset", "Yo", options=("--trace", str(tmp_path / "out.json")))
    assert code == 0
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert sum(event["name"].startswith("first token") for event in events) == 2


def test_what_is_typed_in_another_encoding(chat):
    code, _, err, asked = chat(UnicodeDecodeError("utf-8", b"caf\xe9", 3, 4, "unexpected end of data"), "Hi")
    assert code == 0
    assert "jaxinfer: That was no UTF-8 text; type it again." in err
    assert len(asked) == 1

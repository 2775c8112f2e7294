"""JSON from files of strangers: of bounded size, whatever the file is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path, most_characters: int) -> Any:
    """What a file of JSON in UTF-8 holds. ValueError, one sentence, when it is none or longer; OSError as `open`."""
    with path.open(encoding="utf-8-sig") as file:
        try:
            text = file.read(most_characters + 1)
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not JSON in UTF-8.") from None
    if len(text) > most_characters:
        raise ValueError(f"{path} is longer than {most_characters} characters.")
    return parse_json(text, str(path))


def parse_json(text: str, name: str) -> Any:
    """What a text of JSON holds. ValueError, naming it, when it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # a number of too many digits is a ValueError of its own
        raise ValueError(f"{name} is not JSON.") from None

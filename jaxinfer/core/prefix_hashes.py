"""Names of full pages: two pages have the same name only if everything their keys and values depend on is the same."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def root_hash(model_version: str, salt: str) -> bytes:
    """What every chain begins with: pages of another model, adapter or tenant never match."""
    texts = [text.encode(errors="surrogatepass") for text in (model_version, salt)]
    return hashlib.sha256(b"".join(len(text).to_bytes(8, "little") + text for text in texts)).digest()


def page_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a full page with these tokens after the page (or root) named `parent`."""
    return hashlib.sha256(parent + array("I", token_ids).tobytes()).digest()


def page_hashes(root: bytes, token_ids: Sequence[int], page_size: int) -> list[bytes]:
    """The root, then the names of all full pages of these tokens in order."""
    hashes = [root]
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        hashes.append(page_hash(hashes[-1], token_ids[start : start + page_size]))
    return hashes

"""A runner without a device: its tiny model sees only what pages and page table show it.

The next token is a hash of the visible tokens, which are kept in pages exactly as keys and values would be. So a wrong
page table entry, a wrong start, a missed token or a stale page changes the answer.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.core.step import SampledToken, SlotSetup, StepResult, StepWork

LETTERS = "abcdefghijklm"
PIECES = ["<eos>", "<end>", "<bos>", *LETTERS, "ab", "bc", " c", " d"]
VOCAB_SIZE = len(PIECES)
EOS_IDS = (0, 1)
NEVER_WRITTEN = 255


class FakeTokenizer:
    special_ids = frozenset({0, 1, 2})
    eos_ids = EOS_IDS

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [PIECES.index(letter) for letter in text if letter in LETTERS]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(PIECES[i] for i in ids if not (skip_special_tokens and i in self.special_ids))

    def encode_chat(self, messages, add_generation_prompt=True, tools=None) -> list[int]:
        return [2, *(i for message in messages for i in self.encode(message["content"]))]


def logits(visible: Sequence[int]) -> list[float]:
    state = zlib.crc32(bytes(visible))
    return [zlib.crc32(bytes([token, 7]), state) / 2**32 * 6 for token in range(VOCAB_SIZE)]


def log_softmax(values: Sequence[float]) -> list[float]:
    total = math.log(sum(math.exp(value) for value in values))
    return [value - total for value in values]


def choose(visible: Sequence[int], params: SamplingParams, seed: int, step: int, banned: Sequence[int]) -> int:
    scores = logits(visible)
    if params.temperature > 0:
        for token in range(VOCAB_SIZE):
            uniform = (zlib.crc32(f"{seed} {step} {token}".encode()) + 0.5) / 2**32
            scores[token] -= params.temperature * math.log(-math.log(uniform))
    if step < params.min_tokens:
        for token in banned:
            scores[token] = -math.inf
    return max(range(VOCAB_SIZE), key=lambda token: scores[token])


def describe(visible: Sequence[int], token: int, top: int | None) -> SampledToken:
    if top is None:
        return SampledToken(token)
    values = log_softmax(logits(visible))
    best = sorted(range(VOCAB_SIZE), key=lambda i: -values[i])
    return SampledToken(token, values[token], tuple((i, values[i]) for i in best[:top]), best.index(token) + 1)


@dataclass(frozen=True)
class FakeLimits:
    max_slots: int = 4
    page_size: int = 4
    num_pages: int = 33
    max_context: int = 64
    max_batched_tokens: int = 16
    max_prefill_rows: int = 4
    vocab_size: int = VOCAB_SIZE
    window: int | None = None
    host_pages: int = 0


@dataclass
class _Slot:
    setup: SlotSetup
    table: list[int]
    length: int = 0
    last: int = NEVER_WRITTEN
    sampled: int = 0


@dataclass(frozen=True)
class Done:
    """The result of a round that a runner computed when it was dispatched."""

    value: StepResult

    def result(self) -> StepResult:
        return self.value


class FakeRunner:
    def __init__(self, limits: FakeLimits | None = None, hook: Callable[[StepWork], None] | None = None) -> None:
        self.limits = limits or FakeLimits()
        self.hook = hook
        self.history: list[StepWork] = []
        self.max_cached: dict[tuple[int, ...], int] = {}
        columns = -(-self.limits.max_context // self.limits.page_size)
        self._tables = [[0] * columns for _ in range(self.limits.max_slots)]
        self._pages = [[NEVER_WRITTEN] * self.limits.page_size for _ in range(self.limits.num_pages)]
        self._host = [[NEVER_WRITTEN] * self.limits.page_size for _ in range(self.limits.host_pages)]
        self._slots: dict[int, _Slot] = {}
        self.cache_lost = False

    def dispatch(self, work: StepWork) -> Done:
        return Done(self.execute(work))

    def execute(self, work: StepWork) -> StepResult:
        self.history.append(work)
        self._check(work)
        if self.hook is not None:
            self.hook(work)
        self._move_pages(work)
        for slot, column, page in work.table_updates:
            self._tables[slot][column] = page
        for setup in work.slot_setups:
            self._slots[setup.slot] = _Slot(setup, self._tables[setup.slot], sampled=len(setup.output_ids))
        for slot in work.decodes:
            self._write(self._slots[slot], [self._slots[slot].last], self._slots[slot].length)
        for row in work.prefills:
            self._write(self._slots[row.slot], row.token_ids, row.start)
        sampling = [*work.decodes, *(row.slot for row in work.prefills if row.sample)]
        sampled = {slot: self._sample(self._slots[slot]) for slot in sampling}
        reports = {row.slot: self._report(row) for row in work.prefills if row.prompt_logprobs is not None}
        return StepResult(sampled, reports)

    def recover(self) -> bool:
        lost, self.cache_lost = self.cache_lost, False
        if lost:
            for row in (*self._tables, *self._pages):
                row[:] = [NEVER_WRITTEN] * len(row)
            self._slots.clear()
        return lost

    def _move_pages(self, work: StepWork) -> None:
        for page, host_slot in work.page_outs:
            self._host[host_slot] = self._pages[page].copy()
        for source, target in work.page_copies:
            self._pages[target] = self._pages[source].copy()
        for host_slot, page in work.page_ins:
            self._pages[page] = self._host[host_slot].copy()

    def _check(self, work: StepWork) -> None:
        limits = self.limits
        rows = [row.slot for row in work.prefills]
        assert work.num_tokens <= limits.max_batched_tokens
        assert len(rows) <= limits.max_prefill_rows
        assert len(set(rows) | set(work.decodes)) == len(rows) + len(work.decodes)
        assert all(0 < page < limits.num_pages for _, _, page in work.table_updates)
        assert all(row.token_ids for row in work.prefills)

    def _write(self, slot: _Slot, tokens: Sequence[int], start: int) -> None:
        for position, token in enumerate(tokens, start):
            page = slot.table[position // self.limits.page_size]
            assert page, "a token was written to the padding page"
            self._pages[page][position % self.limits.page_size] = token
        slot.length = start + len(tokens)
        key = slot.setup.prompt_ids
        self.max_cached[key] = max(self.max_cached.get(key, 0), slot.length)

    def _visible(self, slot: _Slot, length: int) -> list[int]:
        size = self.limits.page_size
        first = 0 if self.limits.window is None else max(0, length - self.limits.window)
        return [self._pages[slot.table[i // size]][i % size] for i in range(first, length)]

    def _sample(self, slot: _Slot) -> SampledToken:
        visible = self._visible(slot, slot.length)
        setup = slot.setup
        token = choose(visible, setup.params, setup.seed, slot.sampled, setup.eos_ids)
        slot.last = token
        slot.sampled += 1
        return describe(visible, token, setup.params.logprobs)

    def _report(self, row) -> list[SampledToken]:
        slot = self._slots[row.slot]
        targets = [*row.token_ids[1:], *(() if row.next_token is None else (row.next_token,))]
        return [
            describe(self._visible(slot, row.start + offset + 1), target, row.prompt_logprobs)
            for offset, target in enumerate(targets)
        ]


@dataclass(frozen=True)
class Expected:
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    stop_reason: str | int | None


def alone(
    prompt: Sequence[int], params: SamplingParams, seed: int, max_context: int, window: int | None = None
) -> Expected:
    """What one sequence must give, without pages, rounds or increments; the model sees `window` tokens."""
    tokenizer = FakeTokenizer()
    limit = min(params.max_tokens or max_context, max_context - len(prompt))
    out: list[int] = []
    banned = (*EOS_IDS, *params.stop_token_ids)
    while True:
        visible = [*prompt, *out]
        out.append(choose(visible if window is None else visible[-window:], params, seed, len(out), banned))
        final = out[-1]
        may_stop = len(out) > params.min_tokens
        eos = may_stop and not params.ignore_eos and final in EOS_IDS
        stop_id = may_stop and not eos and final in params.stop_token_ids
        hide = (eos or stop_id) and not params.include_stop_str_in_output
        text = tokenizer.decode(out[:-1] if hide else out, params.skip_special_tokens)
        settled = len(tokenizer.decode(out[: params.min_tokens], params.skip_special_tokens))
        for end in range(settled + 1, len(text) + 1) if may_stop else ():
            for stop in sorted(params.stop, key=len, reverse=True):
                if text[:end].endswith(stop):
                    shown = text[:end] if params.include_stop_str_in_output else text[: end - len(stop)]
                    return Expected(tuple(out), shown, "stop", stop)
        if eos:
            return Expected(tuple(out), text, "stop", None)
        if stop_id:
            return Expected(tuple(out), text, "stop", final)
        if len(out) == limit:
            return Expected(tuple(out), text, "length", None)

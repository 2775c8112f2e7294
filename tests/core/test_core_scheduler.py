"""The scheduler alone: rounds, limits, misuse and host time."""

from __future__ import annotations

import ast
import pathlib
import time
from dataclasses import replace

import pytest

import jaxinfer.core
from jaxinfer.core.request import Request, RequestRefused
from jaxinfer.core.sampling_params import SamplingParams
from jaxinfer.core.scheduler import Scheduler, SchedulerConfig
from jaxinfer.core.step import PrefillRow, SampledToken, SlotSetup, StepResult, TableUpdate

CONFIG = SchedulerConfig(max_slots=2, page_size=4, num_pages=9, max_context=32, max_batched_tokens=8)


def request(name, prompt, max_tokens=4, eos_ids=(0,), **params):
    chosen = SamplingParams(max_tokens=max_tokens, **params)
    return Request(name, tuple(range(1, prompt + 1)), chosen, seed=7, eos_ids=eos_ids, arrival=0.0)


def run_round(scheduler, token=5):
    work = scheduler.schedule()
    slots = [*work.decodes, *(row.slot for row in work.prefills if row.sample)]
    progress = scheduler.commit(work, StepResult({slot: SampledToken(token) for slot in slots}))
    scheduler.check_integrity()
    return work, progress


def test_first_round_describes_the_sequence_completely():
    scheduler = Scheduler(CONFIG)
    added = request("r", 5, min_tokens=2, stop_token_ids=[3])
    scheduler.add(added)
    work, _ = run_round(scheduler)
    assert work.slot_setups == (SlotSetup(0, added.params, 7, (1, 2, 3, 4, 5), (), (0, 3)),)
    assert work.table_updates == (TableUpdate(0, 0, 1), TableUpdate(0, 1, 2))
    assert work.prefills == (PrefillRow(0, (1, 2, 3, 4, 5), 0, True, None, None),)
    assert work.decodes == ()
    assert work.num_tokens == 5


def test_pages_are_taken_as_tokens_come_and_promised_at_admission():
    scheduler = Scheduler(replace(CONFIG, reserve_full=True))
    scheduler.add(request("r", 4, max_tokens=6))  # 9 positions: 3 pages
    taken = []
    while scheduler.has_unfinished:
        work, _ = run_round(scheduler)
        taken.append((len(work.table_updates), scheduler.reserved_pages))
    assert taken == [(1, 2), (1, 1), (0, 1), (0, 1), (0, 1), (1, 0)]
    assert scheduler.pool.free_pages == 8


def test_head_of_the_queue_is_not_overtaken():
    scheduler = Scheduler(SchedulerConfig(3, 4, 9, 32, 32))
    for name, prompt, count in (("running", 16, 5), ("large", 16, 5), ("small", 2, 2)):
        scheduler.add(request(name, prompt, count))
    run_round(scheduler)
    assert [sequence.request.request_id for sequence in scheduler.running] == ["running"]
    scheduler.cancel("large")
    run_round(scheduler)
    assert [sequence.request.request_id for sequence in scheduler.running] == ["running", "small"]


def test_budget_goes_to_decodes_first_then_to_the_oldest_prefill():
    scheduler = Scheduler(SchedulerConfig(3, 4, 30, 32, 6, enable_prefix_caching=False))
    scheduler.add(request("a", 2))
    run_round(scheduler)
    scheduler.add(request("b", 8))
    scheduler.add(request("c", 4))
    rounds = [run_round(scheduler)[0] for _ in range(3)]
    assert [work.decodes for work in rounds] == [(0,), (0,), (0, 1)]
    rows = [[(row.slot, row.start, len(row.token_ids), row.sample) for row in work.prefills] for work in rounds]
    assert rows == [[(1, 0, 5, False)], [(1, 5, 3, True), (2, 0, 2, False)], [(2, 2, 2, True)]]


def test_prefill_rows_per_round_are_limited():
    scheduler = Scheduler(SchedulerConfig(4, 4, 30, 32, 32, max_prefill_rows=2))
    for name in "abc":
        scheduler.add(request(name, 2))
    assert [len(run_round(scheduler)[0].prefills) for _ in range(2)] == [2, 1]


def test_cut_rows_name_the_next_prompt_token():
    scheduler = Scheduler(replace(CONFIG, enable_prefix_caching=False))
    scheduler.add(request("r", 10, prompt_logprobs=1, n=2))
    rows = [row for _ in range(3) for row in run_round(scheduler)[0].prefills]
    assert [(row.slot, row.start, row.next_token, row.prompt_logprobs) for row in rows] == [
        (0, 0, 9, 1),
        (0, 8, None, 1),
        (1, 0, 7, None),  # the report is wanted once, not for each of n
        (1, 6, None, None),
    ]


def test_each_of_n_sequences_has_its_own_slot_and_seed():
    scheduler = Scheduler(CONFIG)
    scheduler.add(request("r", 2, n=3))
    work, _ = run_round(scheduler)
    assert [(setup.slot, setup.seed) for setup in work.slot_setups] == [(0, 7), (1, 8)]
    while scheduler.waiting:
        work, _ = run_round(scheduler)
    assert [setup.seed for setup in work.slot_setups] == [9]


def test_cancel_between_schedule_and_commit():
    scheduler = Scheduler(CONFIG)
    scheduler.add(request("a", 2))
    scheduler.add(request("b", 2))
    work = scheduler.schedule()
    assert scheduler.cancel("a") is not None
    progress = scheduler.commit(work, StepResult({0: SampledToken(5), 1: SampledToken(6)}))
    assert [(item.sequence.request.request_id, item.token.id) for item in progress] == [("b", 6)]
    scheduler.check_integrity()
    assert scheduler.cancel("a") is None


def test_a_sequence_takes_nothing_from_the_slot_before_it():
    """The cancelled sequence's result must not reach the one that gets its slot."""
    scheduler = Scheduler(SchedulerConfig(1, 4, 9, 32, 8, enable_prefix_caching=False))
    scheduler.add(request("a", 2))
    scheduler.add(request("b", 3))
    run_round(scheduler)
    work = scheduler.schedule()
    scheduler.cancel("a")
    assert scheduler.commit(work, StepResult({0: SampledToken(5)})) == []
    work, _ = run_round(scheduler)
    assert work.slot_setups[0].prompt_ids == (1, 2, 3)
    assert (work.decodes, work.prefills[0].start) == ((), 0)


def test_rounds_are_serial():
    scheduler = Scheduler(CONFIG)
    scheduler.add(request("r", 2))
    work = scheduler.schedule()
    with pytest.raises(RuntimeError, match="must be committed or abandoned"):
        scheduler.schedule()
    scheduler.abandon()
    assert not scheduler.has_unfinished
    with pytest.raises(RuntimeError, match="oldest round"):
        scheduler.commit(work, StepResult({}))


def test_refusals_name_the_numbers():
    scheduler = Scheduler(CONFIG)
    with pytest.raises(RequestRefused, match=r"32 tokens, but the context holds 32"):
        scheduler.add(request("r", 32))
    small = Scheduler(SchedulerConfig(2, 4, 3, 32, 8))
    with pytest.raises(
        RequestRefused, match=r"needs 9 cache positions \(6 .* 4 new ones\), but the whole cache has 8;"
    ):
        small.add(request("r", 6))
    small.add(request("r", 5))
    assert not scheduler.has_unfinished


@pytest.mark.parametrize(
    "values",
    [
        {"max_slots": 0},
        {"num_pages": 1},
        {"max_context": 1},
        {"page_size": 0},
        {"max_batched_tokens": 1},
        {"mode": "other"},
        {"max_prefill_rows": 0},
    ],
)
def test_impossible_configurations_are_refused(values):
    good = {"max_slots": 2, "page_size": 4, "num_pages": 9, "max_context": 32, "max_batched_tokens": 8}
    with pytest.raises(ValueError, match=next(iter(values))):
        SchedulerConfig(**{**good, **values})


def test_integrity_check_sees_a_lost_page_and_a_wrong_reservation():
    scheduler = Scheduler(replace(CONFIG, reserve_full=True))
    scheduler.add(request("r", 6))
    run_round(scheduler)
    pages = scheduler.running[0].pages
    page = pages.pop()
    with pytest.raises(RuntimeError, match=f"Page {page} has 1 holds, but 0 users"):
        scheduler.check_integrity()
    pages.append(page)
    scheduler.running[0].request.max_new_tokens = 100
    with pytest.raises(RuntimeError, match="pages are reserved"):
        scheduler.check_integrity()


def test_core_imports_no_array_library():
    for path in pathlib.Path(jaxinfer.core.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"jax", "numpy"} & {name.split(".")[0] for name in names}


def test_a_decode_round_of_eight_sequences_takes_little_host_time():
    scheduler = Scheduler(SchedulerConfig(8, 16, 1000, 1024, 512))
    for index in range(8):
        scheduler.add(request(str(index), 16, max_tokens=900))
    result = StepResult({slot: SampledToken(5) for slot in range(8)})
    times = []
    for _ in range(400):
        start = time.perf_counter()
        work = scheduler.schedule()
        scheduler.commit(work, result)
        times.append(time.perf_counter() - start)
    assert sorted(times)[len(times) // 2] < 100e-6  # about 10 microseconds on an idle core

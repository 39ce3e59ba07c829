from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.hooks import (
    Event,
    GrammarAdvanced,
    GrammarBitmaskFilled,
    HostWait,
    PromptLogprobsComputed,
    RequestFinished,
    RequestPreempted,
    RequestScheduled,
    RowFreed,
    RowMoved,
)
from engine.snapshot import Snapshot
from tests.workbench.records import make_record
from workbench.recording import Recording, StepRecord
from workbench.views.why import why

HEAD = (3, "v1", 0)


def said(record: StepRecord) -> str:
    return "\n".join("".join(text for text, _ in sentence) for sentence in why(record))


def record_of(
    v1: tuple[Event, ...], v2: tuple[Event, ...] = (), config: dict[str, Any] | None = None, **snapshot: Any
) -> StepRecord:
    record = make_record()
    runners = {
        name: replace(record.runners[name], events=events, snapshot=changed(record.runners[name].snapshot, snapshot))
        for name, events in (("v1", v1), ("v2", v2 or v1))
    }
    return replace(record, runners=runners, history=Recording({"config": config or {}}))


def changed(snapshot: Snapshot, fields: dict[str, Any]) -> Snapshot:
    return replace(snapshot, **fields)


def test_what_ran_is_counted_against_the_budget() -> None:
    events = (
        RequestScheduled(*HEAD, "A", 1, 9, "running", 0),
        RequestScheduled(*HEAD, "D", 1, 8, "running", 0),
        RequestScheduled(*HEAD, "C", 5, 0, "new", 0),
    )
    text = said(record_of(events, config={"max_num_batched_tokens": 16}))
    assert text.splitlines()[0] == "Ran 7 of 16 budget tokens: A and D one token each; C a chunk of 5, now 5 of 8."


def test_a_step_of_a_recorded_run() -> None:
    assert said(make_record(steps=3)).splitlines() == [
        "Ran 6 tokens: A and D one token each; C the last 4 of 8. C found 4 tokens (1 block) in the prefix cache.",
        "In V1 D moved from row 2 into the hole at row 1. V2 freed row 1; nobody moved.",
        "V1 waited 1 time inside the step (sampled token ids; 3.5 ms); V2 did not wait inside the step.",
    ]


def test_what_grammars_took_and_allow() -> None:
    filled = (
        GrammarBitmaskFilled(*HEAD, "A", (), 0, (12,)),
        GrammarBitmaskFilled(*HEAD, "C", (5, 6, -1), 1, (1, 3, 384, 384)),
        GrammarAdvanced(*HEAD, "A", 3, (7,), False, None),
        GrammarAdvanced(*HEAD, "C", 3, (5, 8), True, None),
        GrammarAdvanced(*HEAD, "D", 3, (), False, "token 9 isn't allowed"),
    )
    assert said(record_of(filled)).splitlines()[1] == (
        "A's grammar allows 12 tokens next. C's grammar allows 1 token next, and 1 of its 2 drafts. A's grammar took "
        "1 token. C's grammar took 2 tokens and is complete. D left its grammar: token 9 isn't allowed."
    )
    many = tuple(GrammarBitmaskFilled(*HEAD, f"r{i}", (), 0, (2,)) for i in range(6))
    assert said(record_of(many)).splitlines()[1].endswith("tokens next. 2 more outputs went on in their grammar.")


def test_whose_prompt_logprobs_came() -> None:
    came = (PromptLogprobsComputed(*HEAD, "A", 3, 1, 7, 5, 512), PromptLogprobsComputed(*HEAD, "C", 3, 9, 1, 0, 512))
    assert said(record_of(came)).splitlines()[1] == (
        "Logprobs of A's prompt at positions 1 to 7 came. Logprobs of C's prompt at position 9 came."
    )
    many = tuple(PromptLogprobsComputed(*HEAD, f"r{i}", 3, 1, 4, 5, 512) for i in range(6))
    assert "Those of 2 more prompts came, 8 positions together." in said(record_of(many))


def test_parts_name_their_requests() -> None:
    parts = [part for sentence in why(make_record(steps=3)) for part in sentence]
    assert {owner for _, owner in parts} == {"", "A", "C", "D"}
    assert all(text == owner for text, owner in parts if owner)


def test_many_requests_are_counted() -> None:
    events = tuple(RequestScheduled(*HEAD, f"r{i}", 1, 50, "running", 0) for i in range(60))
    events += tuple(RequestScheduled(*HEAD, f"p{i}", 10, 0, "new", 0) for i in range(6))
    text = said(record_of(events))
    assert "60 requests one token each" in text
    assert "2 more prefills, 20 tokens together" in text


def test_a_preemption_names_its_cause() -> None:
    text = said(record_of((RequestPreempted(*HEAD, "B", 12, "A"),)))
    assert (
        "B was preempted: A needed a block and none was free; its 12 computed tokens must be computed again or found"
        in text
    )
    text = said(record_of((RequestPreempted(*HEAD, "B", 1, "B"),)))
    assert "B was preempted: it needed a block itself and none was free; its 1 computed token must" in text


def test_what_only_one_runner_did_carries_its_name() -> None:
    text = said(record_of((RequestFinished(*HEAD, "A", "stop"),), (RequestFinished(*HEAD, "B", "length"),)))
    assert "V1: A finished (stop). V2: B finished (length)." in text


def test_a_running_request_may_sit_a_step_out() -> None:
    pool = replace(make_record().runners["v1"].snapshot.pool, free=())
    ran = (RequestScheduled(*HEAD, "A", 1, 9, "running", 0), RowFreed(*HEAD, "D", 1))
    record = record_of(ran, (ran[0],), running=("A", "D"), pool=pool)
    runners = {
        name: replace(
            step,
            before=replace(step.before, running=("A", "D")),
            snapshot=replace(
                step.snapshot,
                requests=tuple(replace(v, num_computed_tokens=8, block_ids=(1, 2)) for v in step.snapshot.requests),
            ),
        )
        for name, step in record.runners.items()
    }
    text = said(replace(record, runners=runners))
    assert "D sat this step out: no block was free." in text
    assert "In V1 D left the batch, its state kept aside; in V2 it stays." in text


def test_a_swap_is_no_hole() -> None:
    moves = (RowMoved(*HEAD, "C", 2, 0, "swap"), RowMoved(*HEAD, "A", 0, 2, "swap"))
    text = said(record_of(moves, (RowFreed(*HEAD, "A", 4), RowFreed(*HEAD, "B", 5))))
    assert "In V1 C and A swapped rows 2 and 0, decodes first. V2 freed rows 4, 5; nobody moved." in text
    assert "hole" not in text


def test_waiting_has_a_cause_only_where_the_numbers_prove_it() -> None:
    ran = (RequestScheduled(*HEAD, "A", 8, 0, "new", 0),)
    snapshot = {"waiting": ("D",), "running": ("A",)}
    assert "D waits: the token budget is spent." in said(
        record_of(ran, config={"max_num_batched_tokens": 8}, **snapshot)
    )
    assert "D waits: every row is taken." in said(record_of(ran, config={"max_num_seqs": 1}, **snapshot))
    pool = replace(make_record().runners["v1"].snapshot.pool, free=(3,))
    assert "D waits: D needs 3 blocks and 1 is free." in said(record_of(ran, **snapshot, pool=pool))
    assert "D waits.\n" in said(record_of(ran, **snapshot))


def test_waits_outside_the_step_are_not_counted_as_inside() -> None:
    text = said(record_of((HostWait(*HEAD, "output of the step before", 0, 10**6, False),)))
    assert text.splitlines()[-1] == "V1 did not wait inside the step; V2 did not wait inside the step."


def test_an_idle_step_says_so() -> None:
    assert said(record_of((), running=(), waiting=())).startswith("No request is left: nothing ran.")
    assert said(record_of((), running=("A",), waiting=())).startswith("Nothing was scheduled.")

"""Events of prompt logprobs and of grammars: true, in order, and made for nobody who did not ask."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from typing import Any

import pytest

from engine.hooks import (
    DraftProposed,
    DraftVerified,
    Event,
    GrammarAdvanced,
    GrammarBitmaskFilled,
    Hooks,
    PromptLogprobsComputed,
    RequestFinished,
    Sampled,
)
from engine.models import LoadedModel
from engine.runner_v2.sample.prompt_logprobs import chunk_rows
from engine.sample.prompt_logprobs import LOGITS_ROWS
from tests.engine.drafters import SIDES, ngram
from tests.engine.engine_helpers import (
    EOS,
    VOCAB,
    TraceRequest,
    both_loops,
    both_runners,
    greedy,
    prompt_of,
    run_trace,
    tiny_llm,
)
from tests.engine.grammars import ENGINE, held, token_of


@both_runners
@both_loops
def test_prompt_logprobs_are_told_part_by_part(runner: str, loop: str) -> None:
    asked = {"a": (21, 3), "b": (9, 0), "c": (2, VOCAB)}
    trace = [TraceRequest(name, tuple(prompt_of(n, n)), greedy(4, prompt_logprobs=k)) for name, (n, k) in asked.items()]
    trace.append(TraceRequest("free", tuple(prompt_of(12)), greedy(4)))
    events: list[Any] = []
    with (
        tiny_llm(runner, loop, max_num_batched_tokens=8) as llm,
        llm.hooks.subscribe((PromptLogprobsComputed, Sampled), events.append),
    ):
        result = run_trace(llm, trace)
    told: dict[str, list[PromptLogprobsComputed]] = defaultdict(list)
    seen_tokens: set[str] = set()
    for event in events:
        if isinstance(event, Sampled):
            seen_tokens.add(event.request_id)
        else:
            assert event.request_id not in seen_tokens, "before the first token"
            told[event.request_id].append(event)
    assert told.keys() == asked.keys()
    for name, (length, k) in asked.items():
        positions = [p for e in told[name] for p in range(e.start, e.start + e.num_positions)]
        assert positions == list(range(1, length)) and len(result.outputs[name].prompt_logprobs or ()) == length
        steps = [e.computed_in_step for e in told[name]]
        assert steps == sorted(set(steps)) and all(e.computed_in_step <= e.step for e in told[name])
        assert {e.k for e in told[name]} == {k}
        rows = {LOGITS_ROWS} if runner == "v1" else {chunk_rows(k), chunk_rows(0), chunk_rows(3)}
        assert {e.chunk_rows for e in told[name]} <= rows
    assert len(told["a"]) > 2, "in chunks"


def grammar_events(runner: str, loop: str, loaded: LoadedModel, params: Any, **config: Any) -> tuple[list[Any], Any]:
    events: list[Any] = []
    prompt = [*[token_of(char) for char in "abcab"] * 4]
    kinds = (GrammarAdvanced, GrammarBitmaskFilled, DraftProposed, DraftVerified, RequestFinished)
    with tiny_llm(runner, loop, loaded=loaded, **ENGINE, **config) as llm, llm.hooks.subscribe(kinds, events.append):
        output = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]
        assert llm.hooks.errors == []
    return events, output


@both_runners
@both_loops
def test_a_grammar_tells_what_it_allows_and_what_it_took(runner: str, loop: str, loaded: LoadedModel) -> None:
    events, output = grammar_events(runner, loop, loaded, held(regex="[a-d]{3}x?", temperature=0))
    filled = [e for e in events if isinstance(e, GrammarBitmaskFilled)]
    advanced = [e for e in events if isinstance(e, GrammarAdvanced)]
    assert [e.num_allowed_tokens for e in filled][:4] == [(4,), (4,), (4,), (2,)]
    assert {(e.draft_token_ids, e.num_allowed_drafts) for e in filled} == {((), 0)}
    assert tuple(t for e in advanced for t in e.token_ids) == output.outputs[0].token_ids
    assert [e.is_terminated for e in advanced] == [False] * (len(advanced) - 1) + [True]
    steps = [e.sampled_in_step for e in advanced]
    # An engine that has nothing else to do has waited in its first steps for the grammar to be compiled.
    assert steps == [e.step for e in filled] == list(range(steps[0], steps[0] + len(advanced)))
    assert isinstance(events[-1], RequestFinished) and isinstance(events[-2], GrammarAdvanced)


@pytest.mark.parametrize(("runner", "loop"), SIDES)
@pytest.mark.parametrize("last", ["c", "[0-9]"])
def test_a_grammar_tells_how_far_it_goes_along_with_drafts(
    runner: str, loop: str, last: str, loaded: LoadedModel
) -> None:
    params = held(regex=f"abcab{last}abca", temperature=0)
    events, output = grammar_events(runner, loop, loaded, params, **ngram(4))
    filled = {e.step: e for e in events if isinstance(e, GrammarBitmaskFilled)}
    judged = {e.verified_in_step: e for e in events if isinstance(e, DraftProposed)}
    accepted = {e.verified_in_step: e.num_accepted for e in events if isinstance(e, DraftVerified)}
    advanced = [e for e in events if isinstance(e, GrammarAdvanced)]
    assert tuple(t for e in advanced for t in e.token_ids) == output.outputs[0].token_ids
    assert output.outputs[0].token_ids[-1] == EOS and advanced[-1].is_terminated
    refused = 0
    for step, event in filled.items():
        drafts = tuple(token for token in event.draft_token_ids if token >= 0)
        assert drafts == (judged[step].token_ids if step in judged else ())
        assert len(event.num_allowed_tokens) == len(event.draft_token_ids) + 1
        assert accepted.get(step, 0) <= event.num_allowed_drafts <= len(drafts)
        reached = event.num_allowed_drafts + 1
        assert set(event.num_allowed_tokens[:reached]) <= {1, 10}
        assert set(event.num_allowed_tokens[reached:]) <= {VOCAB}
        refused += len(drafts) - event.num_allowed_drafts
    assert sum(accepted.values()) > 2
    assert (refused > 0) == (runner == "v2"), "V1 leaves out what its grammar refuses"


@both_runners
def test_a_grammar_tells_why_it_gave_up(runner: str, loaded: LoadedModel) -> None:
    params = held(regex="ab", temperature=0, allowed_token_ids=[token_of("a"), token_of("x")])
    events, output = grammar_events(runner, "plain", loaded, params)
    (*_, last) = [e for e in events if isinstance(e, GrammarAdvanced)]
    assert last.token_ids == () and not last.is_terminated and last.error == output.outputs[0].stop_reason


@pytest.mark.parametrize(("runner", "loop"), SIDES)
def test_nothing_is_made_for_nobody(
    runner: str, loop: str, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("an event without a subscriber was made")

    monkeypatch.setattr(Hooks, "emit", refuse)
    monkeypatch.setattr(Hooks, "stamp", refuse)
    with tiny_llm(runner, loop, loaded=loaded, **ENGINE, **ngram(3)) as llm:
        params = held(regex="[a-d]{9}", temperature=0, prompt_logprobs=1)
        (output,) = llm.generate({"prompt_token_ids": prompt_of(12)}, params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 10


@both_runners
def test_who_watches_everything_gets_them_and_changes_nothing(runner: str, loaded: LoadedModel) -> None:
    seen: list[Event] = []
    params = held(regex="[a-d]{9}", temperature=1.0, prompt_logprobs=1)
    tokens = []
    for watch in (False, True):
        with (
            tiny_llm(runner, "plain", loaded=loaded, **ENGINE, **ngram(3)) as llm,
            llm.hooks.subscribe(Event, seen.append) if watch else nullcontext(),
        ):
            (output,) = llm.generate({"prompt_token_ids": prompt_of(12)}, params, use_tqdm=False)
            tokens.append(output.outputs[0].token_ids)
    assert tokens[0] == tokens[1]
    assert {PromptLogprobsComputed, GrammarAdvanced, GrammarBitmaskFilled} <= {type(event) for event in seen}

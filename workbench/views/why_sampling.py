"""What a step's grammars and prompt logprobs did, for `why`."""

from __future__ import annotations

from engine.hooks import GrammarAdvanced, GrammarBitmaskFilled, PromptLogprobsComputed

from ..recording import RunnerStep
from .sentences import NAMED, Sentence, count, of, words


def grammars(step: RunnerStep) -> list[Sentence]:
    """In the order of the events: tokens that a grammar has taken, and what it allows next."""
    events = list(step.of(GrammarAdvanced, GrammarBitmaskFilled))
    told = list(dict.fromkeys(e.request_id for e in events))[:NAMED]
    said = [_advanced(e) if isinstance(e, GrammarAdvanced) else _filled(e) for e in events if e.request_id in told]
    if rest := {e.request_id for e in events} - {*told}:
        said.append(
            [words(f"{count(len(rest), 'more output')} went on in {'its' if len(rest) == 1 else 'their'} grammar.")]
        )
    return said


def _advanced(event: GrammarAdvanced) -> Sentence:
    if event.error is not None:
        return [of(event.request_id), words(f" left its grammar: {event.error}.")]
    end = " and is complete" if event.is_terminated else ""
    return [of(event.request_id), words(f"'s grammar took {count(len(event.token_ids), 'token')}{end}.")]


def _filled(event: GrammarBitmaskFilled) -> Sentence:
    drafts = sum(token >= 0 for token in event.draft_token_ids)
    allows = f"'s grammar allows {count(event.num_allowed_tokens[0], 'token')} next"
    if drafts:
        allows += f", and {event.num_allowed_drafts} of its {count(drafts, 'draft')}"
    return [of(event.request_id), words(f"{allows}.")]


def prompt_logprobs(step: RunnerStep) -> list[Sentence]:
    """The positions whose logprobs reached the host."""
    events: list[PromptLogprobsComputed] = list(step.of(PromptLogprobsComputed))
    said = []
    for e in events[:NAMED]:
        last = e.start + e.num_positions - 1
        where = f"position {e.start}" if e.num_positions == 1 else f"positions {e.start} to {last}"
        said.append([words("Logprobs of "), of(e.request_id), words(f"'s prompt at {where} came.")])
    if len(events) > NAMED:
        total = sum(e.num_positions for e in events[NAMED:])
        said.append([words(f"Those of {len(events) - NAMED} more prompts came, {count(total, 'position')} together.")])
    return said

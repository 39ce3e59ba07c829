"""Why a step looks as it does: a few true sentences, put together from the step's events and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from engine.hooks import HostWait, RequestFinished, RequestPreempted, RequestScheduled, RowFreed, RowMoved
from engine.snapshot import RequestView

from ..recording import RunnerStep, StepRecord
from .sentences import NAMED, Sentence, count, line, names, of, once, words
from .why_sampling import grammars, prompt_logprobs


def why(record: StepRecord) -> list[Sentence]:
    """Up to four lines: what ran and waits; what grammars and prompt logprobs did; who left or moved; host waits. What
    the runners did alike is said once."""
    steps = list(record.runners.values())
    budget, rows = _setting(record, "max_num_batched_tokens"), _setting(record, "max_num_seqs")
    ran = [
        *once(steps, lambda step: _scheduled(step, budget)),
        *once(steps, _cached),
        *once(steps, _left_out),
        *once(steps, lambda step: _waiting(step, budget, rows)),
    ]
    left = [*once(steps, _preempted), *once(steps, _finished), *_rows(steps)]
    asked = [*once(steps, grammars), *once(steps, prompt_logprobs)]
    return [sentence for sentence in (line(ran), line(asked), line(left), _host_waits(steps)) if sentence]


def _scheduled(step: RunnerStep, budget: int | None) -> list[Sentence]:
    events: list[RequestScheduled] = [e for e in step.of(RequestScheduled) if e.num_tokens]
    if not events:
        over = not step.snapshot.running and not step.snapshot.waiting
        return [[words("No request is left: nothing ran." if over else "Nothing was scheduled.")]]
    total, views = sum(e.num_tokens for e in events), _views(step)
    decodes = [e.request_id for e in events if _is_decode(e, _known(views, e))]
    prefills = [e for e in events if e.request_id not in set(decodes)]
    parts: list[Sentence] = []
    if decodes:
        parts.append([*names(decodes), words(f" one token{' each' if len(decodes) > 1 else ''}")])
    parts += [[of(e.request_id), words(f" {_chunk(e, _known(views, e))}")] for e in prefills[:NAMED]]
    if len(prefills) > NAMED:
        rest = prefills[NAMED:]
        parts.append([words(f"{len(rest)} more prefills, {sum(e.num_tokens for e in rest)} tokens together")])
    ran = f"Ran {total} of {budget} budget tokens: " if budget else f"Ran {count(total, 'token')}: "
    return [[words(ran), *line(parts, "; "), words(".")]]


def _is_decode(event: RequestScheduled, known: int) -> bool:
    return event.kind == "running" and event.num_tokens == 1 and event.num_computed_tokens >= known


def _chunk(event: RequestScheduled, known: int) -> str:
    end = event.num_computed_tokens + event.num_tokens
    if event.num_tokens >= known:
        what = "its prompt" if event.kind != "resumed" else "its tokens again, after the preemption"
        return f"{what}, {'all ' if known > 1 else ''}{count(known, 'token')}"
    if end >= known:
        return f"the last {event.num_tokens} of {known}"
    return f"a chunk of {event.num_tokens}, now {end} of {known}"


def _cached(step: RunnerStep) -> list[Sentence]:
    size = step.snapshot.pool.block_size
    hits = [e for e in step.of(RequestScheduled) if e.kind != "running" and e.num_cached_tokens > 0]
    said = []
    for e in hits[:NAMED]:
        found = f"{count(e.num_cached_tokens, 'token')} ({count(e.num_cached_tokens // size, 'block')})"
        said.append([of(e.request_id), words(f" found {found} in the prefix cache.")])
    if len(hits) > NAMED:
        rest = hits[NAMED:]
        said.append([words(f"{len(rest)} more found {sum(e.num_cached_tokens for e in rest)} tokens there.")])
    return said


def _waiting(step: RunnerStep, budget: int | None, rows: int | None) -> list[Sentence]:
    """Names a cause only where the numbers prove it."""
    waiting, running, pool = step.snapshot.waiting, step.snapshot.running, step.snapshot.pool
    if not waiting:
        return []
    head = _views(step).get(waiting[0])
    blocks = -(-(len(head.prompt_token_ids) + len(head.output_token_ids)) // pool.block_size) if head else 0
    if budget and sum(e.num_tokens for e in step.of(RequestScheduled)) >= budget:
        cause = ": the token budget is spent"
    elif len(running) == rows:
        cause = ": every row is taken"
    elif head and blocks > len(pool.free):
        free = f"{len(pool.free)} {'is' if len(pool.free) == 1 else 'are'} free"
        cause = f": {head.request_id} needs {count(blocks, 'block')} and {free}"
    else:
        cause = ""
    return [[*names(waiting), words(f" wait{'s' if len(waiting) == 1 else ''}{cause}.")]]


def _left_out(step: RunnerStep) -> list[Sentence]:
    """Running requests that this step did without."""
    scheduled = {e.request_id for e in step.of(RequestScheduled)}
    out = [r for r in step.before.running if r in step.snapshot.running and r not in scheduled]
    if not out or not scheduled:
        return []
    pool, views = step.snapshot.pool, [v for v in step.snapshot.requests if v.request_id in out]
    starved = not pool.free and all(len(v.block_ids) * pool.block_size <= v.num_computed_tokens for v in views)
    return [[*names(out), words(f" sat this step out{': no block was free' if starved else ''}.")]]


def _preempted(step: RunnerStep) -> list[Sentence]:
    said = []
    for e in step.of(RequestPreempted):
        cause = [of(e.by), words(" needed a block and none was free; ")]
        if e.by == e.request_id:
            cause = [words("it needed a block itself and none was free; ")]
        computed = count(e.num_computed_tokens, "computed token")
        lost = f"its {computed} must be computed again or found in the prefix cache."
        said.append([of(e.request_id), words(" was preempted: "), *cause, words(lost)])
    return said


def _finished(step: RunnerStep) -> list[Sentence]:
    events: list[RequestFinished] = list(step.of(RequestFinished))
    by_reason = {
        reason: [e.request_id for e in events if e.reason == reason] for reason in sorted({e.reason for e in events})
    }
    return [[*names(ids), words(f" finished ({reason}).")] for reason, ids in by_reason.items()]


def _rows(steps: Sequence[RunnerStep]) -> list[Sentence]:
    """What leaving rows cost: V1 moves others, V2 does not."""
    out: list[Sentence] = []
    moved, both = False, len(steps) > 1
    for step in steps:
        moves = row_moves(step)
        dropped = [e.request_id for e in step.of(RowFreed) if e.request_id in step.snapshot.running]
        if step.runner == "v1" and dropped:
            keeps = "; in V2 it stays" if both else ""
            out.append([words("In V1 "), *names(dropped), words(f" left the batch, its state kept aside{keeps}.")])
        freed = [str(e.row) for e in step.of(RowFreed)]
        if step.runner == "v1" and moves:
            moved = True
            parts = [_moved(move, other) for move, other in moves[:NAMED]]
            parts += [[words(f"{len(moves) - NAMED} more moved")]] if len(moves) > NAMED else []
            out.append([words("In V1 "), *line(parts, "; "), words(".")])
        elif step.runner == "v2" and freed:
            more = f" and {len(freed) - NAMED} more" if len(freed) > NAMED else ""
            rows = ", ".join(freed[:NAMED]) + more
            out.append([words(f"V2 freed row{'s' if len(freed) > 1 else ''} {rows}; nobody moved.")])
        elif step.runner == "v2" and moved:
            out.append([words("In V2 nobody moved.")])
    return out


def row_moves(step: RunnerStep) -> list[tuple[RowMoved, str]]:
    """V1's moves in order; a swap, which moves two requests, once: with the id of the other."""
    moves: list[tuple[RowMoved, str]] = []
    for e in step.of(RowMoved):
        first = moves[-1][0] if moves else None
        if e.how == "swap" and first and first.how == "swap" and (first.src, first.dst) == (e.dst, e.src):
            moves[-1] = (first, e.request_id)
        else:
            moves.append((e, ""))
    return moves


def _moved(move: RowMoved, other: str) -> Sentence:
    if move.how == "condense":
        return [of(move.request_id), words(f" moved from row {move.src} into the hole at row {move.dst}")]
    both = [of(move.request_id), *([words(" and "), of(other)] if other else [])]
    return [*both, words(f" swapped rows {move.src} and {move.dst}, decodes first")]


def _host_waits(steps: Sequence[RunnerStep]) -> Sentence:
    said: list[str] = []
    for step in steps:
        waits: list[HostWait] = [e for e in step.of(HostWait) if e.inside_step]
        if waits:
            milliseconds = sum(e.end_ns - e.begin_ns for e in waits) / 1e6
            reasons = ", ".join(dict.fromkeys(e.reason for e in waits))
            length = f"{milliseconds:.1f}" if milliseconds >= 0.05 else "under 0.1"
            times = f"{count(len(waits), 'time')} inside the step ({reasons}; {length} ms)"
            said.append(f"{step.runner.upper()} waited {times}")
        else:
            said.append(f"{step.runner.upper()} did not wait inside the step")
    return [words("; ".join(said) + ".")] if said else []


def _views(step: RunnerStep) -> dict[str, RequestView]:
    """The requests as they were when the step was scheduled; those added in it as they are now."""
    return {v.request_id: v for v in (*step.snapshot.requests, *step.before.requests)}


def _known(views: dict[str, RequestView], event: RequestScheduled) -> int:
    """How many tokens a prefill of this request has to compute; after a preemption, most of its outputs too."""
    view = views.get(event.request_id)
    if view is None:
        return event.num_tokens
    again = len(view.output_token_ids) if event.kind == "resumed" else max(len(view.output_token_ids) - 1, 0)
    return len(view.prompt_token_ids) + (again if view.num_preemptions else 0)


def _setting(record: StepRecord, name: str) -> int | None:
    value = record.history.meta.get("config", {}).get(name)
    return value if isinstance(value, int) else None

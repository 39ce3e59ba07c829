"""What the tokens of a step do to its requests, when they arrive: the half of the scheduler that makes no step."""

from __future__ import annotations

import time

import numpy as np

from .hooks import GrammarAdvanced, PromptLogprobsComputed
from .request import Request
from .request_books import RequestBooks
from .sample.prompt_logprobs import PromptLogprobs
from .sched_output import ModelRunnerOutput, SchedulerOutput
from .scheduled_batch import ScheduledBatch

FEW_STOP_IDS = 8
"""Up to so many ids are compared one by one, which is cheaper than numpy's search."""


class TokenIntake(RequestBooks):
    """Nearly always nobody can end in a step. Then its tokens are booked by a few operations on whole columns, and
    Python sees a request where one of its blocks became full.
    """

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput, every_token: bool = True
    ) -> list[tuple[Request, list[int]]]:
        """Appends the step's tokens; returns requests that got any, in the runner's order, with the accepted ones.

        A request ends at a stop token (after min_tokens), at max_tokens or at max_model_len, and when its grammar
        says that the output is complete or refuses a token; what was sampled after that is dropped, as are tokens of
        requests that have ended and of a step that `recover` made void. Without `every_token` a quiet request is
        returned only when it ends.
        """
        step = scheduler_output.step
        if step not in self._in_flight:
            return []
        batch, now = self._in_flight[step].in_order_of(runner_output), time.monotonic()
        del self._in_flight[step]
        if runner_output.prompt_logprobs:
            self._take_prompt_logprobs(batch, runner_output.prompt_logprobs, step)
        tokens, counts = runner_output.sampled_token_ids, runner_output.num_sampled
        stays = None
        if batch.version != self.table.version:
            stays = self.table.generation[batch.rows] == batch.generations
            stays = None if np.count_nonzero(stays) == len(stays) else stays
        if stays is None and self._append_to_all(batch, tokens, counts, now):
            if batch.all_quiet and not every_token:
                return []
            wanted = range(len(batch.rows)) if every_token else np.flatnonzero(~batch.quiet).tolist()
            return [(batch.requests[i], tokens[i, : counts[i]].tolist()) for i in wanted]
        if batch.has_drafts:
            self._reject(batch, counts, stays)
        plain = self._plain(batch, tokens, counts, stays)
        self._append_plain(batch, plain, tokens, counts, now)
        updates: dict[int, tuple[Request, list[int]]] = {}
        for i in np.flatnonzero(plain if every_token else plain & ~batch.quiet).tolist():
            updates[i] = batch.requests[i], tokens[i, : counts[i]].tolist()
        for i in np.flatnonzero(~plain & (counts > 0)).tolist():
            request = batch.requests[i]
            if not request.is_finished:
                accepted = self._append(request, tokens[i, : counts[i]].tolist(), now, step)
                if every_token or request.is_finished or not request.quiet:
                    updates[i] = (request, accepted)
        return [updates[i] for i in sorted(updates)]

    def _take_prompt_logprobs(self, batch: ScheduledBatch, arrived: dict[str, PromptLogprobs], step: int) -> None:
        for request in batch.requests:
            if (found := arrived.get(request.request_id)) is not None:
                request.add_prompt_logprobs(found)
                if PromptLogprobsComputed in self._hooks.wanted and not request.is_finished:
                    self._emit_prompt_logprobs(request.request_id, step, found)

    def _emit_prompt_logprobs(self, rid: str, step: int, found: PromptLogprobs) -> None:
        stamp, count = self._hooks.stamp(), len(found.entries)
        self._hooks.emit(PromptLogprobsComputed(*stamp, rid, step, found.start, count, found.k, found.chunk_rows))

    def _reject(self, batch: ScheduledBatch, counts: np.ndarray, stays: np.ndarray | None) -> None:
        """Takes back the drafts that were not accepted: of d drafts and a token behind them `counts` [r] came. `stays`
        bool [r]: the row is still its request's; None: they all are."""
        table = self.table
        rejected = np.where(counts > 0, batch.num_sampled_at_most - counts, 0)
        if stays is None:
            table.rounds.add(batch.at, batch.num_drafts, counts)
            table.reject(batch.at, rejected)
            return
        table.rounds.add(batch.rows[stays], batch.num_drafts[stays], counts[stays])
        table.reject(batch.rows[stays], rejected[stays])
        for i in np.flatnonzero(~stays & (counts > 0) & (batch.num_drafts > 0)).tolist():
            # It has ended; or was preempted in flight, has given its computed tokens back and waits for these alone.
            request = batch.requests[i]
            request.add_rounds([int(counts[i]) - 1], int(batch.num_drafts[i]))
            request.num_output_placeholders -= int(rejected[i])

    def _append_to_all(self, batch: ScheduledBatch, tokens: np.ndarray, counts: np.ndarray, now: float) -> bool:
        """Appends the tokens i64 [r, N + 1] of which `counts` [r] are each request's, all still in their rows, and
        takes back the drafts that were not accepted. False, with nothing changed, if one may end here or got none."""
        table, at = self.table, batch.at
        known = table.num_tokens[at] + counts
        if np.count_nonzero(counts) < len(counts) or np.count_nonzero(known >= table.limit[at]):
            return False
        if batch.any_constrained or self._stops(tokens, counts) is not None:
            return False
        table.arrived.add(at, tokens)
        if batch.awaits_first_token:
            self._note_first_tokens(batch.rows, now)
            batch.awaits_first_token = False
        table.num_tokens[at] = known
        if batch.has_drafts:
            table.rounds.add(at, batch.num_drafts, counts)
            table.num_computed_tokens[at] += counts - batch.num_sampled_at_most
        table.num_output_placeholders[at] -= batch.num_sampled_at_most
        table.last_token_time[at] = now
        self._publish_full(batch.rows, known)
        return True

    def _plain(
        self, batch: ScheduledBatch, tokens: np.ndarray, counts: np.ndarray, stays: np.ndarray | None
    ) -> np.ndarray:
        """bool [r]: a request that got tokens, is still in its row and can't end here."""
        table, rows = self.table, batch.rows
        plain = np.asarray((counts > 0) & (table.num_tokens[rows] + counts < table.limit[rows]) & ~batch.constrained)
        if stays is not None:
            plain &= stays
        stops = self._stops(tokens, counts)
        if stops is not None:
            plain &= ~stops
        return plain

    def _stops(self, tokens: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
        """bool [r]: some of its tokens may end a request; None if that is nowhere so."""
        stop_ids = self.table.stop_token_ids
        if not stop_ids.size:
            return None
        if stop_ids.size > FEW_STOP_IDS:
            found = np.isin(tokens, stop_ids)
        else:
            found = tokens == stop_ids[0]
            for stop_id in stop_ids[1:]:
                found |= tokens == stop_id
        if not np.count_nonzero(found):
            return None
        # Behind a request's own tokens is whatever was there.
        stops = np.any(found & (np.arange(tokens.shape[1]) < counts[:, None]), axis=1)
        return stops if np.count_nonzero(stops) else None

    def _append_plain(
        self, batch: ScheduledBatch, plain: np.ndarray, tokens: np.ndarray, counts: np.ndarray, now: float
    ) -> None:
        """Appends the tokens i64 [r, N + 1] of the rows where `plain` bool [r], with `counts` [r] of them."""
        table, at = self.table, np.flatnonzero(plain)
        rows, counts = batch.rows[at], counts[at]
        table.arrived.add(rows, tokens[at])
        self._note_first_tokens(rows, now)
        known = table.num_tokens[rows] + counts
        table.num_tokens[rows] = known
        table.num_output_placeholders[rows] -= counts
        table.last_token_time[rows] = now
        self._publish_full(rows, known)

    def _publish_full(self, rows: np.ndarray, known: np.ndarray) -> None:
        """Publishes the blocks that became full with the `known` i64 tokens of `rows`."""
        if not self.kv_cache.enable_caching:
            return
        usable = np.minimum(known, self.table.num_computed_tokens[rows])
        full = usable >= self.table.publish_at[rows]
        if np.count_nonzero(full):
            self._publish_rows(rows[full], usable[full])

    def _note_first_tokens(self, rows: np.ndarray, now: float) -> None:
        """Called before the tokens of `rows` are counted."""
        table = self.table
        for row in rows[table.num_tokens[rows] == table.prefill_len[rows]].tolist():
            request = self._request(row)
            if request.first_token_time is None:
                request.first_token_time = now

    def _append(self, request: Request, token_ids: list[int], now: float, step: int) -> list[int]:
        """Appends `token_ids`, which `step` sampled, one by one, as far as `request` goes; returns those."""
        request.num_output_placeholders -= len(token_ids)
        count, reason = 0, None
        while reason is None and count < len(token_ids):
            request.append_output(token_ids[count], now)
            reason = self._finish_reason(request, token_ids[count])
            count += 1
        grammar = request.structured_output
        if grammar is not None and GrammarAdvanced in self._hooks.wanted:
            taken = tuple(token_ids[: count - (grammar.error is not None)])
            end = (grammar.is_terminated, grammar.error)
            self._hooks.emit(GrammarAdvanced(*self._hooks.stamp(), request.request_id, step, taken, *end))
        if reason is None:
            self._publish(request)
        else:
            self._finish(request, reason)
        return token_ids[:count]

    def _finish_reason(self, request: Request, token_id: int) -> str | None:
        params, grammar = request.sampling_params, request.structured_output
        if grammar is not None and not grammar.accept_token(token_id):
            request.stop_reason = grammar.error
            return "error"
        if token_id in request.stop_token_ids and request.num_output_tokens >= params.min_tokens:
            request.stop_reason = token_id if token_id in params.stop_token_ids else None
            return "stop"
        if grammar is not None and grammar.is_terminated:
            return "stop"
        if request.num_output_tokens >= request.max_tokens or request.num_tokens >= self.max_model_len:
            return "length"
        return None

    def _publish(self, request: Request) -> None:
        self.kv_cache.cache_blocks(request)
        if request.row >= 0:
            self._note_blocks(request)

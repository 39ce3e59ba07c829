"""A session: one or two engines on the same prompts, and a cursor over the steps that they have done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine import LLM, SamplingParams
from engine.hooks import Event

from .conditions import parse_condition
from .engines import RUNNERS, expect, runner_names, start_logs
from .prompts import SessionRequest, parse_prompts
from .provenance import describe
from .recording import COLORS, Recording, RunnerStep, StepRecord
from .runner_log import RunnerLog

MAX_STEPS = 10_000
"""Where `run` and `run_until` give up: an engine that goes on for so long is not making a text."""


class Session:
    """Runs the same requests on V1, on V2, or on both, and keeps every step.

    `prompts` is a text, a dict (prompt or prompt_token_ids, max_tokens, priority, sampling_params, arrive_at_step,
    chat) or a list of them; they become requests A, B, C, … on every runner. `sampling_params` is one for all or a
    list, greedy with 32 tokens if left out; with `chat` a text is a user's message and goes through the model's chat
    template. With `trace_sampling` every draw is recorded for the view "sampling", which costs each step work of its
    own; with `trace_drafts` what becomes of each draft, for the view "acceptance". The other keywords are those of
    `engine.LLM`; the runners share one copy of the weights.

    The runners work one after the other, never at once, so that neither disturbs the other's times. `back` and `goto`
    move a cursor over the recorded steps; the engines never rewind. From an earlier cursor, `step` and `run` first move
    on through the record and then run on.
    """

    def __init__(
        self,
        prompts: Any,
        runners: str | Sequence[str] = RUNNERS,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        chat: bool = False,
        trace_sampling: bool = False,
        trace_drafts: bool = False,
        **engine_keywords: Any,
    ) -> None:
        self._logs: list[RunnerLog] = []
        self._trace_sampling = trace_sampling
        self._trace_drafts = trace_drafts
        self._keywords: dict[str, Any] = {}
        self._start(
            {"prompts": prompts, "runners": runners, "sampling_params": sampling_params, "chat": chat}, engine_keywords
        )

    def _start(self, given: dict[str, Any], keywords: dict[str, Any]) -> None:
        """Builds everything anew, and takes it over only when all of it is there."""
        names = runner_names(given["runners"])
        requests = parse_prompts(given["prompts"], given["sampling_params"], chat=given["chat"])
        logs = start_logs(names, keywords, self._logs, self._keywords)
        try:
            expect(logs, requests)
        except BaseException:
            for log in logs:
                log.close()
            raise
        for log in self._logs:
            log.close()
        self._given, self._keywords, self._logs = given, keywords, logs
        self.trace_sampling = self._trace_sampling
        self.trace_drafts = self._trace_drafts
        self._cursor = 0
        self._at_open = False
        self._names = 0
        self.recording = Recording(describe(logs[0].llm))
        self._introduce(requests)

    def _introduce(self, requests: list[SessionRequest]) -> None:
        """Gives requests their labels and colours, the same everywhere."""
        for request in requests:
            self.recording.colors[request.request_id] = COLORS[self._names % len(COLORS)]
            self.recording.prompts[request.request_id] = self._label(request)
            self._names += 1

    def _label(self, request: SessionRequest) -> str:
        if isinstance(request.prompt, str):
            return request.prompt
        return "".join(self._token_text(token) for token in request.prompt["prompt_token_ids"])

    def _token_text(self, token: int) -> str:
        tokenizer = self._logs[0].llm.loaded.tokenizer
        return f"<{token}>" if tokenizer is None else tokenizer.token_text(token)

    @property
    def runners(self) -> tuple[str, ...]:
        """The runners of this session, V1 first."""
        return tuple(log.name for log in self._logs)

    @property
    def trace_sampling(self) -> bool:
        """Whether the next steps record how each token is drawn; it may be set at any time."""
        return self._trace_sampling

    @trace_sampling.setter
    def trace_sampling(self, on: bool) -> None:
        self._trace_sampling = on
        for log in self._logs:
            log.trace_sampling(on)

    @property
    def trace_drafts(self) -> bool:
        """Whether the next steps record what becomes of each draft; it may be set at any time."""
        return self._trace_drafts

    @trace_drafts.setter
    def trace_drafts(self, on: bool) -> None:
        self._trace_drafts = on
        for log in self._logs:
            log.trace_drafts(on)

    @property
    def keywords(self) -> dict[str, Any]:
        """The engine keywords that this session was made with."""
        return dict(self._keywords)

    @property
    def given(self) -> dict[str, Any]:
        """The prompts, runners, sampling_params and chat that this session was made with."""
        return dict(self._given)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do, now or by a later arrival."""
        return not any(log.busy for log in self._logs)

    @property
    def cursor(self) -> int:
        """The step under the cursor; 0 is before the first."""
        return self.record.step

    @property
    def num_steps(self) -> int:
        """How many whole steps are recorded."""
        return len(self.recording.steps)

    @property
    def record(self) -> StepRecord:
        """The step under the cursor; before the first one, a record of step 0 that holds the states at the start."""
        if self._at_open:
            return self._partial()
        if self._cursor == 0:
            record = self.recording.start({log.name: log.initial for log in self._logs})
            self._learn_text(record)
            return record
        return self.recording.steps[self._cursor - 1]

    def _partial(self) -> StepRecord:
        """The step that `step_phase` has begun: each runner as far as it is."""
        number = self.num_steps + 1
        parts: dict[str, RunnerStep] = {}
        for log in self._logs:
            whole = log.steps[number - 1] if len(log.steps) >= number else None
            parts[log.name] = log.open or whole or log.idle_step(number)
        record = self.recording.partial(parts)
        self._learn_text(record)
        return record

    def llm(self, runner: str) -> LLM:
        """The engine of this runner, "v1" or "v2"."""
        for log in self._logs:
            if log.name == runner:
                return log.llm
        raise ValueError(f"no runner {runner!r} in this session, which has {', '.join(self.runners)}")

    def step(self) -> StepRecord:
        """One step on; the rest of the step if it has been begun by `step_phase`. At the end nothing changes."""
        return self.run(1)

    def step_phase(self) -> StepRecord:
        """One phase of the next step. The runners pause after the same phase; the record is of a step not yet whole."""
        if self._cursor < self.num_steps:
            return self.goto(self._cursor + 1)
        if self.finished:
            return self.record
        target = self.num_steps + 1
        for log in self._logs:
            if len(log.steps) < target:
                log.step_phase()
        self._at_open = any(len(log.steps) < target and log.open for log in self._logs)
        if not self._at_open:
            self._settle()
            self._cursor = self.num_steps
        return self.record

    def run(self, n: int) -> StepRecord:
        """`n` steps on, or to the end if that is nearer. V1 runs its steps without a stop, then V2 does."""
        _whole("run", n, 1)
        self._at_open = False
        return self.goto(self._cursor + n)

    def run_until(self, condition: str | type[Event] | Callable[[StepRecord], bool]) -> StepRecord:
        """On to the next step that `condition` holds for, or to the end.

        A condition is an event type (`engine.hooks.RowMoved`), a function of the record, or a name: "token",
        "finished", "preempted", "resumed", "row moved", "row freed", "prefix hit", "end". To know when to stop, both
        runners pause after each step; "end" alone runs without a pause, as `run` does.
        """
        holds = parse_condition(condition)
        if holds is None:
            return self.run(MAX_STEPS)
        for _ in range(MAX_STEPS):
            before = self._cursor
            record = self.step()
            if self._cursor == before or holds(record):
                return record
        return self.record

    def back(self) -> StepRecord:
        """The cursor one step back. The engines stay where they are; at the start nothing changes."""
        if self._at_open:
            self._at_open = False
            return self.record
        return self.goto(max(0, self._cursor - 1))

    def goto(self, step: int) -> StepRecord:
        """The cursor to this step; beyond the record the engines run there, or to the end if that is nearer."""
        _whole("goto", step, 0)
        self._at_open = False
        if step > self.num_steps:
            try:
                for log in self._logs:
                    log.run_to(min(step, self.num_steps + MAX_STEPS))
            finally:
                self._settle()
        self._cursor = min(step, self.num_steps)
        return self.record

    def reset(
        self,
        prompts: Any = None,
        runners: str | Sequence[str] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        chat: bool | None = None,
        trace_sampling: bool | None = None,
        trace_drafts: bool | None = None,
        **changes: Any,
    ) -> StepRecord:
        """Begins anew, with fresh engines and these changes; what is left out stays. Weights stay loaded if they can.

        If a change is refused, the session stays as it was.
        """
        asked = {"prompts": prompts, "runners": runners, "sampling_params": sampling_params, "chat": chat}
        given = {**self._given, **{key: value for key, value in asked.items() if value is not None}}
        self._start(given, {**self._keywords, **changes})
        if trace_sampling is not None:
            self.trace_sampling = trace_sampling
        if trace_drafts is not None:
            self.trace_drafts = trace_drafts
        return self.record

    def add(self, prompt: Any, sampling_params: SamplingParams | None = None) -> str:
        """Adds a request after the last recorded step, on every runner, and returns its id."""
        given = self._given["sampling_params"]
        params = sampling_params or (given if isinstance(given, SamplingParams) else None)
        requests = parse_prompts([prompt], params, self._names, self._given["chat"])
        expect(self._logs, requests)
        self._introduce(requests)
        return requests[0].request_id

    def abort(self, request_id: str) -> None:
        """Ends a request after the last recorded step, on every runner. One that has ended already stays as it is."""
        if request_id not in self.recording.prompts:
            known = ", ".join(self.recording.prompts) or "none"
            raise ValueError(f"no request {request_id!r} in this session; the requests are {known}")
        for log in self._logs:
            log.abort(request_id)

    def _settle(self) -> None:
        """Makes records of the steps that every runner has done; one without work idles through the other's."""
        longest = max(len(log.steps) for log in self._logs)
        for log in self._logs:
            if not log.busy:
                log.idle_to(longest)
        for index in range(self.num_steps, min(len(log.steps) for log in self._logs)):
            record = self.recording.append({log.name: log.steps[index] for log in self._logs})
            self._learn_text(record)

    def _learn_text(self, record: StepRecord) -> None:
        text = self.recording.token_text
        for done in record.runners.values():
            # A device knows its newest tokens a step before the host does.
            rows = (row.cells.get("last_sampled_token") for row in done.snapshot.rows)
            seen = [tuple(int(token) for token in rows if token is not None and token >= 0)]
            for request in done.snapshot.requests:
                seen += [request.prompt_token_ids, request.output_token_ids]
            seen += [draw.trace.token_ids for draw in done.draws]
            seen += [(*proposed.token_ids, verified.next_token_id) for proposed, verified in done.rounds]
            for token in set().union(*seen) - text.keys():
                text[token] = self._token_text(token)

    def __repr__(self) -> str:
        return f"<Session {'+'.join(self.runners)} step {self.cursor} of {self.num_steps}>"


def _whole(what: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{what}({value!r}): must be a whole number of at least {least}")

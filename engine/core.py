"""EngineCore: one engine's requests, scheduler and runner, and its two loops.

`phases()` is a generator over the phases of one step and `step()` drains it: stepping and running are the same code.
The two loops call the same functions in another order. Plain: a step's output is fetched before the next step is
scheduled. Overlapped (`async_scheduling`): the next step is scheduled and launched first, so the host works while the
device computes.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from . import snapshot as snapshots
from .config import EngineConfig
from .cpu_stream import run_on_compute_worker
from .hooks import Hooks
from .integrity import check_rows
from .interrupts import deferred_interrupt
from .models import LoadedModel
from .output_processor import OutputProcessor, ParentRequest
from .request import Request, RequestOutput
from .sample.structured_output import StructuredOutputManager
from .sched_output import ModelRunnerOutput, SchedulerOutput
from .scheduler import Scheduler
from .worker import Worker, build_decoder, choose_runner, num_kv_blocks

MAX_STEPS_IN_FLIGHT = 2
"""Overlapped loop: one step runs on the device while the host prepares the next (vLLM's batch queue of two)."""


GRAMMAR_WAIT_S = 0.1
"""A step that only waits for a grammar ends after this time, so that an engine without work still takes a Ctrl-C."""


class PendingOutput(Protocol):
    """A step's output, perhaps still on its way; `get_output` waits for it."""

    def get_output(self) -> ModelRunnerOutput: ...


@dataclass(frozen=True)
class InFlightStep:
    scheduler_output: SchedulerOutput
    output: PendingOutput


class EngineCore:
    """Raises ConfigError if `config` cannot be. `loaded` may be shared by several engines: steps only read it."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel, keep_finished: bool = False) -> None:
        self.use_v2 = choose_runner(config)
        model_max_len = loaded.config.max_position_embeddings
        # A drafter needs all but the number of blocks, which follows from what it takes.
        self.config = config.resolve(model_max_len=model_max_len, num_gpu_blocks=2)
        decoder = self._off_this_thread(lambda: build_decoder(self.config, loaded))
        num_blocks = num_kv_blocks(config, loaded.config, decoder.kv_bytes_per_token() if decoder else 0)
        self.config = config.resolve(model_max_len=model_max_len, num_gpu_blocks=num_blocks)
        self.loaded = loaded
        self.hooks = Hooks("v2" if self.use_v2 else "v1")
        self.worker = self._off_this_thread(lambda: Worker(self.config, self.use_v2, loaded, self.hooks, decoder))
        self.device = self.worker.device
        self.runner = self.worker.runner
        self.scheduler = Scheduler(
            self.config, self.hooks, self.use_v2,
            num_device_drafts=decoder.num_drafts if decoder and self.use_v2 else 0,
            num_lookahead_tokens=decoder.num_lookahead_tokens if decoder else 0,
        )  # fmt: skip
        self.structured_output = StructuredOutputManager(loaded.tokenizer, loaded.config.vocab_size, self.hooks)
        self.output_processor = OutputProcessor(loaded.tokenizer, self.hooks)
        self.in_flight: deque[InFlightStep] = deque()
        self.keep_finished = keep_finished
        self.finished: dict[str, Request] = {}
        """With `keep_finished`: requests that ended, so that snapshots still show them."""
        self._current: Iterator[str] | None = None
        self._outputs: list[RequestOutput] = []

    def _off_this_thread(self, make: Callable[[], Any]) -> Any:
        """Runs `make`, which fills large tensors, where the CPU's steps run; see `run_on_compute_worker`."""
        return make() if self.config.torch_device.type == "cuda" else run_on_compute_worker(make)

    # -- requests

    def check_requests(self, requests: list[Request]) -> None:
        """Raises ValueError if an id of theirs is taken or one can never run."""
        for request in requests:
            if self.output_processor.has_child(request.request_id):
                raise ValueError(f"request id {request.request_id!r} belongs to an unfinished request; choose another")
            self.scheduler.check_request(request)

    def add_request(self, parent: ParentRequest, requests: list[Request]) -> None:
        """Queues what makes one caller's request: all of `requests` or none.

        Raises ValueError, with nothing queued, as `check_requests` does.
        """
        self.check_requests(requests)
        with deferred_interrupt():
            for request in requests:
                self.scheduler.add_request(request)
            self.output_processor.add(parent, requests)

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Ends requests at any moment; unknown and finished ids are ignored. Their blocks are free at once.

        Returns what they had come to, with finish_reason "abort". Outputs of theirs that nobody has taken are dropped.
        """
        aborted = []
        with deferred_interrupt():
            for request_id in request_ids:
                children = self.output_processor.child_ids(request_id)
                self._remember(self.scheduler.requests[child] for child in children if child in self.scheduler.requests)
                self.scheduler.finish_requests(children)
                output = self.output_processor.abort(request_id)
                if output is not None:
                    aborted.append(output)
                self._outputs = [o for o in self._outputs if o.request_id != request_id]
        return aborted

    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished()

    # -- steps

    @property
    def step_count(self) -> int:
        return self.hooks.step

    def step(self) -> list[RequestOutput]:
        """One whole step, or the rest of the one that `phases()` left unfinished. Returns the outputs that arrived in
        it.

        A Ctrl-C is raised when the step has ended, and the next step returns its outputs. If the step fails,
        `recover` has run when the error is raised.
        """
        with deferred_interrupt(), self.device.scope():
            for _ in self._advance():
                pass
        return self.take_outputs()

    def take_outputs(self) -> list[RequestOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def phases(self) -> Iterator[str]:
        """The phases of one step, each named after it has run. An unfinished step goes on where it stopped."""
        step = self._advance()
        while True:
            # No StopIteration, or a Ctrl-C during the last phase would be lost behind it.
            with deferred_interrupt(), self.device.scope():
                phase = next(step, None)
            if phase is None:
                return
            yield phase

    def _advance(self) -> Iterator[str]:
        """`phases`, for who holds back interrupts himself."""
        if self._current is None:
            self.hooks.step += 1
            self._current = self._overlapped_step() if self.config.async_scheduling else self._plain_step()
        try:
            # No `yield from`: it would close the step with this generator, and a step left unfinished goes on later.
            while (phase := next(self._current, None)) is not None:
                yield phase
        except Exception:
            self.recover()
            raise
        self._current = None
        self.device.emit_spans(in_a_pause=False)

    def _plain_step(self) -> Iterator[str]:
        scheduled = self._schedule()
        yield "schedule"
        yield from self._execute(scheduled)
        if self.in_flight:
            self._deliver()
            self.scheduler.update_draft_token_ids(self.runner.take_draft_token_ids())
            yield "output"

    def _overlapped_step(self) -> Iterator[str]:
        scheduled = self._schedule()
        yield "schedule"
        yield from self._execute(scheduled)
        nothing_new = not scheduled.total_num_scheduled_tokens
        if len(self.in_flight) == MAX_STEPS_IN_FLIGHT or (self.in_flight and nothing_new):
            self._deliver()
            yield "output"

    def _schedule(self) -> SchedulerOutput:
        with self.hooks.span("schedule"):
            scheduled = self.scheduler.schedule(self.hooks.step)
            self.output_processor.mark_scheduled([new.req_id for new in scheduled.scheduled_new_reqs])
            return scheduled

    def _execute(self, scheduled: SchedulerOutput) -> Iterator[str]:
        """The runner's part: state, inputs, forward, sample. Everything for the device is only queued."""
        if not scheduled.total_num_scheduled_tokens:
            self.runner.finish_requests(scheduled)
            if not self.in_flight:
                self.structured_output.wait_for_any(self.scheduler.waiting, GRAMMAR_WAIT_S)
            return
        with self.hooks.span("update states"):
            self.runner.update_states(scheduled)
        yield "update states"
        with self.hooks.span("prepare inputs"):
            self.runner.prepare_inputs(scheduled)
        yield "prepare inputs"
        with self.hooks.span("forward"):
            self.runner.forward()
        yield "forward"
        grammar_output = None
        if scheduled.has_structured_output_requests:
            # Grammars must have seen the last tokens: the step in flight is delivered here and not behind this one.
            while self.in_flight:
                self._deliver()
            with self.hooks.span("grammar"):
                requests = self.scheduler.structured_output_requests(scheduled)
                drafts = self.runner.draft_token_ids([request.request_id for request in requests])
                grammar_output = self.structured_output.grammar_output(requests, drafts)
        with self.hooks.span("sample"):
            self.in_flight.append(InFlightStep(scheduled, self.runner.sample_tokens(grammar_output)))
        yield "sample"

    def _deliver(self) -> None:
        """Fetches the oldest step's output and hands its tokens on."""
        with self.hooks.span("output"):
            step = self.in_flight.popleft()
            output = step.output.get_output()
            every_token = self.output_processor.observed
            updates = self.scheduler.update_from_output(step.scheduler_output, output, every_token)
            self._outputs += self.output_processor.process(
                updates,
                output.logprobs,
                step.scheduler_output.step,
                self._stop_at_string,
                output.traces,
                output.draft_traces,
            )
            self._remember(request for request, _ in updates if request.is_finished)

    def _stop_at_string(self, request: Request, stop: str, num_output_tokens: int) -> None:
        if not request.is_finished:
            self.scheduler.finish_requests([request.request_id], "stop")
        request.finish_reason, request.stop_reason = "stop", stop
        request.drop_behind(num_output_tokens)

    def recover(self) -> None:
        """After a failure: waits for the device, gives up what is in flight, and lets every request be computed again.

        Nothing that reached the host is lost: a request keeps its tokens and goes on behind them.
        """
        with deferred_interrupt():
            self._current = None
            self.device.reset()
            self.in_flight.clear()
            self.scheduler.recover()
            self._off_this_thread(self.runner.reset)

    # -- looking

    def snapshot(self) -> snapshots.PendingSnapshot:
        """Frozen views of the state, without a wait here; see `snapshot.take`."""
        return snapshots.take(self)

    def drain(self) -> None:
        """Waits until the device is idle: a pause, outside any step."""
        self.device.drain()
        self.device.emit_spans()

    def check_integrity(self) -> None:
        """Raises AssertionError if scheduler, blocks and runner rows do not agree; the rows only between two steps."""
        self.scheduler.check_integrity()
        if self._current is None:
            check_rows(self.runner, self.scheduler)

    def close(self) -> None:
        """Ends the threads. The engine cannot step afterwards."""
        self.structured_output.close()
        self.device.close()
        gc.collect()

    def _remember(self, requests: Iterable[Request]) -> None:
        if self.keep_finished:
            self.finished.update((request.request_id, request) for request in requests)

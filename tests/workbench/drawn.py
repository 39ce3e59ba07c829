"""Records whose draws are traced, made by hand: a small sampler in plain Python gives the traces."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from engine.hooks import Sampled, SamplingTraced
from engine.sample.trace import MODEL, SamplingTrace, StageTrace
from tests.workbench.records import make_recording
from tests.workbench.vocabulary import PIECES
from workbench.recording import Recording, StepRecord

VOCAB = len(PIECES)
BIASED = 3
FUSED = ("allowed_token_ids", "logit_bias", "min_tokens")
GONE = -math.inf


def softmax(logits: list[float]) -> list[float]:
    total = sum(math.exp(x) for x in logits)
    return [math.exp(x) / total for x in logits]


def make_trace(runner: str, sampled: int, seed: int, greedy: bool = False) -> SamplingTrace:
    """A bias for one token, no penalty, temperature 0.5, the best 8: `sampled` wins by its noise. A greedy one has the
    model's logits alone. The logits are the same on both runners, the noise is each one's own."""
    rng = random.Random(seed)
    logits = [rng.gauss(0, 1.5) for _ in range(VOCAB)]
    logits[sampled] = max(logits) + (0.25 if greedy else -0.5)
    stages: list[tuple[tuple[str, ...], list[float]]] = [(MODEL, logits)]
    if not greedy:
        logits = [x + 1.5 * (t == BIASED) for t, x in enumerate(logits)]
        stages.append((FUSED if runner == "v2" else ("logit_bias",), logits))
        stages.append((("penalties",), logits))
        logits = [x / 0.5 for x in logits]
        stages.append((("temperature",), logits))
        best = sorted(range(VOCAB), key=lambda t: -logits[t])[:8]
        logits = [x if t in best else GONE for t, x in enumerate(logits)]
        stages.append((("top_k",), logits))
    own = random.Random(f"{runner} {seed}")
    noise = [0.0 if greedy else -math.log(own.expovariate(1.0)) for _ in range(VOCAB)]
    if not greedy:
        noise[sampled] = max(x + n for x, n in zip(logits, noise, strict=True)) - logits[sampled] + 0.5
    before, shown = stages[0][1], []
    for stage, after in stages:
        left = sum(x > GONE for x in after)
        mass = sum(p for p, x in zip(softmax(before), after, strict=True) if x > GONE)
        norm = math.log(sum(math.exp(x) for x in after))
        shown.append(StageTrace(stage, tuple(None if x == GONE else x for x in after), left, mass, norm))
        before = after
    return SamplingTrace(tuple(range(VOCAB)), tuple(shown), tuple(noise), sampled)


def make_drawn_recording(greedy: bool = False, **kwargs: Any) -> Recording:
    """`make_recording`, with a trace behind every token."""
    plain = make_recording(**kwargs)
    drawn = Recording(plain.meta, [], plain.token_text, plain.prompts, plain.colors)
    for record in plain.steps:
        runners = {}
        for name, done in record.runners.items():
            events: list[Any] = []
            for event in done.events:
                events.append(event)
                if isinstance(event, Sampled):
                    trace = make_trace(name, event.token_id, event.position, greedy)
                    place = (event.request_id, event.position, event.sampled_in_step)
                    events.append(SamplingTraced(event.step, name, event.time_ns, *place, trace))
            runners[name] = replace(done, events=tuple(events))
        drawn.append(runners)
    return drawn


def make_drawn_record(greedy: bool = False, **kwargs: Any) -> StepRecord:
    """The last step of `make_drawn_recording`."""
    return make_drawn_recording(greedy, **kwargs).steps[-1]

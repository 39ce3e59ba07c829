"""Random lives of requests on runner V2's state table: at every step of theirs the logits are the reference's."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import SamplingParams
from kernels import post_update
from tests.engine.sampler_bench import SamplerBench, sampler_bench
from tests.engine.sampler_requests import some_params, token_lists
from tests.engine.sampling_reference import processed

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.slow,
]  # the interpreter's NumPy: -inf - -inf
VOCAB, MAX_REQS = 40, 3
STOP_IDS = (8, 9)


@dataclass
class Life:
    prompt: list[int]
    params: SamplingParams
    row: int
    output: list[int] = field(default_factory=list)


def step(bench: SamplerBench, lives: list[Life], seed: int, with_padding: bool) -> None:
    """Samples a token of each request, checks the logits that it came from, and appends it on the device."""
    generator = torch.Generator().manual_seed(seed)
    rows = [life.row for life in lives]
    logits = torch.randn(len(rows) + with_padding, VOCAB, generator=generator) * 3
    plan, inputs = bench.plan(rows), bench.rows(rows, [len(life.output) for life in lives])
    if with_padding:
        inputs["idx_mapping"] = torch.cat([inputs["idx_mapping"], torch.tensor([-1], dtype=torch.int32)])
        inputs["positions"] = torch.cat([inputs["positions"], torch.tensor([0])])
        zeros = torch.zeros(len(rows) + 1, dtype=torch.int32)
        inputs["drafts"] = inputs["drafts"]._replace(expanded_local_pos=zeros, token_ids=zeros)
    behind = [logits, *bench.before_the_draw(plan, logits, **inputs).values()][-1]
    sampled = bench.sample(plan, logits, **inputs).sampled
    for i, life in enumerate(lives):
        expected = processed(logits[i].tolist(), life.params, life.prompt, life.output, STOP_IDS)
        np.testing.assert_allclose(behind[i].double().numpy(), expected, rtol=1e-5, atol=1e-5)
        life.output.append(int(sampled[i, 0]))
    states, n = bench.requests, len(rows)
    with torch.inference_mode():
        post_update(
            inputs["idx_mapping"][:n], states.num_computed_tokens.gpu, states.last_sampled_tokens,
            states.total_len.gpu, states.all_token_ids.gpu, sampled[:n], torch.ones(n, dtype=torch.int32),
            torch.zeros(n, dtype=torch.int32), torch.arange(n + 1, dtype=torch.int32),
            bench.sampler.penalties.output_bin_counts if plan.penalties else None, form=bench.form,
        )  # fmt: skip


@pytest.mark.parametrize("form", ["torch", "interpret"])
@given(data=st.data())
@settings(max_examples=15)
def test_random_lives(form: str, data: st.DataObject) -> None:
    lives: list[Life] = []
    with sampler_bench(vocab=VOCAB, max_reqs=MAX_REQS, form=form) as bench:
        for seed in range(data.draw(st.integers(3, 9), label="steps")):
            for life in list(lives):
                fate = data.draw(st.sampled_from(["goes on", "goes on", "ends", "is preempted"]), label="fate")
                if fate != "goes on":
                    bench.remove(life.row)
                    lives.remove(life)
                if fate == "is preempted":
                    row = bench.add(life.prompt, life.params, life.output, STOP_IDS)
                    lives.append(Life(life.prompt, life.params, row, list(life.output)))
            while len(lives) < MAX_REQS and data.draw(st.booleans(), label="another comes"):
                prompt, params = data.draw(token_lists(1, 5)), data.draw(some_params())
                lives.append(Life(prompt, params, bench.add(prompt, params, [], STOP_IDS)))
            bench.apply_staged_writes()
            # Some may be left out of a step.
            scheduled = [life for life in lives if data.draw(st.integers(0, 3), label="scheduled")]
            if scheduled:
                step(bench, scheduled, seed, data.draw(st.booleans(), label="padding"))

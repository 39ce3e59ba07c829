"""Grammars beside drafts: the host waits for the drafts of their requests alone, and a device may be late."""

from __future__ import annotations

from collections import Counter

import pytest

from engine import SamplingParams
from engine.models import LoadedModel
from tests.engine.drafters import ngram, sides
from tests.engine.engine_helpers import ids
from tests.engine.engine_helpers import tiny_llm as engine
from tests.engine.grammars import ENGINE, count_samples, held, text
from tests.engine.late_device import device_timing
from tests.engine.test_sync_budget import counted_waits, counting_steps

pytestmark = pytest.mark.slow  # many engines


@sides
def test_the_only_wait_that_is_added_is_for_drafts_of_requests_with_a_grammar(
    runner: str, loop: str, loaded: LoadedModel
) -> None:
    free = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompt = ids(*text("abcab" * 4))
    for params in ([free, free], [free, held(regex="[a-z]{20}", temperature=0, max_tokens=20)]):
        with engine(runner, loop, loaded=loaded, **ENGINE, **ngram(3)) as llm:
            samples = count_samples(llm)
            llm.generate([prompt, prompt], params, use_tqdm=False)
            waits = llm.core.device.waits
            assert waits.outside_step == ({"output": len(samples)} if runner == "v2" else {})
            if runner == "v1":
                assert waits.inside_step == {"sampled tokens": len(samples)}
            elif params[1] is free:
                assert waits.inside_step == {}
            else:  # none in the step of the prompt, one in each that verifies drafts of the other
                assert waits.inside_step == {"drafts": sum(samples)} and 3 < sum(samples) < len(samples)


@pytest.mark.parametrize("loop", ["plain", "overlapped"])
def test_v2_waits_for_the_drafts_once_and_reads_no_device_tensor(loop: str, loaded: LoadedModel) -> None:
    with engine("v2", loop, loaded=loaded, **ENGINE, **ngram(3)) as llm, counting_steps(llm) as counts:
        samples, waited = count_samples(llm), llm.core.runner.draft_token_ids
        of_drafts: Counter[str] = Counter()

        def counted(req_ids: list[str]) -> dict[str, list[int]]:
            with counted_waits() as own:
                drafts = waited(req_ids)
            of_drafts.update(own)
            return drafts

        llm.core.runner.draft_token_ids = counted
        params = [held(regex="[a-z]{20}", temperature=t, logprobs=1) for t in (0.0, 1.0)]
        llm.generate([ids(*text("abcab" * 4))] * 2, params, use_tqdm=False)
    assert counts == Counter()
    assert of_drafts["CpuEvent.synchronize"] == sum(samples) > 3
    assert set(of_drafts) <= {"CpuEvent.synchronize", "Event.wait", "Condition.wait"}


@pytest.mark.parametrize("timing", ["threads", "late"])
@sides
def test_a_device_may_be_as_late_as_it_likes(runner: str, loop: str, timing: str, loaded: LoadedModel) -> None:
    """What the host writes too early, or reads, is found by a device that runs only while somebody waits for it."""
    prompts = [ids(*text("abcab" * n)) for n in (2, 3, 4)]
    params = [held(regex="[abc]{20}", temperature=0), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
              held(regex="([ab]{2}[a-z]){5}", temperature=0)]  # fmt: skip
    answers = []
    for spec, own_timing in (({}, "threads"), (ngram(3), timing)):
        with device_timing(own_timing), engine(runner, loop, loaded=loaded, **ENGINE, **spec) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 3

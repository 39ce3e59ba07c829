"""What a long run costs: steps share what did not change, in memory and after a load."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from engine import SamplingParams
from engine.snapshot import BlockView, PoolView
from tests.workbench.sessions import TINY, prompt, tiny_session
from workbench import Recording
from workbench.recording import RunnerStep
from workbench.sharing import shared

BLOCKS = 2600


def pool(refs: tuple[int, ...], free: tuple[int, ...] = (1, 2)) -> PoolView:
    """A pool of blocks with these reference counts, made anew."""
    blocks = tuple(BlockView(i, ref, ("A" * (i + 1),) * ref, None) for i, ref in enumerate(refs))
    return PoolView(4, blocks, free, 0, 0)


def test_equal_parts_are_the_old_ones_and_the_value_is_the_new_one() -> None:
    old, new = pool((0, 1, 1)), pool((0, 1, 2))
    made = shared(new, old)
    assert made == new and made != old
    assert made.blocks[:2] == old.blocks[:2] and all(map(lambda a, b: a is b, made.blocks[:2], old.blocks[:2]))
    assert made.blocks[2] is new.blocks[2]
    assert made.free is old.free


def test_an_equal_value_is_the_old_one() -> None:
    old = pool((0, 1, 1))
    assert shared(pool((0, 1, 1)), old) is old


def test_nothing_alike_leaves_the_new_one() -> None:
    new = pool((3, 4), free=(7,))
    assert shared(new, pool((1, 2), free=())) is new
    assert shared(new, None) is new
    assert shared((), new) == ()


def test_a_tuple_that_grew_or_shrank_keeps_its_length() -> None:
    old = pool((0, 1, 1))
    longer, shorter = pool((0, 1, 1, 1)), pool((0, 1))
    for new in (longer, shorter):
        made = shared(new, old)
        assert made == new
        assert made.blocks[0] is old.blocks[0] and made.blocks[1] is old.blocks[1]


def _unshared(before: RunnerStep, after: RunnerStep) -> int:
    """How many blocks of two following steps are equal and yet two objects."""
    pairs = zip(before.snapshot.pool.blocks, after.snapshot.pool.blocks, strict=True)
    return sum(a == b and a is not b for a, b in pairs)


def test_the_steps_of_a_run_share_their_blocks_and_prompts_and_do_so_again_when_loaded(tmp_path: Path) -> None:
    session = tiny_session()
    session.step_phase()
    session.run_until("end")
    loaded = Recording.load(session.recording.save(tmp_path / "run.json"))
    for recording in (session.recording, loaded):
        for name in recording.runners:
            steps = [record.runners[name] for record in recording.steps]
            assert len(steps) > 5
            for before, after in pairwise(steps):
                assert _unshared(before, after) == 0
                pairs = zip(before.snapshot.requests, after.snapshot.requests, strict=False)
                same = [(a, b) for a, b in pairs if a.request_id == b.request_id]
                assert all(a.prompt_token_ids is b.prompt_token_ids for a, b in same)


@pytest.mark.slow
def test_a_step_of_a_large_pool_costs_what_it_changed() -> None:
    """2,600 blocks on two runners are 440 kB a step if each step has its own, 95 kB where steps share them."""
    keywords = {**TINY, "num_gpu_blocks_override": BLOCKS, "max_model_len": 128}
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    session = tiny_session([prompt(1, 8), prompt(2, 8)], **{**keywords, "sampling_params": params})
    session.run(8)
    assert len(session.record.runners["v2"].snapshot.pool.blocks) == BLOCKS
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(20):
            session.step()
        gc.collect()
        grown = (tracemalloc.get_traced_memory()[0] - before) / 20
    finally:
        tracemalloc.stop()
    assert grown < 200_000, f"{grown:.0f} bytes a step"


def test_what_was_recorded_is_not_changed_by_what_comes_later() -> None:
    session = tiny_session()
    session.run(3)
    kept = session.record.runners["v2"].snapshot
    copy = replace(kept, pool=replace(kept.pool, blocks=tuple(replace(block) for block in kept.pool.blocks)))
    session.run_until("end")
    assert kept == copy

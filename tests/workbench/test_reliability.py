"""What confidences said against what happened: both stages from the confidences that were used, and few data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import SamplingParams
from engine.dspark.calibration import Calibration, ece, fit, position_qualities
from engine.hooks import DraftProposed, DraftVerified
from tests.engine.dspark.golden import HEADS, ROOT, golden
from tests.workbench.drafted import CALIBRATION, MAX_DRAFTS, make_drafted_record
from tests.workbench.sessions import tiny_session
from workbench.codec import encode
from workbench.views.acceptance import traced, view_model
from workbench.views.acceptance_numbers import Round
from workbench.views.reliability import FEW, confidence_reliability, expected_ece, uncalibrated

T = (1.6, 0.7, 2.5)


def rounds_of(z: np.ndarray, accepted: np.ndarray, temperatures: Sequence[float] = (1, 1, 1)) -> Iterator[Round]:
    """Blocks [n, 3] whose confidences went through these temperatures."""
    used = 1 / (1 + np.exp(-z / np.array(temperatures)))
    for confidences, count in zip(used.tolist(), accepted.tolist(), strict=True):
        place = ("A", 7, 1)
        proposed = DraftProposed(1, "v2", 0, *place, (1, 2, 3), (1.0,) * 3, tuple(confidences))
        yield Round(1, proposed, DraftVerified(1, "v2", 0, *place, "standard", (0.5,) * 3, (0.5,) * 3, int(count), 4))


def overconfident(n: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    """z [n, 3] of a head that says T times too much, and how many drafts were accepted [n]."""
    rng = np.random.default_rng(3)
    right = rng.normal(1.0, 1.5, (n, 3))
    stands = rng.random((n, 3)) < 1 / (1 + np.exp(-right))
    return right * np.array(T), stands.cumprod(1).sum(1)


def test_what_the_head_said_itself_comes_back_from_what_was_used() -> None:
    z, temperatures = np.array([[-3.0, 0.0, 4.0]]), np.array(T)
    used = 1 / (1 + np.exp(-z / temperatures))
    np.testing.assert_allclose(uncalibrated(used, temperatures), 1 / (1 + np.exp(-z)), atol=1e-12)
    np.testing.assert_array_equal(uncalibrated(np.array([0.0, 1.0, 0.5]), temperatures), [0.0, 1.0, 0.5])


def test_both_stages_and_the_measures_of_each_position() -> None:
    z, accepted = overconfident()
    outcomes = np.arange(3) < accepted[:, None]
    calibration = fit(z, outcomes)
    found = confidence_reliability(list(rounds_of(z, accepted, calibration.temperatures)), encode(calibration))
    assert found is not None
    before, after = found["stages"]
    assert [before["name"], after["name"]] == ["before calibration", "after calibration"]
    assert before["ece"] > 3 * after["ece"]
    for k, (row, was, now) in enumerate(zip(found["rows"], calibration.before, calibration.after, strict=True)):
        changes = [(was.ece, now.ece), (was.auroc, now.auroc), (was.brier, now.brier), (was.ece, now.ece)]
        assert row == [str(k + 1), "4000", *(f"{a:.3f} → {b:.3f}" for a, b in changes)]
    for stage in found["stages"]:
        assert sum(stage["bars"]) == 12_000 and len(stage["bars"]) == 20
        assert [count for *_, count in stage["points"]] == [count for count in stage["bars"] if count]
    assert found["note"].startswith("temperatures ") and found["note"].endswith("fitted on 4,000 blocks")
    assert "Few" not in found["say"]


def test_without_a_calibration_there_is_one_stage() -> None:
    z, accepted = overconfident(300)
    found = confidence_reliability(list(rounds_of(z, accepted)), None)
    assert found is not None
    qualities = position_qualities(z, np.arange(3) < accepted[:, None])
    assert [row[2:] for row in found["rows"]] == [
        [f"{q.ece:.3f}", f"{q.auroc:.3f}", f"{q.brier:.3f}"] for q in qualities
    ]
    assert len(found["stages"]) == 1 and "`runnerscope dspark calibrate`" in found["note"]
    assert confidence_reliability([], None) is None


def test_few_blocks_say_what_chance_alone_does() -> None:
    z, accepted = overconfident(FEW)
    enough = confidence_reliability(list(rounds_of(z, accepted)), None)
    few = confidence_reliability(list(rounds_of(z[:40], accepted[:40])), None)
    assert enough is not None and "Few" not in enough["say"]
    assert few is not None and few["say"].startswith("120 prefixes of 40 blocks; 20 bins. Few: ")


def test_chance_makes_the_ece_that_is_said() -> None:
    """Right probabilities, drawn again and again, have the ECE that is expected of them."""
    rng = np.random.default_rng(5)
    p = rng.random(120)
    seen = np.mean([ece(p, (rng.random(120) < p).astype(float)) for _ in range(2000)])
    assert expected_ece(p) == pytest.approx(seen, rel=0.15)


def test_blocks_of_several_lengths_count_for_the_positions_they_have() -> None:
    record = make_drafted_record(confident=True, calibrated=True, requests=3, steps=40, max_tokens=30, blocks=128)
    rounds = traced(record)["v2"]
    found = confidence_reliability(rounds, encode(CALIBRATION))
    assert found is not None
    lengths = [one.num_drafts for one in rounds]
    assert [int(row[1]) for row in found["rows"]] == [sum(n >= k for n in lengths) for k in range(1, MAX_DRAFTS + 1)]
    assert found["rows"][0][5] == "0.100 → 0.010"
    one = next(r for r in rounds if r.num_drafts == 1)
    alone = confidence_reliability([one], encode(CALIBRATION))
    assert alone is not None and alone["rows"][0][3] == "– → –", "of one outcome there is no AUROC"


@pytest.mark.slow
def test_a_calibration_beside_the_draft_reaches_the_view(tmp_path: Path) -> None:
    head = ROOT / HEADS[0]
    draft = tmp_path / "draft"
    draft.mkdir()
    for file in (head / "draft").iterdir():
        (draft / file.name).symlink_to(file.resolve())
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    keywords: dict[str, Any] = {
        "model": str(head / "target"), "load_format": "auto", "dtype": "float32", "skip_tokenizer_init": True,
        "max_num_batched_tokens": 64, "speculative_config": {"method": "dspark", "model": str(draft)},
    }  # fmt: skip
    prompt = {"prompt_token_ids": golden(HEADS[0]).values["prompt"].tolist()}
    stages = []
    for temperatures in (None, (1.7, 0.6, 1.0, 2.0, 0.9)):
        if temperatures is not None:
            qualities = CALIBRATION.before[:1] * 5
            Calibration(temperatures, 9, qualities, qualities).save(draft)
        session = tiny_session([prompt], runners="v2", trace_drafts=True, sampling_params=params, **keywords)
        (shown,) = view_model(session.run_until("end"))["panels"]
        stages.append(shown["reliability"]["stages"])
    (plain,), (before, after) = stages
    assert before["bars"] == plain["bars"] and before["ece"] == pytest.approx(plain["ece"], abs=1e-3)
    assert after["bars"] != before["bars"]

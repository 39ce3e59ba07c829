"""Hidden states that are trained on: the target's, kept on disk, in memory or not at all."""

from pathlib import Path

import pytest
import torch

from engine.dspark.hidden_states import HiddenStates
from engine.dspark.target import prefill_with_hidden
from tests.engine.dspark.trainers import SETTINGS, greedy_sequences, target, trainer_on

pytestmark = pytest.mark.usefixtures("one_thread")


def test_states_in_memory_are_those_of_the_disk(tmp_path: Path) -> None:
    sequences = greedy_sequences(24, 2)
    kept, stored = (trainer_on(tmp_path / str(n), sequences, memory_bytes=n) for n in (0, 1 << 24))
    for indices in ([6, 1, 4], [4, 0]):
        for one, other in zip(kept.hidden.batch(indices), stored.hidden.batch(indices), strict=True):
            assert torch.equal(one, other)
    assert stored.hidden.num_computed == 4 and not (tmp_path / str(1 << 24) / "hidden").exists()
    one, other = kept.step().report(SETTINGS.loss), stored.step().report(SETTINGS.loss)
    assert one.loss == pytest.approx(other.loss, rel=1e-5)


def test_hidden_states_are_the_targets_whether_kept_or_not(tmp_path: Path) -> None:
    sequences = greedy_sequences(24, 2)
    ids, d = (-1, 0), target().config.hidden_size
    row_bytes = 3 * d * 4
    bound = row_bytes * (int(sequences.lengths[:5].sum()) + 3)

    def states() -> HiddenStates:
        return HiddenStates(target(), ids, sequences, tmp_path, bound, "tiny")

    hidden = states()
    for _ in range(2):
        chosen, last = hidden.batch([6, 1, 4])
        for row, index in enumerate((6, 1, 4)):
            expected_last, expected = prefill_with_hidden(target(), [sequences[index]], ids)
            length = int(sequences.lengths[index])
            torch.testing.assert_close(chosen[row, :length], expected[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(last[row, :length], expected_last[0], rtol=1e-4, atol=1e-4)
            assert not chosen[row, length:].any()
    # Sequence 6 lies past the bound, and is computed each time.
    assert hidden.num_computed == 4
    assert (tmp_path / "hidden.bin").stat().st_size <= bound
    unsynced = states()
    unsynced.batch([1])
    assert unsynced.num_computed == 1
    hidden.sync()
    again = states()
    again.batch([1, 4])
    assert again.num_computed == 0
    other = HiddenStates(target(), (-1,), sequences, tmp_path, bound, "tiny")
    other.batch([1])
    assert other.num_computed == 1


def test_no_cache_no_file(tmp_path: Path) -> None:
    hidden = HiddenStates(target(), (0,), greedy_sequences(24, 2), tmp_path / "none", 0, "tiny")
    hidden.batch([0])
    hidden.sync()
    assert hidden.num_computed == 1 and not (tmp_path / "none").exists()

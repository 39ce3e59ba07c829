"""Every form gives the integers of the released vLLM's kernels."""

from pathlib import Path

import pytest
import torch

from tests.kernels.batches import GOLDEN, NEVER_WRITTEN, golden_batch, run_step

FILES = sorted(GOLDEN.glob("*.safetensors"))


def test_all_sixteen_batches_are_here() -> None:
    assert len(FILES) == 16


@pytest.mark.parametrize("form", ["torch", "loop", "interpret"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_batch(path: Path, form: str) -> None:
    given, expected = golden_batch(path)
    out = run_step(given, form)

    num_reqs_padded, num_tokens_padded = len(expected["gathered_block_table"]), len(expected["slot_mapping"])
    gathered, slots = out.pop("gathered_block_table"), out.pop("slot_mapping")
    counts = out.pop("post_output_bin_counts")
    specified = expected["gathered_block_table"] != -1
    assert torch.equal(gathered[:num_reqs_padded][specified], expected.pop("gathered_block_table")[specified])
    assert (gathered[num_reqs_padded:] == NEVER_WRITTEN).all()
    assert torch.equal(slots[:num_tokens_padded], expected.pop("slot_mapping"))
    assert (slots[num_tokens_padded:] == NEVER_WRITTEN).all()
    pairs = expected.pop("post_output_bin_counts")
    assert torch.equal(counts.nonzero(), pairs)

    assert out.keys() == expected.keys()
    for name, value in expected.items():
        assert out[name].dtype == value.dtype, name
        assert torch.equal(out[name], value), f"{name}: {out[name]} != {value}"

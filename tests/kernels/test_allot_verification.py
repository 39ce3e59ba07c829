"""The lengths that a step has under a budget of drafts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.allot_verification import allot_verification

pytestmark = pytest.mark.slow  # interpreted kernels

FORMS = ("loop", "torch", "interpret")


def allotted(confidences: torch.Tensor, rows: list[int], most: list[int], budget: int, form: str) -> list[list[int]]:
    starts = torch.tensor([0, *most]).cumsum(0).int()
    out = torch.full((2, len(rows) + 3), -7, dtype=torch.int32)
    out[:, 0] = 0
    allot_verification(confidences, torch.tensor(rows).int(), starts, budget, *out, form=form)
    assert (out[:, len(rows) + 1 :] == -7).all()
    return out[:, : len(rows) + 1].tolist()


@given(
    seed=st.integers(0, 2**31), num_reqs=st.integers(1, 9), num_drafts=st.integers(1, 7), share=st.floats(0, 1),
    values=st.sampled_from([2, 3, 999]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_forms_agree(seed: int, num_reqs: int, num_drafts: int, share: float, values: int) -> None:
    """With few values there are many ties: powers of two, and 0."""
    g = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, values, (11, num_drafts), generator=g)
    confidences = chosen / 998 if values == 999 else torch.tensor([1.0, 0.5, 0.0])[chosen]
    rows = torch.randperm(11, generator=g)[:num_reqs].tolist()
    most = torch.randint(0, num_drafts + 2, (num_reqs,), generator=g).tolist()
    budget = round(share * num_reqs * num_drafts)
    expected = allotted(confidences, rows, most, budget, "loop")
    for form in FORMS[1:]:
        assert allotted(confidences, rows, most, budget, form) == expected, form


@pytest.mark.parametrize("form", FORMS)
def test_the_likeliest_get_the_rows(form: str) -> None:
    """Likelihoods 0.5 0.25 0.25 | 0.75 0.375 0 | 1 1 1, the last of a request that has room for one; and padding."""
    confidences = torch.tensor([[0.5, 0.5, 1.0], [0.75, 0.5, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    rows, most = [0, 1, 2, 3], [4, 4, 2, 0]
    assert allotted(confidences, rows, most, 0, form) == [[0, 1, 2, 3, 3], [0, 1, 2, 3, 4]]
    assert allotted(confidences, rows, most, 4, form) == [[0, 1, 3, 5, 5], [0, 1, 3, 5, 6]]
    assert allotted(confidences, rows, most, 7, form) == [[0, 3, 6, 8, 8], [0, 3, 6, 8, 9]]
    assert allotted(confidences, rows, most, 12, form) == [[0, 4, 8, 10, 10], [0, 4, 8, 10, 11]]


@pytest.mark.gpu
def test_compiled() -> None:
    g = torch.Generator().manual_seed(4)
    for num_reqs in (1, 3, 17, 200):
        confidences = torch.randint(0, 9, (201, 7), generator=g) / 8
        starts = torch.arange(num_reqs + 1).int() * 8
        idx = torch.randperm(201, generator=g)[:num_reqs].int()
        results = []
        for device, form in (("cpu", "torch"), ("cuda", "triton")):
            out = torch.zeros(2, num_reqs + 1, dtype=torch.int32, device=device)
            own = [x.to(device) for x in (confidences, idx, starts)]
            allot_verification(*own, 3 * num_reqs, *out, form=form)
            results.append(out.cpu())
        assert torch.equal(*results)

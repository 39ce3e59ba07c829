"""What `check` prints of a reader's answer: right, unwritten, wrong and where, raised; and it never raises itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from workbench.check import check

INF = float("inf")


def said(capsys: pytest.CaptureFixture[str], *args: Any, **kwargs: Any) -> str:
    check("it", *args, **kwargs)
    return capsys.readouterr().out.rstrip("\n")


def refuse(*args: object) -> None:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("yours", "truth", "expected"),
    [
        (3, 3, "✓ it"),
        ([1, 2], [1, 3], "✗ it: yours is [1, 2], right is [1, 3]. Hint: think"),
        (..., 3, "– it: not written yet. Hint: think"),
        (None, torch.ones(2), "– it: not written yet. Hint: think"),
        (torch.tensor([1.0, -INF]), torch.tensor([1.0, -INF]), "✓ it"),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2e-6]), "✓ it, within 2e-06"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, -INF]), "✗ it: at [1] yours is 2, right is -inf. Hint: think"),
        (torch.ones(2, 1), torch.ones(2), "✗ it: expected a tensor [2], got a tensor [2, 1]. Hint: think"),
        (7, torch.ones(2), "✗ it: expected a tensor [2], got 7. Hint: think"),
        (torch.ones(2), 7, "✗ it: yours is tensor([1., 1.]), right is 7. Hint: think"),
    ],
)
def test_values(capsys: pytest.CaptureFixture[str], yours: Any, truth: Any, expected: str) -> None:
    assert said(capsys, yours, truth, hint="think") == expected


def test_functions(capsys: pytest.CaptureFixture[str]) -> None:
    cases = [(torch.arange(3.0), 2), (torch.ones(2), 5)]

    def spoils(x: torch.Tensor, factor: int) -> torch.Tensor:
        return x.mul_(factor)

    def wrong(x: torch.Tensor, factor: int) -> torch.Tensor:
        return x * (factor if factor < 4 else 4)

    right = lambda x, factor: x * factor  # noqa: E731
    assert said(capsys, spoils, right, cases=cases) == "✓ it: right in 2 cases"
    assert cases[0][0].tolist() == [0, 1, 2], "each call has copies"
    assert said(capsys, wrong, right, cases=cases) == "✗ it: case 2 of 2: at [0] yours is 4, right is 5."
    assert said(capsys, refuse, right, cases=cases) == "– it: not written yet."
    assert said(capsys, lambda x, f: x[9], right, cases=cases).startswith("✗ it: it raised IndexError: ")

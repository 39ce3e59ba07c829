"""A step of 64 requests over 512 blocks shows within 100 ms beyond the model's own time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright isn't installed (pip install playwright)")

from tests.browser.notebook import made
from tests.browser.step_cost import BLOCKS, KERNEL, REQUESTS, measure

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from workbench.lab import LabServer

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.mark.parametrize(
    ("height", "touched", "most"),
    [
        pytest.param(1000, 450, 700, id="a common screen: rows, tokens and inputs are in sight"),
        pytest.param(2400, 1200, 2000, id="a screen so tall that the block tables are in sight too"),
    ],
)
def test_a_step_of_64_requests_is_on_the_page_within_100_ms(
    page: Page, lab: LabServer, height: int, touched: int, most: int
) -> None:
    """Medians of 16 steps in ms of processor time, on two cores without a GPU, traced (which costs some itself):

    | screen      | Python | script | layout | paint | the page in all | together | touched | on a clock |
    |-------------|--------|--------|--------|-------|-----------------|----------|---------|------------|
    | 1600 × 1000 | 30     | 9      | 8      | 9     | 39              | 70       | 287     | 73         |
    | 1600 × 2400 | 26     | 15     | 13     | 14    | 59              | 85       | 788     | 92         |

    "touched" are the nodes and attributes that change before the step is painted: the same on every machine, so it is
    held closely. Time is held with room for a slower machine, and what the clock says is only printed.
    """
    costs = lab.root / "costs.jsonl"
    costs.unlink(missing_ok=True)
    page.set_viewport_size({"width": 1600, "height": height})
    cost = measure(page, made(page, lab, f"cost{height}", KERNEL).dashboard(), costs)
    print(f"{REQUESTS} requests, {BLOCKS} blocks, 1600 × {height}: {cost}")
    assert 64 < cost.touched < touched, cost
    assert cost.most_touched < most, cost
    assert cost.python < 60, cost
    assert cost.total < 150, cost

"""The drawings of a static twin, which stand in its page as images."""

from __future__ import annotations

import base64
import re


def pictures(page: str) -> list[str]:
    """The SVG text of each."""
    return [base64.b64decode(data).decode() for data in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", page)]

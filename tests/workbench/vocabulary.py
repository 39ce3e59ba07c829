"""What the tokens of runs made by hand say; one of them holds markup."""

from __future__ import annotations

EVIL = "<img src=x onerror=alert(1)>"
PIECES = (
    "Why",
    " is",
    " V2",
    " fast",
    "?",
    " Because",
    " the",
    " GPU",
    " reads",
    "\n",
    " own",
    EVIL,
    "  ",
    " ü",
    "é",
    ".",
)

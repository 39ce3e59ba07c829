"""Trained heads that come with the package, found by the name of the model that they are for.

``heads/<model>/dspark`` is a DSpark draft, ``heads/<model>/mtp`` an MTP head, each with its card.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..config_checks import ConfigError
from ..models import LoadedModel

HEADS = Path(__file__).parent / "heads"
SPEC_MODEL = "speculative_config model"
"""What errors call a draft that the user gave."""
_STORAGE = re.compile(r"[.-](i?q\d\w*|b?fp?\d+)$", re.IGNORECASE)
"""How the weights are stored, at the end of a file's name: another model to nobody."""


def shipped_head(method: str, target: LoadedModel) -> Path:
    """Directory of the head of ``method`` ("dspark" or "mtp") for ``target``.

    Raises:
        ConfigError: none is shipped for it; says for which models one is.
    """
    wanted = _STORAGE.sub("", target.name).lower()
    shipped = shipped_heads(method)
    for name, path in shipped.items():
        if name.lower() == wanted:
            return path
    known = ", ".join(map(repr, shipped)) or "no model"
    without_weights = ", draft='lookup', which has no weights" if method == "dspark" else ""
    raise ConfigError(
        f"speculative method {method!r}: no head is known for {target.name!r}; give model=, the path of one that was "
        f"trained for it{without_weights}, or train one: runnerscope dspark train --head {method}. With the package "
        f"comes one for {known}"
    )


def shipped_heads(method: str) -> dict[str, Path]:
    """Name of the model and directory of every head of a method that comes with the package."""
    found = sorted(path.parent for path in HEADS.glob(f"*/{method}/config.json"))
    return {path.parent.name: path for path in found}

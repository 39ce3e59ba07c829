"""The shape of a DSpark draft: what ``config.json`` of a published draft checkpoint says, in one frozen form.

Field names are those of the published checkpoints (architecture ``Qwen3DSparkModel``); the backbone is an ordinary
Qwen3 decoder, so its part is read by :class:`engine.models.config.ModelConfig`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ..models.config import ModelConfig, ModelConfigError

DRAFT_CLASS = "Qwen3DSparkModel"
MarkovHeadType = Literal["vanilla", "gated", "rnn"]
_ALIASES = {
    "mask_token_id": "dspark_noise_token_id",
    "target_layer_ids": "dspark_target_layer_ids",
    "markov_rank": "dspark_markov_rank",
    "block_size": "n_predict",
}
"""Other spellings that checkpoints use for a field."""


class DraftConfigError(ModelConfigError):
    """A draft that cannot be used, or not with this target; the message says which value and what fits."""


@dataclass(frozen=True)
class DSparkConfig:
    """A draft: a backbone, the target layers it listens to, and its heads.

    Attributes:
        model: the backbone's decoder layers; hidden size and vocabulary are the target's.
        block_size: positions of a block, anchor included: drafts it was trained to propose.
        target_layer_ids: layers whose output is injected, strictly increasing; -1 is the embedding's output.
        num_target_layers: layers of the target it was trained for.
        mask_token_id: the id that fills the block behind the anchor.
        markov_rank: width of the Markov head; 0 for none.
        markov_head_type: how the head turns the token before into a bias (see heads.py).
        enable_confidence_head: whether a confidence is given for each position.
        confidence_head_with_markov: whether that head also sees the Markov embedding of the token before.
    """

    model: ModelConfig
    block_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    mask_token_id: int
    markov_rank: int
    markov_head_type: MarkovHeadType = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True

    def __post_init__(self) -> None:
        ids, layers = self.target_layer_ids, self.num_target_layers
        if self.block_size < 1:
            raise DraftConfigError(f"block_size must be at least 1, got {self.block_size}")
        if not ids or list(ids) != sorted(set(ids)):
            raise DraftConfigError(f"target_layer_ids must be strictly increasing and not empty, got {list(ids)}")
        # The last layer's output says what the target will sample next: a draft that reads it learns nothing.
        if ids[0] < -1 or ids[-1] > layers - 2:
            raise DraftConfigError(
                f"target_layer_ids {list(ids)} don't fit a target of {layers} layers: possible are -1 (the embedding) "
                f"to {layers - 2}, all but the last"
            )
        if not 0 <= self.mask_token_id < self.model.vocab_size:
            raise DraftConfigError(
                f"mask_token_id {self.mask_token_id} is not in the vocabulary of {self.model.vocab_size} tokens"
            )
        if self.markov_rank < 0:
            raise DraftConfigError(f"markov_rank must be 0 (no Markov head) or more, got {self.markov_rank}")
        if self.markov_head_type not in get_args(MarkovHeadType):
            raise DraftConfigError(
                f"markov_head_type {self.markov_head_type!r}: possible are {', '.join(get_args(MarkovHeadType))}"
            )
        if self.enable_confidence_head and self.confidence_head_with_markov and not self.markov_rank:
            raise DraftConfigError(
                "confidence_head_with_markov needs a Markov head: give markov_rank > 0, or set false"
            )

    @property
    def confidence_width(self) -> int:
        """Inputs of the confidence head."""
        return self.model.hidden_size + (self.markov_rank if self.confidence_head_with_markov else 0)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DSparkConfig:
        """Read the fields of a draft's ``config.json``.

        Raises:
            DraftConfigError: another kind of draft, a field is missing, or a value makes no sense.
        """
        classes = config.get("architectures") or []
        if DRAFT_CLASS not in classes:
            raise DraftConfigError(
                f"architecture {classes[0] if classes else None!r} is no DSpark draft this engine reads; "
                f"supported: {DRAFT_CLASS}"
            )
        if config.get("dspark_bonus_anchor"):
            raise DraftConfigError(
                "dspark_bonus_anchor=true is not supported: use a draft whose block starts with the anchor"
            )
        vocab_size, draft_vocab_size = config.get("vocab_size"), config.get("draft_vocab_size")
        if draft_vocab_size not in (None, vocab_size):
            raise DraftConfigError(
                f"draft_vocab_size {draft_vocab_size} differs from vocab_size {vocab_size}: a reduced draft vocabulary "
                "is not supported; use a draft with the target's whole vocabulary"
            )
        # GPU drafts list their own layer types; the decoder's reader must not take the class for an unknown family.
        model = ModelConfig.from_hf({**config, "architectures": ["Qwen3ForCausalLM"]})
        try:
            return cls(
                model=model,
                block_size=int(_field(config, "block_size")),
                target_layer_ids=tuple(int(i) for i in _field(config, "target_layer_ids")),
                num_target_layers=int(_field(config, "num_target_layers")),
                mask_token_id=int(_field(config, "mask_token_id")),
                markov_rank=int(_field(config, "markov_rank")),
                markov_head_type=config.get("markov_head_type") or "vanilla",
                enable_confidence_head=bool(config.get("enable_confidence_head", False)),
                confidence_head_with_markov=bool(config.get("confidence_head_with_markov", False)),
            )
        except (TypeError, ValueError) as error:
            if isinstance(error, DraftConfigError):
                raise
            raise DraftConfigError(f"a value makes no sense ({error})") from None

    def to_hf(self) -> dict[str, Any]:
        """The dictionary of a ``config.json`` that `from_hf` reads back as this."""
        own = {name: getattr(self, name) for name in _OWN_FIELDS}
        own["target_layer_ids"] = list(self.target_layer_ids)
        return {**self.model.to_hf(), "architectures": [DRAFT_CLASS], **own}

    def check_target(self, target: ModelConfig) -> None:
        """Raise DraftConfigError, with every mismatch, where this draft isn't one for ``target``."""
        pairs = {
            "vocab_size": (self.model.vocab_size, target.vocab_size),
            "hidden_size": (self.model.hidden_size, target.hidden_size),
            "num_target_layers": (self.num_target_layers, target.num_hidden_layers),
        }
        wrong = [f"{name} is {draft}, the target's is {own}" for name, (draft, own) in pairs.items() if draft != own]
        if wrong:
            raise DraftConfigError(
                f"the draft was made for another target: {'; '.join(wrong)}. Use a draft trained for this target"
            )

    def check_num_speculative_tokens(self, k: int) -> None:
        """Raise DraftConfigError unless 1 <= k <= block_size.

        Below block_size the backbone still runs over the whole block, so the drafts are the first k of the block's:
        shorter rounds, of the quality that was trained.
        """
        if not 1 <= k <= self.block_size:
            raise DraftConfigError(
                f"num_speculative_tokens={k}: this draft was trained for blocks of {self.block_size}; "
                f"possible are 1 to {self.block_size}"
            )


_OWN_FIELDS = (
    "block_size", "target_layer_ids", "num_target_layers", "mask_token_id", "markov_rank", "markov_head_type",
    "enable_confidence_head", "confidence_head_with_markov",
)  # fmt: skip


def read_draft_config(path: Path) -> DSparkConfig:
    """The ``config.json`` in the directory ``path``. Raises DraftConfigError, which names the file."""
    file = path / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DraftConfigError(f"{file}: cannot be read: {error.strerror}. Give the directory of a draft") from None
    except ValueError as error:
        raise DraftConfigError(f"{file}: not valid JSON ({error}). Fetch the file again") from None
    if not isinstance(values, dict):
        raise DraftConfigError(f"{file}: holds a JSON {type(values).__name__}, an object is wanted")
    try:
        return DSparkConfig.from_hf(values)
    except ModelConfigError as error:
        raise DraftConfigError(f"{file}: {error}") from None


def _field(config: Mapping[str, Any], name: str) -> Any:
    for spelling in (name, _ALIASES.get(name)):
        if spelling is not None and config.get(spelling) is not None:
            return config[spelling]
    raise DraftConfigError(f"the field {name!r} is missing")

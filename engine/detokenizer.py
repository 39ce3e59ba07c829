"""Token ids to text, one token at a time, with stop strings."""

from __future__ import annotations

from tokenizers.decoders import DecodeStream

from .models import Tokenizer
from .sampling_params import SamplingParams


class Detokenizer:
    """The growing text of one completion.

    `text` is all of it; `visible_text` holds back what may still turn out to be the beginning of a stop string. Bytes
    of an unfinished UTF-8 character wait for the token that completes it.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._stream = DecodeStream(skip_special_tokens=params.skip_special_tokens)
        self._held_back = max((len(s) for s in params.stop), default=1) - 1
        self._pending: list[int] = []
        self._num_tokens = 0
        self.finished = False
        self.text = ""

    def add(self, token_id: int) -> str | None:
        """Appends a token; returns the stop string that it completed (cut from the text), or None."""
        self._num_tokens += 1
        self._pending.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer.backend, token_id)
        except Exception:  # noqa: BLE001 - the library refuses byte sequences that are no UTF-8; begin again behind them
            piece = self._tokenizer.decode(self._pending, skip_special_tokens=self._params.skip_special_tokens)
            self._stream = DecodeStream(skip_special_tokens=self._params.skip_special_tokens)
        if piece is None:
            return None
        self._pending.clear()
        before = len(self.text)
        self.text += piece
        if self._num_tokens <= self._params.min_tokens:
            return None
        return self._cut_at_stop(before)

    def _cut_at_stop(self, before: int) -> str | None:
        found = [
            (at, stop)
            for stop in self._params.stop
            if (at := self.text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        at, stop = min(found)
        self.text = self.text[:at]
        self._pending.clear()
        return stop

    def finish(self) -> None:
        """No more tokens: what was held back is shown, and so are the bytes of a character that never became whole."""
        if self._pending:
            self.text += self._tokenizer.decode(self._pending, skip_special_tokens=self._params.skip_special_tokens)
            self._pending.clear()
        self.finished = True

    @property
    def visible_text(self) -> str:
        if self.finished or not self._held_back:
            return self.text
        return self.text[: max(0, len(self.text) - self._held_back)]

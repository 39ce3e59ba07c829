"""Structured output: grammars compiled by xgrammar off the step, a matcher for each request, bitmaps of allowed tokens.

A grammar stands on the host: it must have seen a request's last token before it can say which may follow. So the
engine launches a step's forward, takes the tokens of the step before, fills the bitmaps, and samples
(`EngineCore._execute`): the host waits for no more than it would without grammars, and the device runs on.

Drafts are judged in the same step, so the matcher walks over them, gives a bitmap behind each, and is rolled back: a
draft that the grammar refuses has probability 0 where it stands, and the rejection rule then can't accept it.
Where only the device knows the drafts (V2) the host waits for these few numbers too.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import numpy as np

from ..hooks import GrammarBitmaskFilled, Hooks
from ..models import Tokenizer
from ..sched_output import GrammarOutput
from .grammar_vocabulary import grammar_vocabulary, without_control_characters
from .structured_outputs_params import StructuredOutputsParams

if TYPE_CHECKING:
    import xgrammar

    from ..request import Request

MAX_COMPILED = 256
"""Compiled grammars that are kept, the last used ones."""
ALL_ALLOWED = -1
"""A word of a bitmap with every bit set."""
_BITS_OF_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint8)


class StructuredOutputRequest:
    """The grammar of one request, and how far its output has come in it. `stop_ids` may follow a complete output."""

    def __init__(self, compiled: Future[xgrammar.CompiledGrammar], stop_ids: Iterable[int]) -> None:
        self._compiled = compiled
        self._stop_ids = sorted(stop_ids)
        self._matcher: xgrammar.GrammarMatcher | None = None
        self.never_allowed: frozenset[int] = frozenset()
        """Special tokens that end nothing, known with the matcher, which complains on stderr when it refuses one."""
        self.error: str | None = None
        """Why the output can't be held to the grammar any longer."""

    @property
    def is_ready(self) -> bool:
        """The grammar is compiled, or can't be."""
        return self._compiled.done()

    @property
    def is_terminated(self) -> bool:
        """The output is complete and a stop token has ended it."""
        return self._matcher is not None and self._matcher.is_terminated()

    def accept_token(self, token_id: int) -> bool:
        """The output's next token. False, and `error` says why, if the grammar doesn't have it there."""
        matcher = self._get_matcher()
        if matcher is None:
            return False
        if matcher.is_terminated() or not matcher.accept_token(token_id):
            self.error = (
                f"token {token_id} isn't allowed by the grammar at this place: every token that is was forbidden by "
                "allowed_token_ids, bad_words or a logits processor"
            )
        return self.error is None

    def num_allowed(self, draft_token_ids: Sequence[int]) -> int:
        """How many of the drafts, from the first on, may follow the output. The place in the grammar stays."""
        matcher = self.live_matcher()
        if matcher is None:
            return 0
        count = _walk(matcher, self.never_allowed, draft_token_ids)
        matcher.rollback(count)
        return count

    def live_matcher(self) -> xgrammar.GrammarMatcher | None:
        """What says which tokens may come next; None if any may: the output is complete, or out of the grammar."""
        matcher = self._get_matcher()
        return None if matcher is None or matcher.is_terminated() else matcher

    def _get_matcher(self) -> xgrammar.GrammarMatcher | None:
        if self._matcher is None and self.error is None:
            import xgrammar

            try:
                compiled = self._compiled.result()
                self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=self._stop_ids)
                self.never_allowed = frozenset(compiled.tokenizer_info.special_token_ids) - {*self._stop_ids}
            except Exception as error:  # noqa: BLE001 - compilation failed, for whatever reason: the request ends with it
                self.error = f"the grammar can't be compiled: {_reason(error)}"
        return self._matcher if self.error is None else None


class StructuredOutputManager:
    """An engine's grammars. `vocab_size` is the model's, which may be more than the tokenizer's. `hooks`: whom it tells
    of bitmaps, if anybody."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, hooks: Hooks | None = None) -> None:
        self._hooks = hooks
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compilers: dict[bool, xgrammar.GrammarCompiler] = {}
        """For JSON, and for what is not."""
        self._executor: ThreadPoolExecutor | None = None
        self._compiled: OrderedDict[StructuredOutputsParams, Future[xgrammar.CompiledGrammar]] = OrderedDict()

    def check(self, params: StructuredOutputsParams) -> None:
        """Raises ValueError if `params` is no schema, expression or grammar; quick, since nothing is compiled."""
        parse_grammar(params)

    def start(self, params: StructuredOutputsParams, stop_ids: frozenset[int]) -> StructuredOutputRequest:
        """Begins to compile the grammar, unless that is done, and returns at once.

        Args:
            stop_ids: those of the request, which end the output of a model that has no end-of-sequence id.

        Raises:
            ValueError: nothing could ever end the output.
        """
        assert self._tokenizer is not None, "the front door refuses structured_outputs without a tokenizer"
        stop_ids = frozenset(self._tokenizer.eos_token_ids) or stop_ids
        if not stop_ids:
            raise ValueError("structured_outputs need a token that ends the output; give stop_token_ids")
        compiled = self._compiled.get(params)
        if compiled is None or (compiled.done() and compiled.exception() is not None):
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="runnerscope-grammar")
            compiled = self._compiled[params] = self._executor.submit(self._compile, params)
        self._compiled.move_to_end(params)
        while len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return StructuredOutputRequest(compiled, stop_ids)

    def wait_for_any(self, requests: Iterable[Request], timeout: float) -> None:
        """Returns when the grammar of one of `requests` is compiled, or after `timeout` seconds; at once if none is
        being compiled."""
        grammars = [request.structured_output for request in requests if request.structured_output is not None]
        compiling = [grammar._compiled for grammar in grammars if not grammar.is_ready]
        if compiling and len(compiling) == len(grammars):
            wait(compiling, timeout, FIRST_COMPLETED)

    def grammar_output(self, requests: Sequence[Request], drafts: Mapping[str, Sequence[int]]) -> GrammarOutput:
        """For a step that samples for each of `requests`, all of which have a grammar, behind the `drafts` by id."""
        grammars = [request.structured_output for request in requests if request.structured_output is not None]
        own = [drafts.get(request.request_id, ()) for request in requests]
        bitmask, num_allowed = self._fill(grammars, own)
        req_ids = tuple(request.request_id for request in requests)
        if self._hooks is not None and GrammarBitmaskFilled in self._hooks.wanted:
            self._emit_filled(self._hooks, req_ids, own, num_allowed, bitmask)
        return GrammarOutput(req_ids, bitmask, tuple(len(tokens) + 1 for tokens in own))

    def grammar_bitmask(
        self, requests: Sequence[StructuredOutputRequest], drafts: Sequence[Sequence[int]] | None = None
    ) -> np.ndarray:
        """i32 [rows, ceil(V / 32)], bit 1 for allowed: for each request a row, and one more for each of its drafts."""
        return self._fill(requests, [()] * len(requests) if drafts is None else drafts)[0]

    def _fill(
        self, requests: Sequence[StructuredOutputRequest], drafts: Sequence[Sequence[int]]
    ) -> tuple[np.ndarray, list[int]]:
        """The bitmask, and how many of each request's drafts its grammar goes along with."""
        num_rows = sum(len(own) + 1 for own in drafts)
        bitmask = np.full((num_rows, -(-self._vocab_size // 32)), ALL_ALLOWED, dtype=np.int32)
        row, num_allowed = 0, []
        for request, own in zip(requests, drafts, strict=True):
            matcher = request.live_matcher()
            count = 0
            if matcher is not None:
                count = _walk(matcher, request.never_allowed, own, bitmask[row : row + len(own) + 1])
                matcher.rollback(count)
            num_allowed.append(count)
            row += len(own) + 1
        return bitmask, num_allowed

    def _emit_filled(
        self,
        hooks: Hooks,
        req_ids: Sequence[str],
        drafts: Sequence[Sequence[int]],
        num_allowed: Sequence[int],
        bitmask: np.ndarray,
    ) -> None:
        # A row that allows everything has bits beyond the vocabulary.
        bits = _BITS_OF_BYTE[bitmask.view(np.uint8)].sum(axis=1, dtype=np.int64)
        counts, row = np.minimum(bits, self._vocab_size).tolist(), 0
        for req_id, own, count in zip(req_ids, drafts, num_allowed, strict=True):
            rows = tuple(counts[row : row + len(own) + 1])
            hooks.emit(GrammarBitmaskFilled(*hooks.stamp(), req_id, tuple(own), count, rows))
            row += len(rows)

    def close(self) -> None:
        """Ends the thread that compiles, when it is through with what it compiles now."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)  # it may be at a large grammar for seconds
            self._executor = None

    def _compile(self, params: StructuredOutputsParams) -> xgrammar.CompiledGrammar:
        import xgrammar

        is_json = params.kind in ("json", "json_object")
        if is_json not in self._compilers:
            assert self._tokenizer is not None
            vocabulary, encoding = grammar_vocabulary(self._tokenizer, self._vocab_size)
            if is_json:
                vocabulary = without_control_characters(vocabulary, encoding)
            info = xgrammar.TokenizerInfo(
                vocabulary,
                xgrammar.VocabType[encoding.upper()],
                vocab_size=self._vocab_size,
                stop_token_ids=list(self._tokenizer.eos_token_ids),
            )
            # Its own cache would hold what `_compiled` has let go.
            self._compilers[is_json] = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        return self._compilers[is_json].compile_grammar(parse_grammar(params))


def _walk(
    matcher: xgrammar.GrammarMatcher,
    never_allowed: frozenset[int],
    drafts: Sequence[int],
    bitmask: np.ndarray | None = None,
) -> int:
    """Takes the matcher behind the drafts that the grammar allows, and returns how many those are: it is to be rolled
    back so far.

    Row i of `bitmask` i32 [drafts + 1, ...] becomes what may follow the first i drafts. Behind a draft that is refused,
    is none (-1), or ends the output, rows stay as they are: no token of theirs is kept.
    """
    for count, draft in enumerate(drafts):
        if bitmask is not None:
            matcher.fill_next_token_bitmask(bitmask, count)
        if draft < 0 or draft in never_allowed or not matcher.accept_token(draft):
            return count
        if matcher.is_terminated():
            return count + 1
    if bitmask is not None:
        matcher.fill_next_token_bitmask(bitmask, len(drafts))
    return len(drafts)


def parse_grammar(params: StructuredOutputsParams) -> Any:
    """The `xgrammar.Grammar` of `params`. Raises ValueError, with xgrammar's reason, if there is none."""
    try:
        import xgrammar
    except ImportError as error:
        raise ValueError(
            f"structured_outputs need xgrammar, which can't be imported here ({error}); install "
            "runnerscope[structured], or xgrammar itself"
        ) from error
    try:
        if params.regex is not None:
            return xgrammar.Grammar.from_regex(params.regex)
        if params.grammar is not None:
            return xgrammar.Grammar.from_ebnf(params.grammar)
        if params.choice is not None:
            # A JSON string is an EBNF literal, its escapes included.
            return xgrammar.Grammar.from_ebnf(
                "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice)
            )
        schema = params.json if params.json is not None else '{"type": "object"}'
        return xgrammar.Grammar.from_json_schema(schema, any_whitespace=not params.disable_any_whitespace)
    except Exception as error:
        value = repr(getattr(params, params.kind))
        value = value if len(value) <= 200 else f"{value[:200]}..."
        raise ValueError(f"structured_outputs {params.kind}={value} can't be used: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """xgrammar's message without the time and the line of its source."""
    text = re.sub(r"^\[[\d:]+\] \S+?:\d+: (Check failed: .*? is false: )?", "", str(error).strip())
    return text.strip() or type(error).__name__

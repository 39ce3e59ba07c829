"""What runner V2 holds of DSpark: drafts for the next step, from what a step leaves on the device.

Everything is queued and nothing is waited for. All sizes follow from the step's own, buffers keep their addresses, and
so the whole of `propose` may be captured together with the step that it follows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.draft_inputs import DraftInputs, DraftRows, VerifiedStep, prepare_draft_inputs
from kernels.mask_drafts import Confidences, mask_drafts

from ..attention import kv_bytes_per_token
from ..spec_decode.draw import DraftSampler
from ..spec_decode.interface import NO_DRAFT, FinishedStep, SpecDecoder
from .calibration import Calibration
from .drafter import DSparkDrafter
from .lookup import check_lookup, lookup_drafts


class DSparkDecoder(SpecDecoder):
    """Drafts of a trained draft.

    The runner gives it, as `FinishedStep.hidden_states`, the outputs of the target's layers `target_layer_ids` side by
    side, [>= t, n * d], in every step, prompts too; and reserves blocks for `num_lookahead_tokens` beyond a step's own
    tokens. With fewer the block is cut short, which costs drafts and no more.

    Args:
        drafter: its weights.
        num_drafts: N, 1 to the block size; config.check_num_speculative_tokens has passed.
        sampler: of as many drafts.
        num_rows: R, rows of the runner's state, the padding's counted.
        max_num_tokens: T.
        calibration: None uses the confidences as they are.
    """

    keeps_drafts = True

    def __init__(
        self,
        drafter: DSparkDrafter,
        num_drafts: int,
        sampler: DraftSampler,
        *,
        num_rows: int,
        max_num_tokens: int,
        max_model_len: int,
        calibration: Calibration | None = None,
    ) -> None:
        super().__init__(num_drafts)
        config, device = drafter.config, drafter.device
        config.check_num_speculative_tokens(num_drafts)
        self._drafter, self._sampler, self._max_model_len = drafter, sampler, max_model_len
        self._query = config.block_size
        self.target_layer_ids = config.target_layer_ids
        cells = num_rows * self._query
        self.inputs = DraftInputs(
            torch.zeros(cells, dtype=torch.int32, device=device),
            torch.zeros(cells, dtype=torch.int64, device=device),
            torch.full((cells,), -1, dtype=torch.int64, device=device),
            torch.zeros(num_rows, dtype=torch.int32, device=device),
            torch.full((max_num_tokens,), -1, dtype=torch.int64, device=device),
        )
        self.calibration = calibration
        self._divisors = calibration.divisors(device)[:num_drafts] if calibration is not None else None
        self._kv_cache: Tensor | None = None
        self.confidences: Tensor | None = None
        """f32 [R, N], by row: chance of acceptance of each draft behind the ones before it, 0 where there is none.
        None without a confidence head. For schedule.py."""
        if config.enable_confidence_head:
            self.confidences = torch.zeros(num_rows, num_drafts, dtype=torch.float32, device=device)

    @property
    def num_lookahead_tokens(self) -> int:
        """The block is as long as it was trained for, however few drafts of it are used."""
        return self._query

    @property
    def draft_logits(self) -> Tensor | None:
        return self._sampler.logits

    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self._drafter.config.model, self._drafter.dtype)

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        self._kv_cache = self._drafter.allocate_kv_cache(num_blocks, block_size)

    @torch.inference_mode()
    def propose(self, step: FinishedStep) -> Tensor:
        assert self._kv_cache is not None, "propose: allocate_kv_cache comes first"
        assert step.hidden_states is not None, "propose: the outputs of target_layer_ids belong to the step"
        metadata, rows, query = step.metadata, step.rows, self._query
        r, t = metadata.num_reqs, metadata.num_tokens_padded
        prepare_draft_inputs(
            self.inputs,
            VerifiedStep(
                step.idx_mapping, metadata.query_start_loc, step.positions, metadata.slot_mapping, step.num_sampled,
                step.num_rejected, metadata.block_table,
            ),
            DraftRows(rows.last_sampled_tokens, rows.num_blocks),
            num_query=query, block_size=metadata.block_size, max_model_len=self._max_model_len,
            mask_token_id=self._drafter.config.mask_token_id, num_reqs_padded=r, num_tokens_padded=t,
            form=self._drafter.form,
        )  # fmt: skip
        inputs = self._cut(r, t)
        # Before the block, whose attention reads it.
        self._drafter.inject_context(
            step.hidden_states[:t], step.positions[:t], inputs.context_slot_mapping, self._kv_cache
        )
        longest = min(metadata.max_seq_len + query, self._max_model_len)
        hidden = self._drafter.backbone(inputs, metadata.block_table[:r], self._kv_cache, longest)
        anchors = inputs.input_ids.view(r, query)[:, 0]
        draw = None if self._sampler.logits is None else (self._sampler, step)
        drafts = self._drafter.propose(hidden, anchors, inputs.positions.view(r, query), self.num_drafts, draw)
        confidences = None
        if self.confidences is not None and drafts.confidence_logits is not None:
            confidences = Confidences(drafts.confidence_logits, self._divisors, self.confidences)
        mask_drafts(
            drafts.tokens, step.idx_mapping, inputs.slot_mapping, inputs.positions, self._max_model_len, confidences,
            rows.draft_tokens, form=self._drafter.form,
        )  # fmt: skip
        return drafts.tokens

    def _cut(self, r: int, t: int) -> DraftInputs:
        whole, cells = self.inputs, r * self._query
        return DraftInputs(
            whole.input_ids[:cells], whole.positions[:cells], whole.slot_mapping[:cells], whole.seq_lens[:r],
            whole.context_slot_mapping[:t],
        )  # fmt: skip


class LookupDecoder(SpecDecoder):
    """The draft without weights: `draft="lookup"`. It needs nothing but the tokens."""

    def __init__(
        self, num_drafts: int, max_model_len: int, *, min_ngram: int = 2, max_ngram: int = 4, window: int = 1024
    ) -> None:
        super().__init__(num_drafts)
        check_lookup(num_drafts, min_ngram, max_ngram, window)
        self._max_model_len = max_model_len
        self._rule = {"min_ngram": min_ngram, "max_ngram": max_ngram, "window": window}

    @property
    def num_lookahead_tokens(self) -> int:
        """It has no KV cache."""
        return 0

    @torch.inference_mode()
    def propose(self, step: FinishedStep) -> Tensor:
        rows = step.rows
        assert rows.all_token_ids is not None and rows.total_len is not None, "the runner keeps its tokens on the host"
        drafts = lookup_drafts(rows.all_token_ids, step.idx_mapping, rows.total_len, self.num_drafts, **self._rule)
        number = torch.arange(self.num_drafts, device=drafts.device)
        place = rows.total_len[step.idx_mapping.clamp(min=0).long()].unsqueeze(1) + number
        absent = (place >= self._max_model_len) | (step.num_sampled == 0).unsqueeze(1)
        return drafts.masked_fill(absent, NO_DRAFT)

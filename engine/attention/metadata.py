"""What attention needs to know about one step: plain data, made by the runners, read by every backend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass
class AttentionMetadata:
    """One step's batch of r requests, t tokens.

    Request i owns the query rows query_start_loc[i] : query_start_loc[i + 1].

    Sizes are host integers, so that nothing has to be read back from the device; where drafts were rejected the host
    only knows upper bounds of the lengths, and the device tensors hold the truth.
    """

    num_reqs: int
    num_tokens: int
    # Length of input_ids, positions and slot_mapping, >= num_tokens; the rows beyond num_tokens are padding.
    num_tokens_padded: int
    # i32 [>= r + 1] on the device, and the same on the host
    query_start_loc: Tensor
    query_start_loc_np: np.ndarray
    # i32 [>= r]: tokens in the cache after this step, the truth; and i32 [r]: the host's upper bounds of them
    seq_lens: Tensor
    seq_lens_np: np.ndarray
    # i32 [>= r, B]: ids of the cache blocks of each request, in order
    block_table: Tensor
    # i64 [num_tokens_padded]: cache slot (block id * block_size + offset) of each token; -1 writes nothing
    slot_mapping: Tensor
    block_size: int
    # Longest query and (an upper bound of) the longest sequence of the step
    max_query_len: int
    max_seq_len: int
    # The first num_decodes requests have query length 1
    num_decodes: int
    # Whether a request was admitted in this step: it may read blocks that another request fills in the same step
    has_admitted: bool = False

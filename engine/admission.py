"""Whether a request can ever run, decided when it is added, from numbers that don't change."""

from __future__ import annotations

from dataclasses import dataclass

from .request import Request


@dataclass(frozen=True)
class AdmissionLimits:
    """`num_usable_blocks` excludes the null block."""

    max_model_len: int
    block_size: int
    num_usable_blocks: int

    def max_new_tokens(self, num_prompt_tokens: int) -> int:
        """The most tokens that can answer a prompt of this length; below 1 means that the prompt itself can't run."""
        # NOTE: the last token is sampled and never computed, so it needs no slot.
        return min(self.max_model_len, self.num_usable_blocks * self.block_size + 1) - num_prompt_tokens

    def check(self, request: Request) -> None:
        """Raises ValueError, with numbers and remedies, if `request` can never run to its end."""
        rid, num_prompt = request.request_id, request.num_prompt_tokens
        if num_prompt == 0:
            raise ValueError(f"request {rid!r}: the prompt is empty; give at least one token (a BOS token will do)")
        if num_prompt > self.max_model_len - 1:
            raise ValueError(
                f"request {rid!r}: the prompt has {num_prompt} tokens, and max_model_len={self.max_model_len} has room "
                f"for at most {self.max_model_len - 1} and one new token; shorten the prompt or raise max_model_len"
            )
        num_tokens = min(num_prompt + request.max_tokens, self.max_model_len)
        num_blocks = -(-(num_tokens - 1) // self.block_size)
        if num_blocks > self.num_usable_blocks:
            possible = self.max_new_tokens(num_prompt)
            remedy = f"lower max_tokens to at most {possible}" if possible > 0 else "shorten the prompt"
            raise ValueError(
                f"request {rid!r} can never fit: {num_prompt} prompt tokens and max_tokens={request.max_tokens} need "
                f"{num_blocks} KV blocks of block_size={self.block_size}, and the pool has {self.num_usable_blocks} "
                f"usable; {remedy}, raise num_gpu_blocks_override to at least {num_blocks + 1}, or raise block_size"
            )

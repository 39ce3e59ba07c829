"""A text from the command line as a prompt for `LLM`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .terminal import UserError

if TYPE_CHECKING:
    from engine import LLM


def as_prompt(llm: LLM, text: str, *, chat: bool | None) -> Any:
    """`text` as it is, or as a user's message in the model's chat template. `chat` None: where the model has one.

    Raises UserError if a chat template is asked for and there is none.
    """
    tokenizer = llm.loaded.tokenizer
    if tokenizer is None:
        remedy = (
            "leave --skip-tokenizer-init out"
            if llm.config.skip_tokenizer_init
            else f"{llm.loaded.name} comes without one, so give --tokenizer PATH, of one that it can have"
        )
        raise UserError(f"this engine has no tokenizer, so it can't read text; {remedy}")
    has_template = tokenizer.chat_template is not None
    if chat and not has_template:
        raise UserError(f"{llm.loaded.name} has no chat template; use --no-chat")
    if not (has_template if chat is None else chat):
        return text
    return llm.chat_prompt([{"role": "user", "content": text}])

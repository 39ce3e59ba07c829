"""The form's values: there and back without loss, whatever a prompt holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import SamplingParams
from engine.sample.logits_processors import LogitsProcessor, LogitsRows
from workbench.settings import ENGINE, PROMPTS, SAMPLING, engine_defaults, from_form, to_form


def there_and_back(prompts: Any) -> Any:
    return from_form(to_form(prompts, ("v1", "v2"), SAMPLING, False, ENGINE), SAMPLING)["prompts"]


TEXTS = st.text(st.characters(exclude_characters="\r"), min_size=1) | st.text("@#4 {}\\n\n", min_size=1)


@given(st.lists(TEXTS.filter(str.strip), min_size=1))
def test_any_text_comes_back(texts: list[str]) -> None:
    assert there_and_back(texts) == texts


def test_marks_and_json_come_back() -> None:
    prompts = [
        {"prompt": "a\\n b\n", "arrive_at_step": 3, "max_tokens": 7},
        {"prompt": "@4 not a mark"},
        {"prompt": "{not json", "priority": 2},
        {"prompt_token_ids": [1, 2], "sampling_params": SamplingParams(temperature=0.5, stop=("x",))},
        {"prompt": "x", "sampling_params": SamplingParams(logit_bias={9: 1.5}, structured_outputs={"choice": ["a"]})},
    ]
    back = there_and_back(prompts)
    assert back[0] == prompts[0]
    assert back[1] == "@4 not a mark"
    assert back[2:] == prompts[2:]
    assert there_and_back(PROMPTS) == list(PROMPTS)
    assert there_and_back("one text") == ["one text"]


class Nothing(LogitsProcessor):
    """Changes nothing."""

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        return logits


def test_python_objects_are_refused_by_name() -> None:
    params = SamplingParams(logits_processors=(Nothing(),))
    with pytest.raises(ValueError, match="'x' has logits_processors.*Session"):
        there_and_back([{"prompt": "x", "sampling_params": params}])


def test_lines_as_a_person_writes_them() -> None:
    form = to_form("x", "v2", SAMPLING, True, ENGINE)
    form["prompts"] = "plain\n\n@4 later\n#8 @2 both\n@5later\n  spaces kept"
    asked = from_form(form, SAMPLING)
    assert asked["prompts"] == [
        "plain",
        {"prompt": "later", "arrive_at_step": 4},
        {"prompt": "both", "max_tokens": 8, "arrive_at_step": 2},
        "@5later",
        "  spaces kept",
    ]
    assert (asked["runners"], asked["chat"], asked["async_scheduling"]) == ("v2", True, True)


def test_numbers_keep_their_digits_and_empty_fields_their_default() -> None:
    form = to_form("x", ("v1",), SAMPLING, False, ENGINE)
    form |= {"seed": "9007199254740993", "num_gpu_blocks_override": "", "temperature": "0.25"}
    asked = from_form(form, SAMPLING)
    assert asked["sampling_params"].seed == 9007199254740993
    assert asked["sampling_params"].temperature == 0.25
    assert asked["num_gpu_blocks_override"] is None
    form["seed"] = ""
    assert from_form(form, SAMPLING)["sampling_params"].seed is None


def test_the_budget_covers_the_rows_that_are_asked_for() -> None:
    assert engine_defaults({})["max_num_batched_tokens"] == 16
    assert engine_defaults({"max_num_seqs": 64})["max_num_batched_tokens"] == 64
    assert engine_defaults({"max_num_seqs": 64, "max_num_batched_tokens": 70})["max_num_batched_tokens"] == 70

"""What grammars and prompt logprobs did, of real steps: said, and kept in a recording."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import SamplingParams
from engine.hooks import GrammarAdvanced, GrammarBitmaskFilled, PromptLogprobsComputed
from tests.engine.tiny_text import raw_bytes, text_model
from tests.workbench.sessions import TINY, prompt
from workbench import Recording, Session
from workbench.views.why import why


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_session_says_what_they_did_and_a_recording_keeps_it(runner: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    loaded = text_model(folder, raw_bytes())
    params = SamplingParams(temperature=0, max_tokens=20, structured_outputs={"regex": "[ab]{3}"}, prompt_logprobs=1)
    config = {key: value for key, value in TINY.items() if key not in ("model", "load_format")}
    session = Session([prompt(1, 17)], runner, loaded=loaded, sampling_params=params, async_scheduling=False, **config)
    session.run_until("end")
    path = session.recording.save(tmp_path / "run.json.gz")
    for history in (session.recording, Recording.load(path)):
        lines = ["".join(text for text, _ in sentence) for record in history.steps for sentence in why(record)]
        logprobs = [line for line in lines if "Logprobs of" in line]
        assert [line[line.index("Logprobs") :] for line in logprobs] == [
            "Logprobs of A's prompt at positions 1 to 12 came.", "Logprobs of A's prompt at positions 13 to 16 came.",
        ]  # fmt: skip
        took = [line for line in lines if "grammar took" in line]
        assert len(took) == 4 and "A's grammar allows 2 tokens next. A's grammar took 1 token." in took[0]
        assert took[-1].startswith("A's grammar allows 1 token next. A's grammar took 1 token and is complete.")
        events = [event for record in history.steps for done in record.runners.values() for event in done.events]
        kinds = [type(event) for event in events]
        assert kinds.count(GrammarBitmaskFilled) == kinds.count(GrammarAdvanced) == 4
        assert kinds.count(PromptLogprobsComputed) == 2

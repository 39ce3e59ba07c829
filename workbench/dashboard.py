"""The live dashboard: a session, its bar, and the views that follow the cursor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets

from engine import SamplingParams

from .engines import RUNNERS
from .recording import StepRecord
from .session import Session
from .settings import PROMPTS, SAMPLING, engine_defaults, from_form, to_form
from .views.acceptance import AcceptanceView
from .views.block_tables import BlockTablesView
from .views.budget import BudgetView
from .views.controls import ControlsView
from .views.sampling import SamplingView
from .views.state_rows import StateRowsView
from .views.step_inputs import StepInputsView
from .views.timeline import TimelineView
from .views.tokens import TokensView
from .widget import LiveView

VIEWS: dict[str, type[LiveView]] = {
    "tokens": TokensView,
    "state_rows": StateRowsView,
    "step_inputs": StepInputsView,
    "block_tables": BlockTablesView,
    "timeline": TimelineView,
    "sampling": SamplingView,
    "acceptance": AcceptanceView,
    "budget": BudgetView,
}
"""Every view of a step, by the name of its file and of its place in the grid."""


class Dashboard(ipywidgets.Box):
    """One widget over one session. Every button has a method of the same name, for a notebook that does not click.

    A method raises what its session raises; a click shows it in the bar instead, and changes nothing.

    A step of 64 requests over 512 blocks is on the page within 100 ms beyond the model's own time: of two cores' time
    it takes about 30 ms of Python and 40 to 60 ms of the page (tests/browser/test_step_cost.py has the numbers).
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.controls = ControlsView()
        self.views = {name: view() for name, view in VIEWS.items()}
        draws = self.views["sampling"]
        draws.set_trait("watching", session.trace_sampling)
        draws.observe(self._trace_draws, "watching")
        drafts = self.views["acceptance"]
        drafts.set_trait("watching", session.trace_drafts)
        drafts.observe(self._trace_drafts, "watching")
        self._ack = 0
        self._error = ""
        parts: dict[str, LiveView] = {"controls": self.controls, **self.views}
        for name, part in parts.items():
            part.add_class(f"rs-at-{name}")
        self._links = [
            ipywidgets.jslink((self.controls, "selected"), (view, "selected")) for view in self.views.values()
        ]
        grid = ipywidgets.Box(list(parts.values()))
        grid.add_class("rs-grid")
        super().__init__([grid])
        self.add_class("rs-dashboard")
        self.controls.on_msg(self._on_message)
        self._show()

    @property
    def record(self) -> StepRecord:
        """The step under the cursor."""
        return self.session.record

    def step(self) -> None:
        """One step on."""
        self._do(self.session.step)

    def step_phase(self) -> None:
        """One phase of the next step."""
        self._do(self.session.step_phase)

    def run(self, n: int = 10) -> None:
        """`n` steps on, without a pause between them."""
        self._do(lambda: self.session.run(n))

    def run_until(self, condition: Any) -> None:
        """On to what `Session.run_until` knows."""
        self._do(lambda: self.session.run_until(condition))

    def back(self) -> None:
        """The cursor one step back."""
        self._do(self.session.back)

    def home(self) -> None:
        """The cursor before the first step."""
        self._do(lambda: self.session.goto(0))

    def goto(self, step: int) -> None:
        """The cursor to this step."""
        self._do(lambda: self.session.goto(step))

    def add(self, prompt: Any, sampling_params: SamplingParams | None = None) -> str:
        """Adds a request after the last recorded step, and returns its id."""
        added: list[str] = []
        self._do(lambda: added.append(self.session.add(prompt, sampling_params)))
        return added[0]

    def abort(self, request_id: str) -> None:
        """Ends a request after the last recorded step."""
        self._do(lambda: self.session.abort(request_id))

    def reset(self, prompts: Any = None, runners: str | Sequence[str] | None = None, **changes: Any) -> None:
        """Begins anew with these changes, as `Session.reset`."""
        self._do(lambda: self.session.reset(prompts, runners, **changes))

    def apply(self, **fields: Any) -> None:
        """Begins anew with these fields of the form (see `form`), the others as they are."""
        unknown = set(fields) - set(self.form)
        if unknown:
            raise ValueError(f"no field {', '.join(sorted(unknown))} in the form; it has {', '.join(self.form)}")
        form = {**self.form, **fields}
        self._do(lambda: self.session.reset(**from_form(form, self._sampling)))

    @property
    def form(self) -> dict[str, Any]:
        """The form's values for the session as it is."""
        given = self.session.given
        return to_form(given["prompts"], self.session.runners, self._sampling, given["chat"], self.session.keywords)

    @property
    def _sampling(self) -> SamplingParams:
        params = self.session.given["sampling_params"]
        return params if isinstance(params, SamplingParams) else SAMPLING

    def _trace_draws(self, change: Any) -> None:
        """The sampling view was opened or closed: a step pays for its traces only while somebody looks."""
        self.session.trace_sampling = change["new"]

    def _trace_drafts(self, change: Any) -> None:
        """The acceptance view was opened or closed."""
        self.session.trace_drafts = change["new"]

    def _do(self, action: Callable[[], Any]) -> None:
        """Runs `action` and shows where that led, even if it raises."""
        self._error = ""
        try:
            action()
        finally:
            self._show()

    def _on_message(self, _widget: Any, content: Any, _buffers: Any) -> None:
        """A click or a key. Whatever goes wrong is shown as text; the widget lives on."""
        try:
            self._ack = int(content["seq"])
            self._command(content)
        except KeyboardInterrupt:
            self._tell("interrupted; the steps that were whole are kept")
        except Exception as error:  # noqa: BLE001 - shown in the bar; a click has nobody else to raise to
            self._tell(f"{type(error).__name__}: {error}")

    def _command(self, content: dict[str, Any]) -> None:
        commands: dict[str, Callable[[], None]] = {
            "home": self.home,
            "back": self.back,
            "step": self.step,
            "phase": self.step_phase,
            "run": lambda: self.run(content["n"]),
            "until": lambda: self.run_until(content["condition"]),
            "apply": lambda: self.apply(**content["form"]),
        }
        name = content.get("command")
        if name not in commands:
            raise ValueError(f"no command {name!r}; possible are {', '.join(commands)}")
        commands[name]()

    def _show(self) -> None:
        """Hands the record under the cursor to every view; the page draws one while the next is computed."""
        record = self.session.record
        for view in reversed(self.views.values()):  # the costliest to draw are last in VIEWS
            view.show(record)
        self._tell(self._error, record)

    def _tell(self, error: str, record: StepRecord | None = None) -> None:
        self._error = error
        self.controls.tell(
            record or self.session.record,
            steps=self.session.num_steps,
            finished=self.session.finished,
            form=self.form,
            error=error,
            ack=self._ack,
        )

    def close(self) -> None:
        """Takes the widgets off the page; the session stays."""
        for link in self._links:
            link.close()
        for view in (self.controls, *self.views.values()):
            view.close()
        super().close()

    def __repr__(self) -> str:
        return f"<Dashboard {'+'.join(self.session.runners)} step {self.session.cursor}>"


def open_workbench(
    prompts: Any = None,
    runners: str | Sequence[str] = RUNNERS,
    *,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    session: Session | None = None,
    **keywords: Any,
) -> Dashboard:
    """The live dashboard of a new session, or of `session`.

    The arguments are those of `Session`. What is left out makes a small machine on which a step can be read at a
    glance: four prompts, greedy, 6 rows, 63 usable blocks of 4 tokens, and at most 16 tokens a step.
    """
    if session is None:
        asked = PROMPTS if prompts is None else prompts
        params = SAMPLING if sampling_params is None else sampling_params
        session = Session(asked, runners, sampling_params=params, **engine_defaults(keywords))
    elif prompts is not None or sampling_params is not None or keywords:
        raise ValueError("open_workbench(session=...) shows that session as it is: leave the other arguments out")
    return Dashboard(session)

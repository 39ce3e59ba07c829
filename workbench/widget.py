"""The base of every live view: it shows a view model made elsewhere, and computes nothing itself."""

from __future__ import annotations

import functools
import json
import re
from importlib import resources
from typing import Any

import anywidget
import traitlets

from .recording import StepRecord

_IMPORT = re.compile(r'^import\s*\{([^}]*)\}\s*from\s*"\./(\w+)\.js";[ \t]*$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class)\b)", re.MULTILINE)


def static_text(name: str) -> str:
    """The text of a file of workbench/static."""
    return resources.files(__package__).joinpath("static", name).read_text(encoding="utf-8")


@functools.cache
def load_module(name: str) -> str:
    """static/<name>.js as one self-contained ES module: an import of a file beside it is replaced by that file's text.

    anywidget loads a module from a blob, where a relative import has no meaning; as a file it stays a plain module. The
    text goes into a function of its own, so that the files' other names cannot meet.
    """

    def inline(found: re.Match[str]) -> str:
        body = _EXPORT.sub("", load_module(found[2]))
        return f"const {{{found[1]}}} = (() => {{\n{body}\nreturn {{{found[1]}}};\n}})();"

    return _IMPORT.sub(inline, static_text(f"{name}.js"))


@functools.cache
def load_style(name: str) -> str:
    """static/common.css, and static/<name>.css behind it where there is one."""
    own = resources.files(__package__).joinpath("static", f"{name}.css")
    return static_text("common.css") + (own.read_text(encoding="utf-8") if own.is_file() else "")


def _packed(model: dict[str, Any], _widget: Any) -> bytes:
    """The model as JSON in one buffer: ipywidgets searches a nested dict for buffers, which takes as long as the rest.

    A number that JSON does not know (NaN) raises ValueError here rather than in the page.
    """
    text = json.dumps(model, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "replace")  # half a surrogate pair, which a tokenizer may give, has no UTF-8


class LiveView(anywidget.AnyWidget):
    """A view of one step that follows the cursor.

    A subclass names its module (static/<name>.js, with static/<name>.css where there is one) and its function:

        class TokensView(LiveView, static="tokens"):
            view_model = staticmethod(view_model)
    """

    model = traitlets.Dict().tag(sync=True, to_json=_packed)
    """What `view_model(record)` returned: all that the module draws. It travels as bytes, see `_packed`."""
    selected = traitlets.Unicode("").tag(sync=True)
    """The request under the pointer or the focus; the dashboard links it across the views."""

    @staticmethod
    def view_model(record: StepRecord) -> dict[str, Any]:
        """Everything that the module draws for this record, in plain JSON values. Each view brings its own."""
        raise NotImplementedError

    def __init_subclass__(cls, static: str = "", **kwargs: Any) -> None:
        if static:
            cls._esm = load_module(static)
            cls._css = load_style(static)
        super().__init_subclass__(**kwargs)

    def __init__(self, record: StepRecord | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._step = 0
        if record is not None:
            self.show(record)

    def show(self, record: StepRecord) -> None:
        """Draws this record."""
        self._step = record.step
        self.model = type(self).view_model(record)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} step {self._step}>"

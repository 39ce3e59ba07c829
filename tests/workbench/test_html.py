"""The builder of static HTML: nothing that is not built by it becomes markup."""

from __future__ import annotations

from tests.workbench.fixtures import EVIL
from workbench.html import Html, h, join


def test_texts_and_attributes_are_escaped() -> None:
    built = h("td", EVIL, " & ", 3, None, h("b", '"'), title=f'"{EVIL}', class_="a", data_request="A", rowspan=None)
    assert built.text == (
        '<td title="&quot;&lt;img src=x onerror=alert(1)&gt;" class="a" data-request="A">'
        "&lt;img src=x onerror=alert(1)&gt; &amp; 3<b>&quot;</b></td>"
    )


def test_a_list_of_markup_is_joined_and_void_elements_have_no_end() -> None:
    assert join([h("i", 1), h("i", 2)], h("br")).text == "<i>1</i><i>2</i><br>"


def test_a_shown_twin_has_a_stable_repr() -> None:
    shown = Html("tokens step 3", h("p", EVIL))
    assert repr(shown) == "<tokens step 3>"
    assert "<img" not in shown._repr_html_()
    assert shown._repr_html_().startswith("<div style=")

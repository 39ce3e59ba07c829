"""The builder of static HTML: nothing that is not built by it becomes markup."""

from __future__ import annotations

from xml.etree import ElementTree

from tests.workbench.pictures import pictures
from tests.workbench.vocabulary import EVIL
from workbench.html import Html, h, join, picture


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


def test_a_picture_is_an_image_with_a_label_whatever_is_in_it() -> None:
    page = picture('of "<b>"', 30, 20, h("text", "a < b", x=1, y=2), x=5, y=6).text
    assert page.startswith("<img src=") and 'alt="of &quot;&lt;b&gt;&quot;"' in page and page.count("<") == 1
    drawing = ElementTree.fromstring(pictures(page)[0])
    assert drawing.get("viewBox") == "-5 -6 30 20"
    assert [text.text for text in drawing] == ["a < b"]

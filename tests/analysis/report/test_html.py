"""HTML of the report: text is escaped, and markup is kept."""

from __future__ import annotations

from dicompiler.analysis.report.html import element


class TestMarkup:
    def test_text_is_escaped_and_markup_is_not(self) -> None:
        inner = element("b", "<&>")
        text = element("p", inner, ["a", 1.50], class_="x<", data_d='"quoted"', title=None)
        assert text == '<p class="x&lt;" data-d=\'"quoted"\'><b>&lt;&amp;&gt;</b>a1.5</p>'

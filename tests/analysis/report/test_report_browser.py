"""The report in a real browser: no errors or requests, width of a phone, details on demand, and printed pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.browser import Browser, browser

import dicompiler
from dicompiler.analysis.report.report_data import load_report_data
from dicompiler.cli import main
from dicompiler.networks import build

PHONE = 360


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ResNet-18 on four devices, with the log of a run next to it."""
    place = tmp_path_factory.mktemp("resnet")
    dicompiler.compile(build("resnet18"), platform="rpi4x4", strategy="modnn", output=place / "net")
    assert main(["run", str(place / "net"), "--log", str(place / "run.json")]) == 0
    return place / "net"


@pytest.fixture(scope="module")
def page(artifact: Path) -> Path:
    path = artifact.with_name("report.html")
    more = ["--log", str(artifact.with_name("run.json")), "--strategies", "single,modnn,pipeline"]
    assert main(["report", str(artifact), *more, "-o", str(path)]) == 0
    return path


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_it_loads_without_complaint_and_asks_for_nothing(chromium: Browser, page: Path, dark: bool) -> None:
    chromium.open(page, dark=dark)
    assert chromium.value("document.readyState") == "complete"
    assert chromium.complaints() == []
    assert chromium.requests() == [page.as_uri()]
    back = chromium.value("getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")


def test_complaint_and_a_request_would_be_seen(chromium: Browser, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text('<p>x<img src="missing.png"><script>undefined.x</script>')
    chromium.open(bad)
    assert any("TypeError" in text for text in chromium.complaints())
    assert (tmp_path / "missing.png").as_uri() in chromium.requests()


@pytest.mark.slow
def test_all_layers_devices_and_segments_are_drawn(chromium: Browser, page: Path, artifact: Path) -> None:
    facts = load_report_data(artifact)
    chromium.open(page)
    count = "[...document.querySelectorAll('{}')].filter((e) => e.getBoundingClientRect().width > 0).length"
    assert chromium.value(count.format(".graph .layer")) == len(facts.routing.layers.layers)
    assert chromium.value(count.format("#layers .key .chip")) == len(facts.devices) == 4
    assert chromium.value(count.format("#memory section.card")) == len(facts.devices)
    segments = sum(len(device.segments) for device in facts.program.devices)
    # Each segment has two bars on one time axis, for the predicted and the measured time.
    assert chromium.value(count.format(".timeline rect.run")) == 2 * segments
    assert chromium.value("document.querySelectorAll('.timeline').length") == 1
    labels = "[...document.querySelectorAll('.names div')].map((e) => e.getBoundingClientRect().height)"
    # Labels of rows must be as high (36 pixels) as the rows of the timeline next to them.
    assert set(chromium.value(labels)) == {36}


@pytest.mark.parametrize("width", [PHONE, pytest.param(768, marks=pytest.mark.slow), 1280])
def test_page_does_not_scroll_horizontally(chromium: Browser, page: Path, width: int) -> None:
    chromium.open(page, width)
    assert chromium.value("document.documentElement.scrollWidth") <= width
    # Elements with class "wide" are excluded, because they scroll inside their own box.
    outside = """[...document.querySelectorAll('main *')].filter((e) => {
        if (e.closest('.wide') || e.closest('details')) return false;
        return e.getBoundingClientRect().right > document.documentElement.clientWidth + 1; }).length"""
    assert chromium.value(outside) == 0


def test_tap_on_a_layer_shows_its_parts_and_escape_hides_them(chromium: Browser, page: Path) -> None:
    chromium.open(page, PHONE)
    assert chromium.value("document.getElementById('detail').hidden") is True
    chromium.value("document.querySelector('.layer').scrollIntoView({block: 'center'})")
    x, y = chromium.value("(({x, y, width, height}) => [x + width / 2, y + height / 2])"
                          "(document.querySelector('.layer').getBoundingClientRect())")  # fmt: skip
    for kind in ("mousePressed", "mouseReleased"):
        chromium.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    shown = chromium.value("document.getElementById('detail').innerText")
    assert "conv1" in shown and "pi04: [0:1, 0:64" in shown
    chromium.call("Input.dispatchKeyEvent", type="keyDown", key="Escape", code="Escape")
    assert chromium.value("document.getElementById('detail').hidden") is True


def test_keyboard_reaches_layers_and_names_are_read_out(chromium: Browser, page: Path) -> None:
    chromium.open(page)
    chromium.value("document.querySelector('.layer').focus()")
    assert "conv1" in chromium.value("document.getElementById('detail').innerText")
    nameless = "[...document.querySelectorAll('main svg')].filter((e) => !e.querySelector('title, desc')).length"
    assert chromium.value(nameless) == 0
    assert chromium.value("document.documentElement.lang") == "en"


def test_timeline_can_be_made_wider_inside_its_box(chromium: Browser, page: Path) -> None:
    chromium.open(page)
    width = "document.querySelector('.stretch').getBoundingClientRect().width"
    before = chromium.value(width)
    chromium.value("document.querySelector('[data-zoom=\"10\"]').click()")
    assert chromium.value(width) == pytest.approx(10 * before, rel=0.01)
    assert chromium.value("document.documentElement.scrollWidth") <= 1280


@pytest.mark.slow
def test_it_prints_on_a_few_pages_of_a4(chromium: Browser, page: Path) -> None:
    chromium.open(page)
    pdf = chromium.pdf()
    sizes = re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", pdf)
    assert 2 <= len(sizes) <= 6
    assert all((round(float(w)), round(float(h))) == (595, 842) for w, h in sizes)

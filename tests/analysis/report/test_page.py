"""The report page shows all layers, parts and bytes of an artifact, escapes names, and is reproducible."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from support.refusing import Refused
from support.reports import made

import dicompiler
from dicompiler.analysis.report.page import render_report
from dicompiler.analysis.report.report_data import load_comparison, load_report_data
from dicompiler.analysis.report.timeline import measured_bars, predicted_bars
from dicompiler.cli import main
from dicompiler.networks import build
from dicompiler.target.manifest import write_digests_and_checksum

ODD = "a<b>&\"c'</script>"


def odd_names() -> onnx.ModelProto:
    """Return a small model with names that contain HTML markup."""
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[1, 4, 12, 12] x) => (float[1, 4, 12, 12] y) {
          h = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w)
          s = Softmax (h)
          y = Add (s, x)
        }""")
    weights = np.random.default_rng(3).standard_normal((4, 4, 3, 3)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    proto.graph.name = ODD
    proto.graph.node[0].name, proto.graph.node[1].name = ODD, "line\nbreak\x07"
    return proto


@pytest.fixture(scope="module")
def lenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("lenet"), "lenet")


@pytest.fixture(scope="module")
def log(lenet: Path) -> Path:
    """Return the log of a run of two frames, one after another."""
    path = lenet.with_name("run.json")
    assert main(["run", str(lenet), "--frames", "2", "--in-flight", "1", "--log", str(path)]) == 0
    return path


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    return Refused(tmp_path, capsys)


def details(page: str) -> list[str]:
    """Return the texts in `data-d` attributes, which the page shows on demand."""
    return [html.unescape(text) for text in re.findall(r'data-d="([^"]*)"', page)]


class TestPage:
    def test_every_layer_and_part_of_the_plan_is_drawn(self, lenet: Path) -> None:
        data = load_report_data(lenet)
        page = render_report(data)
        layers = [layer.name for layer in data.routing.layers.layers]
        drawn = re.findall(r'class="node layer"', page)
        assert len(drawn) == len(layers) == 8
        shown = [text for text in details(page) if "output " in text and "part" in text]
        assert [text.partition("\n")[0] for text in shown] == layers
        for text, name in zip(shown, layers, strict=True):
            assert [line.partition(":")[0] for line in text.splitlines()[3:]] == [t.device for t in data.tasks[name]]

    def test_shown_bytes_equal_sent_bytes(self, lenet: Path) -> None:
        data = load_report_data(lenet)
        assert sum(data.received_bytes.values()) == data.metrics.total_bytes > 0
        cells = re.findall(r'title="(\w+) to (\w+): (\d+) bytes per frame"', render_report(data))
        assert sum(int(count) for _, _, count in cells) == data.metrics.total_bytes
        assert {(a, b) for a, b, _ in cells} == {(t.sender, t.receiver) for t in data.program.transfers}

    def test_predicted_timeline_equals_simulation(self, lenet: Path) -> None:
        data = load_report_data(lenet)
        bars = predicted_bars(data)
        assert len(bars) == len(data.simulation.spans)
        for device in data.devices:
            computes = sum(bar.end - bar.start for bar in bars if (bar.device, bar.kind) == (device, "run"))
            assert computes == pytest.approx(data.device(device).compute_s)
        assert max(bar.end for bar in bars) <= data.metrics.latency_s * (1 + 1e-9)

    def test_log_adds_every_segment_of_the_last_frame(self, lenet: Path, log: Path) -> None:
        data = load_report_data(lenet, run_log=log)
        bars = measured_bars(data)
        for device in data.program.devices:
            frame_bars = [bar for bar in bars if bar.device == device.device and bar.is_current_frame]
            assert sum(bar.kind == "run" for bar in frame_bars) == len(device.segments)
            assert sum(bar.kind == "send" for bar in frame_bars) == sum(s.kind == "send" for s in device.steps)
            assert all(0 <= bar.start <= bar.end for bar in frame_bars)
        assert "measured, the last frame" in render_report(data) and "measured, the last frame" not in render_report(
            load_report_data(lenet)
        )

    def test_prediction_and_measurement_share_an_axis(self, lenet: Path, log: Path) -> None:
        data = load_report_data(lenet, run_log=log)
        page = render_report(data)
        assert page.count('class="axis"') == 1 and page.count('class="note">measured<') == len(data.devices)
        assert len(re.findall(r'class="row(?: odd)?"', page)) == 2 * len(data.devices)
        end = max(bar.end for bars in (predicted_bars(data), measured_bars(data)) for bar in bars)
        last = max(predicted_bars(data), key=lambda bar: bar.end)
        drawn = [int(x) + int(w) for x, w in re.findall(r'<rect x="(\d+)" y="\d+" width="(\d+)"[^>]*data-d=', page)]
        assert max(drawn) == pytest.approx(1e6, abs=2)
        assert any(abs(x - 1e6 * last.end / end) < 2 for x in drawn)

    def test_measured_times_with_frames_in_flight_are_said_to_include_waits(
        self, lenet: Path, log: Path, tmp_path: Path
    ) -> None:
        note = "the fastest of 2, including waits for up to 1 other frame; none with --in-flight 1"
        assert "including waits" not in render_report(load_report_data(lenet, run_log=log))
        (tmp_path / "run.json").write_text(json.dumps({**json.loads(log.read_text()), "in_flight": 2}))
        page = render_report(load_report_data(lenet, run_log=tmp_path / "run.json"))
        assert note in page and "measured, the last frame" in page and page.count("including waits") == 2

    def test_run_with_log_does_not_change_the_artifact(self, tmp_path: Path) -> None:
        artifact = made(tmp_path, "tiny")
        before = {path: path.read_bytes() for path in artifact.rglob("*") if path.is_file()}
        assert main(["run", str(artifact), "--log", str(tmp_path / "run.json")]) == 0
        assert {path: path.read_bytes() for path in artifact.rglob("*") if path.is_file()} == before

    def test_names_are_escaped(self, tmp_path: Path) -> None:
        artifact = made(tmp_path, odd_names())
        page = render_report(load_report_data(artifact))
        assert "<b>&" not in page and page.count("</script>") == 1
        assert any(text.startswith(ODD) for text in details(page))
        assert "\x07" not in page

    def test_page_loads_nothing_from_the_network(self, lenet: Path, log: Path) -> None:
        page = render_report(load_report_data(lenet, run_log=log))
        assert not re.findall(r"(?:https?:|//\w|url\(|@import|\bsrc=)", page)
        assert "default-src 'none'" in html.unescape(page)

    def test_page_is_equal_for_each_hash_seed(self, lenet: Path, log: Path, tmp_path: Path) -> None:
        pages = []
        for seed in ("1", "2"):
            place = tmp_path / seed
            place.mkdir()
            subprocess.run(
                [sys.executable, "-m", "dicompiler", "report", str(lenet), "--log", str(log), "-o", "r.html"],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": seed},
                cwd=place,
                check=True,
                timeout=120,
            )
            pages.append((place / "r.html").read_bytes())
        assert pages[0] == pages[1]

    def test_page_names_the_strategy(self, lenet: Path, tmp_path: Path) -> None:
        assert "by strategy modnn, for latency" in render_report(load_report_data(lenet))
        dicompiler.compile(build("lenet"), platform="rpi4x3", plan=lenet / "plan.json", output=tmp_path / "given")
        assert "read from a file, for latency" in render_report(load_report_data(tmp_path / "given"))
        # Artifacts need not contain the file that records the strategy.
        (tmp_path / "given" / "reference" / "provenance.json").unlink()
        write_digests_and_checksum(tmp_path / "given")
        assert "the strategy is not recorded" in render_report(load_report_data(tmp_path / "given"))

    def test_colours_repeat_with_many_devices(self, tmp_path: Path) -> None:
        page = render_report(load_report_data(made(tmp_path, "lenet", platform="rpi4x12")))
        assert 'class="chip d3 again">12<' in page

    def test_page_describes_replicas(self, tmp_path: Path) -> None:
        artifact = made(
            tmp_path, "lenet", platform="rpi4x4", strategy="replicate{group_size=1}", objective="throughput"
        )
        page = render_report(load_report_data(artifact))
        assert "replicas" in page and "time between frames is below" in page

    @pytest.mark.parametrize("target", ["mpi", "tflm"])
    def test_page_shows_memory_of_other_targets(self, tmp_path: Path, target: str) -> None:
        artifact = made(tmp_path, "lenet", target=target)
        data = load_report_data(artifact)
        assert f"target {target}" in render_report(data) and data.memory_timelines.keys() == set(data.devices)

    def test_page_says_that_target_measures_only_sums(self, tmp_path: Path) -> None:
        artifact = made(tmp_path, "lenet", target="tflm")
        assert main(["run", str(artifact), "--log", str(tmp_path / "run.json")]) == 0
        assert "measures only sums" in render_report(load_report_data(artifact, run_log=tmp_path / "run.json"))


class TestComparisonAndFront:
    def test_page_shows_compared_strategies_and_front(
        self, lenet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model = tmp_path / "lenet.onnx"
        onnx.save(build("lenet"), model)
        network = [str(model), "--platform", "rpi4x3"]
        assert main(["compare", *network, "--strategies", "single,modnn", "--json"]) == 0
        (tmp_path / "c.json").write_text(capsys.readouterr().out)
        search = ["--generations", "4", "--population", "12"]
        assert main(["explore", *network, *search, "-o", str(tmp_path / "front")]) == 0
        page = tmp_path / "r.html"
        more = ["--compare", str(tmp_path / "c.json"), "--front", str(tmp_path / "front")]
        assert main(["report", str(lenet), *more, "-o", str(page)]) == 0
        text = page.read_text()
        assert "single ★ best" in text and "this plan" in text
        points = json.loads((tmp_path / "front" / "front.json").read_text())["points"]
        assert text.count('class="point"') == 2 * len(points)

        assert main(["report", str(lenet), "--strategies", "single,modnn", "-o", str(page)]) == 0
        assert "single ★ best" in page.read_text()
        assert main(["report", str(tmp_path / "front"), "-o", str(page)]) == 0
        assert page.read_text().count('class="point"') == 2 * len(points)


class TestBadInput:
    """Wrong inputs give one line with the remedy, and no page."""

    def test_rejects_directory_without_artifact(self, tmp_path: Path, refused: Refused) -> None:
        (tmp_path / "empty").mkdir()
        for directory in (tmp_path / "empty", tmp_path / "nowhere"):
            assert "compile a model to this directory first" in refused(
                1, "report", directory, "-o", tmp_path / "r.html"
            )

    @pytest.mark.parametrize("file", ["artifact.json", "plan.json", "platform.toml", "reference/model.onnx",
                                      "reference/provenance.json"])  # fmt: skip
    def test_rejects_damaged_artifact(self, lenet: Path, tmp_path: Path, refused: Refused, file: str) -> None:
        broken = tmp_path / "net"
        shutil.copytree(lenet, broken)
        (broken / file).write_bytes((broken / file).read_bytes()[:40])
        assert str(broken / file) in refused(1, "report", broken, "-o", tmp_path / "r.html")

    def test_rejects_log_of_another_artifact(self, log: Path, tmp_path: Path, refused: Refused) -> None:
        other = made(tmp_path, "lenet", strategy="single")
        line = refused(1, "report", other, "--log", log, "-o", tmp_path / "r.html")
        assert "the log is of another artifact" in line and f": use {log.parent / 'net'}, or" in line

    def test_rejects_damaged_log(self, lenet: Path, log: Path, tmp_path: Path, refused: Refused) -> None:
        document = json.loads(log.read_text())
        for key, value in (("format", "dicompiler.run/9"), ("devices", [{}]), ("frames_s", ["soon"])):
            (tmp_path / "run.json").write_text(json.dumps({**document, key: value}))
            line = refused(1, "report", lenet, "--log", tmp_path / "run.json", "-o", tmp_path / "r.html")
            assert str(tmp_path / "run.json") in line and key in line

    def test_rejects_comparison_of_another_network(self, lenet: Path, tmp_path: Path, refused: Refused) -> None:
        model = tmp_path / "tiny.onnx"
        onnx.save(build("tiny"), model)
        process = subprocess.run(
            [sys.executable, "-m", "dicompiler", "compare", str(model), "--platform", "rpi4x2", "--strategies",
             "single", "--json"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, check=True, timeout=120,
        )  # fmt: skip
        (tmp_path / "c.json").write_bytes(process.stdout)
        line = refused(1, "report", lenet, "--compare", tmp_path / "c.json", "-o", tmp_path / "r.html")
        assert "another network" in line

    def test_comparison_of_the_artifact_is_taken_from_a_list(
        self, lenet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused
    ) -> None:
        model = tmp_path / "lenet.onnx"
        onnx.save(build("lenet"), model)
        strategies = {"rpi4x2": "single", "rpi4x3": "modnn"}
        entries = []
        for platform, strategy in strategies.items():
            assert main(["compare", str(model), "--platform", platform, "--strategies", strategy, "--json"]) == 0
            entries.append(json.loads(capsys.readouterr().out))
        (tmp_path / "c.json").write_text(json.dumps(entries))
        digest = entries[0]["model_digest"]
        for entry in entries:
            assert load_comparison(tmp_path / "c.json", digest, entry["platform"]) == entry
        options = ["--compare", str(tmp_path / "c.json"), "-o", str(tmp_path / "r.html")]
        assert main(["report", str(lenet), *options]) == 0
        (tmp_path / "c.json").write_text(json.dumps(entries[:1] * 2))
        line = refused(1, "report", lenet, *options)
        assert "none of its 2 comparisons is of this network on platform 'rpi4x3'" in line

    def test_rejects_options_that_exclude_each_other(self, lenet: Path, tmp_path: Path, refused: Refused) -> None:
        both = ("--compare", "c.json", "--strategies", "single")
        assert "are both given" in refused(2, "report", lenet, *both, "-o", tmp_path / "r.html")

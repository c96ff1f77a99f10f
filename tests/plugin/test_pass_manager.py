"""The pass manager: checks before and after every pass, calls of instruments, and passes that errors name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from support.example_passes import Annotate, Breaks, Rename, compilation

from dicompiler.base.errors import DicompilerError, PluginError, UsageError
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.plugin import pass_manager
from dicompiler.plugin import registry as plugins
from dicompiler.plugin.entry_points import Plugin
from dicompiler.plugin.pass_base import Pass, PassError
from dicompiler.plugin.pass_manager import PassManager, make_pipeline


@dataclass(frozen=True)
class NeedsLayers(Pass):
    """A pass that requires layers, which no earlier pass has made."""

    name: ClassVar[str] = "needs-layers"
    requires: ClassVar[tuple[str, ...]] = ("layers",)

    def run(self, compilation: PipelineState) -> PipelineState:
        return compilation


@dataclass
class Recorder:
    """An instrument that notes every call."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def before(self, index: int, step: Pass, compilation: PipelineState) -> None:
        self.calls.append(("before", index, step.name, compilation))

    def after(self, index: int, step: Pass, compilation: PipelineState) -> None:
        self.calls.append(("after", index, step.name, compilation))

    def failed(self, index: int, step: Pass, compilation: PipelineState, error: Exception) -> None:
        self.calls.append(("failed", index, step.name, compilation, error))


def provide(monkeypatch: pytest.MonkeyPatch, *classes: type[Pass], **of: str) -> None:
    """Make the registry contain these passes and no others."""
    plugin = Plugin("acme", "acme_passes", of.get("name", "acme"), of.get("version", "1.2"))
    passes = {cls.name: plugins.make_entry(plugin, "passes", cls) for cls in classes}
    monkeypatch.setattr(pass_manager, "registry", lambda: plugins.Registry(passes=passes))


def test_passes_run_in_order() -> None:
    given = compilation()
    result = PassManager([Annotate("d1"), Rename("Abs"), Annotate("d2")]).run(given)
    assert result.plan is not None
    assert result.plan.layers["h"][0].device == "d2"
    assert [node.op_type for node in result.model.proto.graph.node] == ["Abs", "Abs"]
    assert [node.op_type for node in given.model.proto.graph.node] == ["Relu", "Neg"]


def test_error_names_missing_fields_and_the_pass_that_provides_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dataclass(frozen=True)
    class Makes(NeedsLayers):
        """A pass that makes layers."""

        name: ClassVar[str] = "makes"
        provides: ClassVar[tuple[str, ...]] = ("layers",)

    provide(monkeypatch, NeedsLayers, Makes)
    with pytest.raises(DicompilerError) as caught:
        PassManager([NeedsLayers()]).run(compilation())
    assert str(caught.value) == "pass 'needs-layers' needs layers: run 'makes' before it"


def test_missing_platform_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class NeedsPlatform(NeedsLayers):
        """A pass that needs a platform."""

        name: ClassVar[str] = "needs-platform"
        requires: ClassVar[tuple[str, ...]] = ("platform",)

    provide(monkeypatch, NeedsPlatform)
    with pytest.raises(DicompilerError, match="needs platform: give a platform"):
        PassManager([NeedsPlatform()]).run(compilation())


def test_error_names_the_pass_that_made_an_invalid_model() -> None:
    with pytest.raises(DicompilerError) as caught:
        PassManager([Annotate(), Rename("NoSuchOperator")]).run(compilation())
    assert "after pass 'rename'" in str(caught.value)
    assert "NoSuchOperator" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_validity_is_checked_only_if_the_model_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[str] = []
    check = Model.check

    def counted(self: Model, place: str) -> None:
        places.append(place)
        check(self, place)

    monkeypatch.setattr(Model, "check", counted)
    PassManager([Annotate(), Rename(), Annotate()]).run(compilation())
    assert places == ["after pass 'rename'"]


def test_instruments_see_inputs_and_results_of_every_pass() -> None:
    recorder, given = Recorder(), compilation()
    result = PassManager([Annotate(), Rename()], [recorder]).run(given)
    assert [call[:3] for call in recorder.calls] == [
        ("before", 1, "annotate"),
        ("after", 1, "annotate"),
        ("before", 2, "rename"),
        ("after", 2, "rename"),
    ]
    assert recorder.calls[0][3] is given
    assert recorder.calls[1][3] is recorder.calls[2][3]
    assert recorder.calls[3][3] is result


def test_instruments_see_failures_and_numbers_start_at_first_index() -> None:
    recorder = Recorder()
    with pytest.raises(DicompilerError, match="layer 'h' cannot be cut") as caught:
        PassManager([Annotate(), Breaks("input"), Rename()], [recorder], first_index=7).run(compilation())
    assert [call[:3] for call in recorder.calls][2:] == [("before", 8, "breaks"), ("failed", 8, "breaks")]
    assert recorder.calls[-1][4] is caught.value


@pytest.mark.parametrize(
    ("how", "cause"),
    [("inside", "KeyError: 'lost'"), ("return", "run() returned Model instead of a PipelineState")],
)
def test_pass_that_breaks_inside_is_named_with_its_distribution(
    monkeypatch: pytest.MonkeyPatch, how: str, cause: str
) -> None:
    provide(monkeypatch, Breaks, name="acme-passes", version="3.1")
    with pytest.raises(PluginError) as caught:
        PassManager(make_pipeline(f"breaks{{how={how}}}")).run(compilation())
    assert str(caught.value).startswith(f"pass 'breaks' of acme-passes 3.1 (plugin 'acme'): {cause}")
    provide(monkeypatch, Breaks, name="dicompiler", version="0.2")
    with pytest.raises(PassError) as failed:
        PassManager(make_pipeline(f"breaks{{how={how}}}")).run(compilation())
    assert str(failed.value).startswith("pass 'breaks' of dicompiler 0.2: ")
    assert cause in str(failed.value)


def test_error_names_the_module_of_an_unregistered_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    provide(monkeypatch)
    with pytest.raises(PassError, match=rf"pass 'breaks' of module {Breaks.__module__.replace('.', '[.]')}: KeyError"):
        PassManager([Breaks()]).run(compilation())


def test_pipeline_text_becomes_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    provide(monkeypatch, Annotate, Rename)
    assert make_pipeline("annotate{device=pi01},rename") == (Annotate("pi01"), Rename())
    with pytest.raises(UsageError, match="unknown pass 'renam' \\(did you mean 'rename'\\?\\)"):
        make_pipeline("annotate,renam")
    with pytest.raises(UsageError, match="unknown option 'devise' of 'annotate' \\(did you mean 'device'\\?\\)"):
        make_pipeline("annotate{devise=pi01}")


def test_pass_without_run_cannot_be_instantiated() -> None:
    @dataclass(frozen=True)
    class Empty(Pass):
        name: ClassVar[str] = "empty"

    with pytest.raises(TypeError, match="abstract"):
        Empty()  # type: ignore[abstract]


def test_pass_shows_itself_as_text() -> None:
    assert str(Annotate("pi01").spec) == "annotate{device=pi01}"

"""The hooks: one for each kind, each with an example in its docstring that works."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path
from typing import ClassVar

import pytest

from dicompiler.plugin import hookspecs
from dicompiler.plugin.entry_points import Plugin
from dicompiler.plugin.plugin_kinds import PLUGIN_KINDS
from dicompiler.plugin.registry import load_plugins

HOOKS = {name: value for name, value in vars(hookspecs).items() if hasattr(value, f"{hookspecs.PLUGGY_PROJECT}_spec")}


class TestHooks:
    """The documented examples are the tests of the hooks."""

    SOURCE: ClassVar = """
        from dataclasses import dataclass
        from dicompiler.plugin_api import CostModel
        from dicompiler.plugin_api import Engine
        from dicompiler.plugin_api import Pass
        from dicompiler.plugin_api import Strategy
        from dicompiler.plugin_api import Target

        @dataclass(frozen=True)
        class DropDropout(Pass):
            name = "drop-dropout"
            def run(self, compilation): ...

        @dataclass(frozen=True)
        class RoundRobin(Strategy):
            name = "round-robin"
            def plan(self, problem): ...

        @dataclass(frozen=True)
        class Tarballs(Target):
            name = "tarballs"
            def emit(self, compilation, directory): ...
            def run(self, directory, frames, timeout): ...

        @dataclass(frozen=True)
        class Tensile(Engine):
            name = "tensile"
            def convert(self, model, weights): ...

        @dataclass(frozen=True)
        class Measured(CostModel):
            name = "measured"
            def seconds(self, layers, layer, share, device): ...

        def elementwise(operation, region, reduce): ...

        def make_odroids(count): ...
    """
    PROVIDED: ClassVar = {
        "passes": "drop-dropout",
        "strategies": "round-robin",
        "targets": "tarballs",
        "engines": "tensile",
        "operators": "com.example::FusedGelu",
        "cost_models": "measured",
        "platforms": "odroidxN",
    }

    def test_every_kind_has_a_hook(self) -> None:
        assert sorted(HOOKS) == sorted(kind.hook for kind in PLUGIN_KINDS.values())
        assert self.PROVIDED.keys() == PLUGIN_KINDS.keys()

    @pytest.mark.parametrize("kind", PLUGIN_KINDS)
    def test_docstring_example_works(self, kind: str, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        documented = inspect.cleandoc(HOOKS[PLUGIN_KINDS[kind].hook].__doc__ or "")
        summary, _, example = documented.partition("\n\n")
        assert summary
        assert example.startswith(f"@hookimpl\ndef {PLUGIN_KINDS[kind].hook}():")
        package = f"documented_{kind}"
        (site / package).mkdir()
        (site / package / "__init__.py").touch()
        for module in re.findall(r"from my_module\.(\w+) import", example):
            (site / package / f"{module}.py").write_text(textwrap.dedent(self.SOURCE))
        source = "from dicompiler.plugin_api import hookimpl\n" + example.replace("my_module", package)
        (site / package / "plugin.py").write_text(source)
        monkeypatch.syspath_prepend(site)
        registry = load_plugins({}, [Plugin("documented", f"{package}.plugin", "acme", "1.0")])
        assert registry.warnings == ()
        provided = registry.find(kind, self.PROVIDED[kind])
        assert (provided.distribution, provided.version, provided.plugin) == ("acme", "1.0", "documented")

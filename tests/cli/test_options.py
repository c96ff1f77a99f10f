"""Invalid options of every command give one line and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.refusing import Refused


class TestCommandLines:
    """Options that do not exist, or that do not accept the value."""

    @pytest.mark.parametrize(
        ("arguments", "line"),
        [
            ("complie m", "unknown command 'complie' (did you mean 'compile'?)"),
            ("explain m", "unknown command 'explain' (did you mean 'compare --explain'?)"),
            (
                "compile m -o out --output b --platform rpi4x2",
                "compile: option -o / --output is given twice: remove one",
            ),
            ("run a --frames 2 --frames 2", "run: option --frames is given twice: remove one"),
            ("compile m -o out --platform rpi4y2", "unknown platform 'rpi4y2' (did you mean 'rpi4x2'?)"),
            ("compile m -o out --platfrom rpi4x2", "compile: unknown option '--platfrom' (did you mean '--platform'?)"),
            ("compare m --strategy single", "compare: unknown option '--strategy' (did you mean '--strategies'?)"),
            ("compile m -o out --platform rpi4x2 extra", "compile: got unexpected extra argument (extra)"),
            ("compile m -o out --platform rpi4x2 --strategy modn", "unknown strategy 'modn' (did you mean 'modnn'?)"),
            ("compile m -o out --platform rpi4x2 --target socket", "unknown target 'socket' (did you mean 'sockets'?)"),
            ("compile m -o out --platform rpi4x2 --target sockets{threads=-1}", "'sockets': threads must be 0 or more"),
            ("compile m -o out --platform rpi4x2 --cost analytc", "unknown cost model 'analytc' (did you mean"),
            ("compile m -o out --platform rpi4x2 --objective fast", "unknown objective 'fast' (known: communication,"),
            ("compile m -o out --platform rpi4x2 --objective latency+latency", "latency appears twice: give it one"),
            ("compile m -o out --platform rpi4x2 --objective latency+0*energy", "weight '0' is not a number above 0"),
            ("compile m -o out --platform rpi4x2 --shape x", "shape 'x': expected the form INPUT=1x3x224x224"),
            ("compile m -o out --platform rpi4x2 --shape x=1x99999999999999999999", "is too large for a dimension"),
            ("compile m -o out --platform rpi4x2 --strategy single --plan p", "compile: --strategy and --plan exclude"),
            ("run a --frames 0", "run: invalid value for '--frames': 0 is not in the range"),
            (
                "run a --frames 99999999999999999999",
                "run: invalid value for '--frames': 99999999999999999999 is not in",
            ),
            ("run a --frames x", "run: invalid value for '--frames': 'x' is not an integer"),
            ("run a --in-flight 0", "run: invalid value for '--in-flight': 0 is not in the range"),
            (
                "run a --timeout nan",
                "run: invalid value for '--timeout': 'nan' is not a time",
            ),
            ("run a --timeout 1e300", "run: invalid value for '--timeout': 1e+300 is not in the range"),
            ("run a --timeout soon", "run: invalid value for '--timeout': 'soon' is not a number"),
            ("run a --heartbeat nan", "run: the heartbeat must be between 0.05 and 3600 s, not nan"),
            ("run a --start-manually pi09", "run: there is no device 'pi09' (did you mean 'pi02'?)"),
            (
                "run a --quiet --start-manually pi02",
                "run: --quiet hides the commands that --start-manually prints: omit",
            ),
            ("run a --listen pi01:port", "run: 'pi01:port' is not an address: expected HOST or HOST:PORT"),
            ("deploy a --hosts no --stop --frames 3 --log x", "--stop runs nothing: remove --frames and --log"),
            ("deploy a --hosts no --remove --cost roofline", "deploy: --remove runs nothing: remove --cost"),
            ("deploy a --hosts no --copy-only --in-flight 2", "deploy: --copy-only runs nothing: remove --in-flight"),
            ("run a --cost roofline", "run: only the log of --log needs a cost model: remove --cost"),
            ("emulate a --duration 5", "emulate: only --slow and --adapt need a duration: remove --duration"),
            ("emulate a --adapt --frames 5", "--adapt run frames for the seconds of --duration: remove --frames"),
            (
                "profile m --package p --repeat 3 --threads 1",
                "--package measures nothing: remove --repeat and --threads",
            ),
            ("compile m -o o --plan p --executor processes=2", "compile: a plan needs no search: remove --executor"),
            ("keys a --days 0", "keys: invalid value for '--days': 0 is not in the range"),
            ("list passs", "list: unknown kind 'passs' (did you mean 'passes'?)"),
            ("demo --network resnet5", "unknown network 'resnet5' (did you mean 'resnet50'?)"),
        ],
    )
    def test_rejects_unknown_word(
        self,
        model: Path,
        artifact: Path,
        tmp_path: Path,
        refused: Refused,
        monkeypatch: pytest.MonkeyPatch,
        arguments: str,
        line: str,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        names = {"m": str(model), "a": str(artifact)}
        assert line in refused(2, *(names.get(word, word) for word in arguments.split()))

    @pytest.mark.parametrize("command", ["run", "verify", "keys"])
    def test_rejects_a_path_without_artifact(self, model: Path, tmp_path: Path, refused: Refused, command: str) -> None:
        for place in (tmp_path, tmp_path / "none"):
            assert (
                refused(1, command, place) == f"{place}: not an artifact of dicompiler: compile a model into it first"
            )
        assert refused(1, command, model).startswith(f"{model}: not an artifact of dicompiler: it is a model: 'dicomp")

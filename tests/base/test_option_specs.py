"""Specs round-trip through text, options become typed fields, and errors name the position."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.base.option_specs import Option, Spec, instantiate, options_of, parse_pipeline, parse_spec, spec_of

PLAIN = r"[A-Za-z0-9_/.:+*@-]+"
names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", fullmatch=True)
keys = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]*", fullmatch=True)
specs = st.builds(
    Spec.from_mapping, names, st.dictionaries(keys, st.lists(st.text(), max_size=4).map(tuple), max_size=4)
)


@st.composite
def canonical_texts(draw: st.DrawFn) -> str:
    """Draw option specs in the text form that `str` writes, without calling `str`."""
    name = draw(names)
    quoted = st.text().filter(lambda s: not re.fullmatch(PLAIN, s)).map(lambda s: json.dumps(s, ensure_ascii=False))
    values = st.lists(st.from_regex(PLAIN, fullmatch=True) | quoted, max_size=4).map(",".join)
    options = draw(st.dictionaries(keys, values, max_size=4))
    return name + ("{" + " ".join(f"{key}={value}" for key, value in options.items()) + "}" if options else "")


@given(specs)
@example(Spec("a", (("x", ()), ("y", ("",)), ("z", ('"', "\\", "é\u2028\ud800")))))
def test_specs_round_trip_through_text(spec: Spec) -> None:
    assert parse_spec(str(spec)) == spec


@given(canonical_texts())
@example("tile-height{layers=conv1..conv4,conv6/a:0 parts=4}")
@example('place{layers="a b","" device=}')
def test_texts_round_trip_through_specs(text: str) -> None:
    assert str(parse_spec(text)) == text


@given(st.lists(specs, min_size=1, max_size=3).map(tuple))
def test_pipelines_round_trip_through_text(pipeline: tuple[Spec, ...]) -> None:
    assert parse_pipeline(",".join(map(str, pipeline))) == pipeline


@given(st.lists(canonical_texts(), min_size=1, max_size=3).map(",".join))
@example("infer-shapes,form-layers,tile-height{layers=conv1..conv4 parts=4},partition")
def test_pipeline_texts_round_trip(text: str) -> None:
    assert ",".join(map(str, parse_pipeline(text))) == text


@given(st.text() | st.text(alphabet='ab12{}=," \\.-'))
def test_any_text_round_trips_or_is_rejected_with_its_column(text: str) -> None:
    try:
        pipeline = parse_pipeline(text)
    except UsageError as error:
        message = str(error)
    else:
        message = "pipeline: expected nothing at column 1, found nothing"
        assert parse_pipeline(",".join(map(str, pipeline))) == pipeline
    assert re.search(r"expected .* at column \d+, found ", message)
    assert "\n" not in message


def test_ignores_blanks_between_tokens() -> None:
    assert ",".join(map(str, parse_pipeline("  a{ x=1 } ,\n b{}\t"))) == "a{x=1},b"
    assert str(parse_spec(' a{  x="1"   y=2,3\n} ')) == "a{x=1 y=2,3}"


@pytest.mark.parametrize(
    ("text", "column", "expected", "found"),
    [
        ("", 1, "a name", "the end"),
        ("a,", 3, "a name", "the end"),
        ("a,,b", 3, "a name", "','"),
        ("a b", 3, "the end, or ',' and another pass", "'b'"),
        ("a}", 2, "the end, or ',' and another pass", "'}'"),
        ("a{x=1", 6, "an option or '}'", "the end"),
        ("a{x}", 4, "'=' after option 'x'", "'}'"),
        ("a{=1}", 3, "an option or '}'", "'='"),
        ("a{x=1,y=2}", 8, "',' between values, a blank between options or '}'", "'='"),
        ("a{x=1,}", 7, "a value", "'}'"),
        ("a{x=é}", 5, "a value, plain or in double quotes", "'é'"),
        ('a{x="b}', 5, "a value in double quotes, written like a JSON string", "'\"'"),
        ('a{x="\\q"}', 6, "a value in double quotes, written like a JSON string", "'\\\\'"),
    ],
)
def test_errors_name_the_column(text: str, column: int, expected: str, found: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_pipeline(text)
    assert str(caught.value).startswith(f"pipeline '{text}': expected {expected}")
    assert f" at column {column}, found {found}" in str(caught.value)


def test_errors_show_how_several_values_are_written() -> None:
    for text, hint in (
        ("a{slow=pi02 pi03}", "if 'pi03' is a value of the option before it, write ',' between values"),
        ("a{slow=(pi02,pi03)}", "values without brackets, such as a,b at column 8"),
    ):
        with pytest.raises(UsageError, match=hint):
            parse_spec(text)


def test_an_option_is_given_once() -> None:
    with pytest.raises(UsageError, match=r"^pipeline 'a\{x=1 x=2\}': option 'x' is given twice: remove one$"):
        parse_pipeline("a{x=1 x=2}")


def test_parse_spec_rejects_a_pipeline() -> None:
    with pytest.raises(UsageError, match=r"strategy 'a,b': expected '\{' or the end at column 2, found ','"):
        parse_spec("a,b", "strategy")


@pytest.mark.parametrize(
    ("name", "options"), [("", ()), ("a b", ()), ("a", (("x", ()), ("x", ()))), ("a", (("-", ()),))]
)
def test_rejects_specs_without_text_form(name: str, options: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="not a spec"):
        Spec(name, options)


@dataclass(frozen=True)
class Everything:
    """Options of all types."""

    name: ClassVar[str] = "everything"
    parts: int = 2
    rate: float = 1.5
    exact: bool = True
    text: str = "a"
    merge: Literal["one", "all"] = "one"
    layers: tuple[str, ...] = ("x",)
    sizes: tuple[int, ...] = field(default=(), metadata={"help": "in bytes"})
    shares: tuple[float, ...] = ()
    device: str | None = None
    limit: int | None = 3


@given(
    st.builds(
        Everything,
        parts=st.integers(),
        rate=st.floats(allow_nan=False),
        exact=st.booleans(),
        text=st.text(),
        merge=st.sampled_from(["one", "all"]),
        layers=st.lists(st.text()).map(tuple),
        sizes=st.lists(st.integers()).map(tuple),
        shares=st.lists(st.floats(allow_nan=False)).map(tuple),
        device=st.none() | st.text(),
        limit=st.none() | st.integers(),
    )
)
def test_instances_round_trip_through_text(instance: Everything) -> None:
    assert instantiate(Everything, parse_spec(str(spec_of(instance)))) == instance


def test_writes_only_non_default_options_in_field_order() -> None:
    assert str(spec_of(Everything())) == "everything"
    assert str(spec_of(Everything(limit=None, parts=3, exact=False))) == "everything{parts=3 exact=false limit=}"


def test_options_show_type_default_and_help() -> None:
    options = {option.name: option for option in options_of(Everything)}
    assert options["exact"] == Option("exact", "true|false", "true")
    assert options["merge"].type == "one|all"
    assert options["sizes"] == Option("sizes", "int,…", "", "in bytes")
    assert options["device"].default == ""


@dataclass(frozen=True)
class Needy:
    """A class with one required option, and a value that its `__post_init__` rejects."""

    name: ClassVar[str] = "needy"
    parts: int

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise ValueError("parts must be at least 1")


@pytest.mark.parametrize(
    ("cls", "text", "message"),
    [
        (Everything, "everything{partz=3}", "unknown option 'partz' of 'everything' (did you mean 'parts'?)"),
        (Everything, "everything{parts=x}", "option 'parts' of 'everything': expected int, got x"),
        (Everything, "everything{parts=1.5}", "option 'parts' of 'everything': expected int, got 1.5"),
        (Everything, "everything{rate=nan}", "option 'rate' of 'everything': expected float, got nan"),
        (Everything, "everything{exact=yes}", "option 'exact' of 'everything': expected true|false, got yes"),
        (Everything, "everything{merge=two}", "option 'merge' of 'everything': expected one|all, got two"),
        (Everything, "everything{sizes=1,b}", "option 'sizes' of 'everything': expected int,…, got 1,b"),
        (Everything, "everything{parts=}", "option 'parts' of 'everything': expected one value (int), got 0"),
        (Everything, "everything{parts=1,2}", "option 'parts' of 'everything': expected one value (int), got 2"),
        (Needy, "needy", "'needy' needs option 'parts' (int)"),
        (Needy, "needy{parts=0}", "'needy': parts must be at least 1"),
    ],
)
def test_errors_name_the_option_and_the_expected_value(cls: type, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        instantiate(cls, parse_spec(text))
    assert str(caught.value) == message


def test_required_option_has_no_default() -> None:
    assert options_of(Needy) == (Option("parts", "int", None),)
    assert str(spec_of(Needy(4))) == "needy{parts=4}"


def test_reports_fields_without_text_form() -> None:
    @dataclass(frozen=True)
    class Odd:
        table: dict[str, int] = field(default_factory=dict)

    with pytest.raises(TypeError, match=r"Odd\.table"):
        options_of(Odd)
    with pytest.raises(TypeError, match="int is not a dataclass"):
        options_of(int)


def test_rejects_none_for_an_option_with_several_values() -> None:
    @dataclass(frozen=True)
    class Choosy:
        name: ClassVar[str] = "choosy"
        layers: tuple[str, ...] | None = ("all",)

    assert instantiate(Choosy, parse_spec("choosy{layers=}")) == Choosy(())
    with pytest.raises(DicompilerError, match="option 'layers' of 'choosy': None cannot be written as text"):
        spec_of(Choosy(None))

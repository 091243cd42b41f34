"""Expressions: what they yield, where a mistake is shown, and that nothing in them can call out or run for long."""

from __future__ import annotations

import operator
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.rules import check, names, parser
from gputop.rules.check import Reference
from gputop.rules.expression import Value, condition
from gputop.rules.parser import MAX_CHARS, Mistake

LIVE = {"sm_active": {0: 0.9, 1: 0.3, 2: None}, "tensor_active": {0: 0.0, 1: 0.5, 2: 0.2}, "power_w": {0: 650.0,
1: 80.0}}


class Fake:
    """Values by name and GPU; ``sm_active.mean(30s)`` is that of ``sm_active``."""

    gpus = (0, 1, 2)

    def read(self, reference: Reference, gpu: int | None) -> tuple[Value, str]:
        if gpu is None:
            return (0.25, "") if reference.quantity.name == "host.cpu_ratio" else (None, "not of this host")
        value = LIVE.get(reference.quantity.name, {}).get(gpu)
        return value, "" if value is not None else "no reading"


def holds(text: str, gpu: int | None = None) -> bool | None:
    return condition(text, "live").judge(Fake())[gpu].holds


@pytest.mark.parametrize(("text", "gpu", "expected"), [
    ("sm_active < 0.4", 1, True), ("sm_active.mean(30s) < 40%", 0, False), ("sm_active < 0.4", 2, None),
    # Kleene: what is known decides where it can.
    ("sm_active < 0.4 and tensor_active > 1", 2, False), ("sm_active < 0.4 or tensor_active < 1", 2, True),
    ("not sm_active < 0.4", 2, None), ("not sm_active < 40%", 1, False),
    ("1 + 2 * 3 == 7", None, True), ("(1 + 2) * 3 == 9 and 8 / 4 / 2 == 1 and 5 - 2 - 1 == 2", None, True),
    ("-2 * -3 == 6 and - 1 < 0", None, True), ("1 / 0 > 0", None, None), ("1e308 * 10 > 0", None, None),
    ("power_w > 0.6kW and power_w / 2 < 400W", 0, True),
    ("1GiB > 1GB and 1h == 60min and 1500us == 1.5 ms", None, True),
    ("abs(0 - 3) == max(1, 3) and min(1, 2) == 1", None, True), ("true or false", None, True),
    ("gpus.max(sm_active) - gpus.min(sm_active) > 0.5", None, True), ("gpus.count(sm_active < 0.4) == 1", None, True),
    ("gpus.mean(sm_active) == 0.6", None, True),
    ("gpus.all(tensor_active < 60%) and gpus.any(power_w > 600W)", None, True),
    ("gpus.sum(power_w) == 730W and gpus.median(tensor_active) == 0.2", None, True),
    ("gpus.max(dram_active) > 0", None, None), ("gpus.sum(1e308 * power_w) > 0W", None, None),
    ("host.cpu_ratio > 20% or host.iowait_ratio > 0", None, True), ("host.iowait_ratio > 0", None, None),
])
def test_what_an_expression_yields(text: str, gpu: int | None, expected: bool | None) -> None:
    assert holds(text, gpu) is expected


def test_it_tells_what_it_read_and_what_it_lacks() -> None:
    own = condition("sm_active.mean(30s) < 0.4 and tensor_active.max(1min) > 0", "live")
    assert own.per_gpu and [r.window_s for r in own.references] == [30.0, 60.0]
    assert {name: value for name, (value, _) in own.judge(Fake())[1].figures.items()} == {
        "sm_active.mean(30s)": 0.3, "tensor_active.max(1min)": 0.5}
    assert own.judge(Fake())[2].missing == ("sm_active.mean(30s): no reading",)
    assert not condition("gpus.max(sm_active) > 0", "live").per_gpu


def test_what_is_of_all_gpus_is_computed_once_and_told() -> None:
    class Counting(Fake):
        reads = 0

        def read(self, reference: Reference, gpu: int | None) -> tuple[Value, str]:
            self.reads += 1
            return super().read(reference, gpu)

    values = Counting()
    outcomes = condition("sm_active < gpus.mean(sm_active) and gpus.count(power_w > 1W) == 2", "live").judge(values)
    assert {gpu: own.holds for gpu, own in outcomes.items()} == {0: False, 1: True, 2: None}
    assert values.reads == 3 + 2 * 3
    assert {text: (value, about.ratio) for text, (value, about) in outcomes[1].figures.items()} == {
        "sm_active": (0.3, True), "gpus.mean(sm_active)": (0.6, True), "gpus.count(power_w > 1W)": (2.0, False)}


@pytest.mark.parametrize(("text", "at", "message"), [
    ("sm_activ.mean(30s) < 40%", 0, "did you mean sm_active?"), ("power_w > 600", 8, "add a unit, as in 600W"),
    ("sm_active.mean(30) > 1", 10, "needs a time"), ("sm_active.mean(30h) > 1", 15, "from 1s to 1h"),
    ("sm_active.mid(30s) > 1", 10, "not .mid"), ("power_limit_w.max(30s) > 1W", 14, "power_limit_w has no history"),
    ("step.time > 1s", 0, 'on = "trace"'), ("sm_active = 1", 10, "write =="), ("sm_active", 0, "needs a condition"),
    ("sm_active and 1 > 0", 0, "add a comparison"), ("0 < sm_active < 1", 14, "a < b and b < c"),
    ("(1 > 0", 6, "closing paren"),
    ("", 0, "ends where a name"), ("sm_active > 5sec", 13, "the unit sec does not exist"), ("'x' > 1", 0, "allowed "
                                                                                                          "only in"),
    ("1 > 0 2", 6, "“2” is not allowed here"),
    ("1 > 0) or (1 > 0", 5, "“)” is not allowed"), ("not 5 > -(1 > 0)", 8, "- needs a value"),
    ("gpus.maximum(sm_active) > 0", 5, "gpus.max"),
    ("gpus.max(gpus.max(sm_active)) > 0", 9, "inside"), ("max(sm_active, 3W) > 0", 0, "the same unit"),
    ("max(sm_active) > 0", 0, "2 values, not 1; over a time"),
    ("power_w * power_w * power_w * power_w * power_w > 0", 38, "no value"),
    ('finding("Input Bound")', 8, "ID of a rule"), ("1 > 0 \"", 6, "no closing quote"),
    ("sm_active.__class__ > 0", 0, "the name"),
    ("__import__('os').system('x') > 0", 0, "the name"), ("(lambda: 1)() > 0", 1, "the name lambda"),
    ("gpus > 1", 0, "the name gpus"),
    ("9" * 400 + " > 1", 0, "too large"), ("1>0 or " * 400 + "1>0", MAX_CHARS, "characters"),
    ("sm_active.mean(30s) < 40", 22, "is a share of at most 100%: write 40%"), ("400% > sm_active", 0, "at most"),
    ("gpus.max(activity) > 2", 21, "write 2%"), ("max(sm_active, tensor_active) < 300", 32, "at most"),
    ("memory_used_bytes / memory_total_bytes > 90", 41, "write 90%"), ("sm_active.avg(30s) > 0", 10, "write .mean"),
    ("sm_active < 4% AND 1 > 0", 15, "write and"), ("gpu[0].x > 1", 3, "gpu.index == 0"),
    ("-" * 300 + "1 > 0", 40, "nested"), ("1+" * 300 + "1 > 0", 400, "words"),
    ("2 ** 9 > 1", 2, "“*” is not allowed"), ("1 // 2 > 0", 2, "“/” is not allowed"), ("(1, 2) > 0", 0, "not allowed"),
    ("abs(1)(2) > 0", 0, "not allowed"), ("(" * 1999 + "1", 400, "words"), ("(" * 390 + "1" + ")" * 9, 400, "closing"),
    ("not " * 390 + "true", 164, "nested"), ("a.b" + ".c" * 180 + " > 0", 285, "nested"), ("0x10 > 0", 1, "the unit"),
    ("1 if true else 2", 2, "the name if"), ("*sm_active > 0", 0, "not allowed"), ("max(1, *(2)) > 0", 7, "not "
                                                                                                          "allowed"),
    ("f'x' > 0", 2, "not allowed"), ("'a' 'b' > 0", 5, "“b” is not allowed"), ("None > 0", 0, "the name None"),
    ("1_000 > 0", 1, "the unit"), ("+1 > 0", 0, "not allowed"),
])
def test_a_mistake_is_shown_where_it_is(text: str, at: int, message: str) -> None:
    with pytest.raises(Mistake) as caught:
        condition(text, "live")
    assert message in caught.value.message
    assert caught.value.pos == at


@pytest.mark.parametrize("text", [
    "gpus.sum(sm_active) < 3", "sm_active / tensor_active > 5", "power_w.max(30s) / power_w.min(30s) > 2",
    "sm_active == 1", "sm_active * 100 < 40", "gpus.count(sm_active < 40%) >= 2"])
def test_what_is_no_share_may_be_above_1(text: str) -> None:
    assert condition(text, "live")


def test_patterns_are_of_traces() -> None:
    own = condition('layer("decoder/*").time > 30ms and not finding("input_bound")', "trace")
    assert [(r.pattern, r.finding) for r in own.references] == [("decoder/*", ""), ("", "input_bound")]
    for text, message in (('layer("a").tim > 0', ".time"), ("layer(a) > 0", "one string"), ('layer("a") > 0', ".time"),
                          ('layers("a").time > 0s', "did you mean layer")):
        with pytest.raises(Mistake, match=message):
            condition(text, "trace")


def test_every_name_and_every_field_can_be_used() -> None:
    for source, known in names.NAMES.items():
        for quantity in known.values():
            assert condition(f"{quantity.name} >= 0", source).per_gpu == quantity.per_gpu
    for table in names.TABLES.values():
        for name in table.fields:
            assert condition(f'{table.name}("*").{name} > 0', "trace").references


WORDS = ["sm_active", "power_w", "step.time", "gpus", ".", "max", "(", ")", ",", "mean(30s)", "30s", "1e9", "0", "5%",
         "<", ">=", "==", "and", "or", "not", "+", "-", "*", "/", 'layer("*").time', "'", "\"x\"", "true", "[",
         "\u2028", "_", "é", "::"]


@given(st.lists(st.sampled_from(WORDS), max_size=40).map(" ".join) | st.text(max_size=200))
def test_no_text_does_more_than_be_refused(text: str) -> None:
    for source in ("live", "trace"):
        try:
            own = condition(text, source)
        except Mistake as mistake:
            assert 0 <= mistake.pos <= len(text) and mistake.message
        else:
            assert {outcome.holds for outcome in own.judge(Fake()).values()} <= {True, False, None}


def random_figure(random_: random.Random, depth: int) -> tuple[str, float | None]:
    """An expression of numbers, and what Python makes of it by another way."""
    if depth == 0 or random_.random() < 0.2:
        number = random_.choice((0, 1, 2, 3.5, 7, 1e6))
        return f"{number:g}", float(number)
    (left, a), (right, b) = random_figure(random_, depth - 1), random_figure(random_, depth - 1)
    sign, function = random_.choice((("+", operator.add), ("-", operator.sub), ("*", operator.mul),
    ("/", operator.truediv)))
    known = a is not None and b is not None and not (sign == "/" and b == 0)
    return f"({left} {sign} {right})", function(a, b) if known else None


def test_figures_are_those_of_python() -> None:
    random_ = random.Random(5)
    for _ in range(300):
        text, value = random_figure(random_, 4)
        if value is None:
            assert holds(f"{text} > 0") is None
        else:
            assert holds(f"{text} == {value!r}".replace("inf", "1")) is True or value < 0
            assert holds(f"{text} >= 0") is (value >= 0)


def test_nothing_in_the_language_can_hold_code() -> None:
    """The tree has numbers, texts and names alone, and no module of the language evaluates Python."""
    kinds = {parser.Number, parser.Text, parser.Truth, parser.Name, parser.Unary, parser.Binary}
    assert set(parser.Node.__args__) == kinds
    fields = {kind.__annotations__[name] for kind in kinds for name in kind.__struct_fields__}
    assert fields <= {"int", "float", "bool", "str", "Unit", "Node", "tuple[Segment, ...]"}
    assert {*check.Reference.__struct_defaults__} >= {"", 0.0, None}

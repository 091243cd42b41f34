"""The words of every rule, each in a file of its own: a change of wording shows there and nowhere else.

``pytest tests/advice/test_words.py --snapshot-update`` writes the files anew; look at the difference.
"""

from __future__ import annotations

import itertools
import re

import msgspec
import pytest

from gputop.advice.fix_code import code_for
from gputop.advice.registry import RULES
from gputop.advice.rule import Rule
from gputop.advice.verdict import Explanation
from gputop.render.evidence_words import LABELS, PER
from tests.advice.golden_words import FOLDER, JOBS, example, same_as_golden, verdicts_of


def text(words: Explanation) -> str:
    per = "" if words.gain.startswith("none") else f" (per {words.per})"
    lines = [words.title, f"why: {words.why}", f"action: {words.action}", f"gain: {words.gain}{per}",
             f"evidence: {', '.join(words.evidence)}", f"source: {words.source}"]
    lines += [f"brief: {words.brief}"] * bool(words.brief) + [f"unknown: {words.unknown}"] * bool(words.unknown)
    return "\n".join([*lines, *(["snippet:", words.snippet] if words.snippet else [])])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.origin}-{rule.id}")
def test_the_words_of_a_rule(rule: Rule, request: pytest.FixtureRequest) -> None:
    written = []
    for kind, (style, job) in itertools.product(verdicts_of(rule), JOBS.items()):
        verdict = example(kind, style)
        words = rule.function("describe")(verdict, *([job] if rule.origin == "trace" else []))
        assert all(isinstance(value, float) for value in words.evidence.values())
        for name in words.evidence:
            assert PER.sub("", name) in LABELS or name in LABELS or "_active" in name or "<" in name, (
                f"{name}: say in gputop/render/evidence_words.py what it is and what it is compared with")
        written.append(text(words))
    same_as_golden(f"{rule.origin}-{rule.id}", "\n\n----\n".join(written) + "\n", request)


LIVE = [rule for rule in RULES if rule.origin == "live"]
OF_OTHERS = {"tensorflow": r"torch|DataLoader|\bJAX_|XLA_PYTHON|jnp\.",
             "jax": r"torch|TensorFlow(?! and JAX)|TF_|DataLoader",
             "pytorch": r"TensorFlow(?! and JAX)|TF_|\btf\.|jnp\.|jax\.|XLA|\(c\)"}


@pytest.mark.parametrize("rule", LIVE, ids=lambda rule: rule.id)
def test_live_advice_is_for_the_framework_of_the_job(rule: Rule) -> None:
    for framework, style, kind in itertools.product(OF_OTHERS, JOBS, verdicts_of(rule)):
        verdict = msgspec.structs.replace(example(kind, style), framework=framework)
        words = rule.function("describe")(verdict)
        found = re.search(OF_OTHERS[framework],
                          f"{words.why}\n{words.brief}\n{words.action}\n{words.gain}\n{words.snippet}")
        # tf.data feeds many JAX jobs, and that profiler is PyTorch's.
        assert found is None or rule.id == "profiler_left_on" or (framework, rule.id) == (
            "jax", "host_cpu_saturated"), (framework, found)


def test_code_says_whose_it_is_where_the_framework_is_not_known() -> None:
    unknown = code_for("", "memory_pressure", "share-")
    assert unknown == f"# in TensorFlow:\n{code_for('tensorflow', 'memory_pressure', 'share-')}"
    assert "XLA_PYTHON" in code_for("jax", "memory_pressure", "share-") and "XLA" not in unknown


def test_there_is_no_file_without_a_rule() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {"input_fixes", *(f"{rule.origin}-{rule.id}" for rule in RULES)}

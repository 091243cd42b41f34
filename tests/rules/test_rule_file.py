"""Files of rules: what is read, where mistakes are shown, whose files are trusted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.rules.read_files import PROJECT_FILE, RulePath, load_rules, rule_paths
from gputop.rules.rule_file import MAX_BYTES, MAX_ENTRIES, read_rules
from gputop.rules.toml_places import Places

RULE = '[[rule]]\nid = "a_rule"\non = "live"\nwhen = "sm_active < 0.4"\ntitle = "Low"\n'


def problems(text: str) -> list[str]:
    return [str(problem).removeprefix("r.toml:") for problem in read_rules(text, "r.toml").problems]


def test_a_whole_file() -> None:
    file = read_rules(
        f'{RULE}for = "30 s"\nseverity = "high"\nsnippet = """\nif x:\n    y\\u001b()\n"""\n'
        '[limits]\ninput_bound.share = "10%"\n"idle_gpu.window_s" = 30\n[limits.launch_bound]\nshare = 0.2\n'
        '[budget]\nstep = "step.time < 300ms"\n', "r.toml")
    (rule,), (budget,) = file.rules, file.budgets
    assert not file.problems
    assert (rule.id, rule.hold_s, rule.severity, rule.origin) == ("a_rule", 30.0, "high", "r.toml:1")
    assert rule.snippet == "if x:\n    y\ufffd()"
    assert {(own.id, own.value) for own in file.limits} == {
        ("input_bound.share", 0.1), ("idle_gpu.window_s", 30.0), ("launch_bound.share", 0.2)}
    assert (budget.id, budget.condition.text, budget.origin) == ("step", "step.time < 300ms", "r.toml:18")


@pytest.mark.parametrize(("text", "shown"), [
    (RULE.replace("sm_active", "sm_activ"), "4:9: the name sm_activ does not exist: did you mean sm_active?"),
    (RULE.replace('"sm_active < 0.4"', "'''\n sm_active <\n  power_w'''"),
    "5:12: a number without a unit and a value in W"),
    (RULE.replace("0.4", "0.4 \\u0041"), '4:25: “A” is not allowed here'),
    ('[[rule]]\nid = "a"\non = "trace"\ntitle = "T"\nwhen = "kernel(\\"*\\").time > 3"\n', "5:28: a value in s"),
    (RULE + 'titel = "x"\n', "6:1: “titel” is not allowed in a rule (did you mean title?)"),
    (RULE + "for = 4000\n", '6:7: for must be a time of up to 1h'), (RULE + 'severity = "bad"\n', "6:13: severity must "
                                                                                                  "be one of"),
    (RULE.replace("live", "both"), '3:7: on must be one of live, trace'),
    (RULE.replace('id = "a_rule"', ""), "1:1: a rule needs id"),
    (RULE.replace("a_rule", "A rule"), "2:7: id can contain only a-z"), ('[[rule]]\n"""x"""=1', "2:"),
    ("rule = 3", "1:1: write [[rule]] with double brackets"),
    ("[limit]\nx = 1", "1:1: “limit” is not allowed here (did you mean limits?)"),
    ("x = 1", "1:1: “x” is not allowed here"),
    ("[limits]\na = [1]\nb = inf", "2:5: write a number with its unit"), ('[budget]\nA = "1>0"', "2:6: a budget's "
                                                                                                 "name"),
    ('[budget]\na = "sm_active > 0"', '2:6: sm_active works only in rules with on = "live"'),
    ("a = [", "1:1: this is not TOML"),
    # a header inside a text is none
    ('t = """\n[[rule]]\n"""\n' + RULE.replace("sm_", "sm"), "7:9: the name smactive does not exist"),
    ("a = " + "[" * 9000, "1:1: "), ("[[rule]]\nid = 3\n" * 300, "401:1: a file can have at most 200 rules"),
])
def test_a_mistake_has_its_line_and_column(text: str, shown: str) -> None:
    assert any(own.startswith(shown) for own in problems(text)), problems(text)


def test_all_that_is_wrong_with_a_rule_is_told_and_costs_no_other() -> None:
    assert [own.partition(": ")[0] for own in problems(
        RULE.replace("sm_active", "sm") + 'for = "x"\nseverity = "bad"\ntags = 3\n')] == ["4:9", "6:8", "7:13", "8:1"]
    file = read_rules(RULE.replace("0.4", "0.4W") + RULE.replace("a_rule", "b_rule"), "r.toml")
    assert [rule.id for rule in file.rules] == ["b_rule"] and len(file.problems) == 1


@given(st.binary(max_size=300) | st.lists(st.sampled_from([*RULE.splitlines(), '"""', "'''", "[limits]", "a.b = 1",
                                                           "[budget]", "x = [", "]", "\\", '"'])).map("\n".join))
def test_no_file_does_more_than_be_refused(raw: bytes | str) -> None:
    text = raw if isinstance(raw, str) else raw.decode("utf-8", "replace")
    file = read_rules(text, "r.toml")
    assert all(1 <= own.place.line <= text.count("\n") + 2 for own in file.problems)


def test_which_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = tmp_path / "config" / "config.toml"
    assert rule_paths(settings, ["x.toml"]) == (RulePath("x.toml", "named"),)
    settings.parent.mkdir()
    (settings.parent / "rules.toml").write_text(RULE)
    Path(PROJECT_FILE).write_text(RULE)
    paths = rule_paths(settings, ())
    assert [own.by for own in paths] == ["user", "project"]
    files, unread = load_rules([*paths, RulePath("absent.toml", "named")])
    assert [file.name for file in files] == [own.path for own in paths]
    assert unread == ["absent.toml is not read: No such file or directory"]


def test_a_project_s_file_of_somebody_else_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(RULE)
    Path(PROJECT_FILE).symlink_to("mine.toml")
    assert "symbolic link" in load_rules(rule_paths(None, ()))[1][0]
    Path(PROJECT_FILE).unlink()
    Path(PROJECT_FILE).write_text(RULE)
    if os.geteuid() == 0:  # what belongs to root is trusted
        os.chown(PROJECT_FILE, 4321, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
    (said,) = load_rules(rule_paths(None, ()))[1]
    assert "belongs to another user" in said and "--rules gputop.toml" in said
    (named,), _ = load_rules([RulePath(PROJECT_FILE, "named")])
    assert named.owner == Path(PROJECT_FILE).stat().st_uid


def test_a_file_without_end_and_a_pipe_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "large.toml").write_bytes(b"#" * (MAX_BYTES + 1))
    os.mkfifo(tmp_path / "pipe.toml")
    _, unread = load_rules([RulePath(str(tmp_path / name), "named") for name in ("large.toml", "pipe.toml")])
    assert "too large" in unread[0] and "a pipe" in unread[1]


_SLOW = {
    "blanks in a list": "a = [\n[" + " " * 200_000 + "\n]]\n", "brackets": "a = [\n" + "[" * 200_000,
    "parts of a key": "a" + ".a" * 100_000 + " = 1\n", "parts of a header": "[a" + ".a" * 100_000 + "]\n",
    "keys in a table of a line": "a = {b" + ".b" * 100_000 + " = 1}\n",
    "unknown keys": "".join(f"a{i} = 1\n" for i in range(25_000)),
    "unknown keys of rules": "".join("[[rule]]\n" + "".join(f"b{i} = 1\n" for i in range(100)) for _ in range(300)),
    "unknown limits": "[limits]\n" + "".join(f"a{i} = 1\n" for i in range(25_000))}


@pytest.mark.parametrize("text", _SLOW.values(), ids=_SLOW)
def test_no_file_takes_time_by_the_square_of_its_size(text: str) -> None:
    """A cloned repository may hold it, and each command that judges reads it: a line of blanks took for ever."""
    assert 1 <= len(read_rules(text, "gputop.toml").problems) <= MAX_ENTRIES


def test_headers_are_found_whatever_blanks_they_have() -> None:
    text = 'x = [\n[ 1 ]\n]\n[ limits ]\na = 1\n  [[ rule ]]  # one\nid = "a"\n[[rule]]\nid = "b"\n[]\n'
    places = Places(text)
    assert (places.table("limits").line, places.table("rule").line, places.table("rule", 1).line) == (4, 6, 8)
    assert places.value("limits", 0, "a") == (5, 5) and places.value("rule", 1, "id") == (9, 6)

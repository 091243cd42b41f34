"""The file of settings: what it may hold, what is said of what it may not, and that nothing in it stops gputop."""

from __future__ import annotations

import argparse
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.cli import main
from gputop.commands.arguments import parser
from gputop.commands.common import preferences_of
from gputop.commands.settings import SETTINGS, Config, apply_settings, config_path, document, load, save_setting


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "gputop").mkdir()
    return tmp_path / "gputop" / "config.toml"


def settled(file: Path, *arguments: str) -> argparse.Namespace:
    args = parser().parse_args(list(arguments))
    apply_settings(args, load(file))
    return args


def test_what_stands_in_the_file_stays_where_all_settings_are_written(file):
    mine = '# mine\ninterval = 2\n# theme = "nord"\nunknown = 1\n'
    file.write_text(mine)
    for _ in range(2):
        assert main(["config", "--write"]) == 0
    written = file.read_text()
    assert written.startswith(mine) and written.count("theme =") == 1 and written.count("interval =") == 1
    assert all(f"# {key} = " in written for key in SETTINGS if key != "interval")
    assert load(file)["interval"] == 2.0
    file.unlink()
    assert main(["config", "--write"]) == 0 and load(file).warnings == () and load(file).values == {}


def test_the_settings_are_not_printed_into_their_own_file(file):
    with file.open("w") as output:
        done = subprocess.run([sys.executable, "-m", "gputop", "config"], stdout=output, stderr=subprocess.PIPE,
                              text=True, check=False)
    assert done.returncode == 1 and "gputop config --write" in done.stderr and file.read_text() == ""


def test_every_setting_can_be_set(file: Path) -> None:
    file.write_text('''\
# a comment
interval = 0.5        # seconds
theme = 'gputop-light'
metric = "tensor_active"
span = 600
logdir = "~/traces # not a comment"
attach = ["localhost:6009", "node2:6010"]
color = "256"
ascii = false
''')
    config = load(file)
    assert config.warnings == ()
    assert config.values == {
        "interval": 0.5, "theme": "gputop-light", "metric": "tensor_active", "span": 600.0,
        "logdir": "~/traces # not a comment", "attach": ("localhost:6009", "node2:6010"),
        "color": "256", "ascii": False}
    args = settled(file)
    assert args.interval == 0.5 and args.attach == ["localhost:6009", "node2:6010"] and args.ascii is False
    assert args.logdir == Path.home() / "traces # not a comment"


def test_the_command_line_wins(file: Path) -> None:
    file.write_text('interval = 0.5\nattach = ["a:1"]\nlogdir = "x"\ncolor = "16"\n'
                    'ascii = true\n')
    args = settled(file, "--interval", "2", "--attach", "b:2", "--logdir", "y", "--color", "256",
                   "--no-ascii", "--theme", "nord")
    assert (args.interval, args.attach, args.logdir) == (2.0, ["b:2"], Path("y"))
    assert (args.color, args.ascii, args.theme) == ("256", False, "nord")
    assert settled(file, "--profiler-port", "6009").attach == [], "machines by their port are another way to say it"


@pytest.mark.parametrize(("typed", "theme"), [
    ("light", "gputop-light"), ("contrast", "gputop-contrast"), ("gputop-dark", "gputop-dark"), ("nord", "nord")])
def test_a_theme_of_gputops_own_may_be_given_in_short(tmp_path: Path, typed: str, theme: str,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEXTUAL_COLOR_SYSTEM", "")  # is set for Textual
    file = tmp_path / "none.toml"
    args = settled(file, "--theme", typed)
    args.config = load(file)
    assert preferences_of(args).theme == theme


def test_without_a_file_everything_is_as_ever(tmp_path: Path) -> None:
    args = settled(tmp_path / "none.toml")
    assert (args.interval, args.attach, args.logdir) == (1.0, [], Path("gputop-traces"))
    assert (args.theme, args.color, args.ascii) == ("gputop-dark", "auto", "auto")


@pytest.mark.parametrize(("line", "message"), [
    ("interval = fast", 'interval = fast is not a value; put text in "quotes"; using 1'),
    ('interval = "1"', 'interval = "1" is not a number of seconds from 0.1 to 3600; using 1'),
    ("interval = 0", "interval = 0 is not a number of seconds from 0.1 to 3600; using 1"),
    ("interval = true", "interval = true is not a number"), ("interval = NaN", "interval = NaN is not a value"),
    ("interval = 1e999", "interval = 1e999 is not"), ("interval =", "interval =  is not a value"),
    ("intervall = 2", "there is no setting intervall (did you mean interval?)"),
    ("zzz = 2", "there is no setting zzz; gputop"),
    ("[monitor]", "[monitor] is not KEY = VALUE"), ("interval 2", "interval 2 is not KEY = VALUE"),
    ('color = "blue"', 'is not one of "auto", "truecolor", "256", "16", "none"; using "auto"'),
    ("color = 256", "is not one of"), ("ascii = 1", 'is not one of "auto", true, false; using "auto"'),
    ('attach = ["no:port"]', "has an entry that is not HOST:PORT"), ("attach = 6009", "is not an array"),
    ("attach = [1]", "is not an array"), ('metric = "speed"', "is not one of"), ('logdir = ""', "is not text"),
    ("theme = 'open", "is not a value"), ("interval = 1 2", "is not a value"),
    ("span = " + "[" * 5000, "is not a value"), ("\x1b[2J = 1", "\ufffd[2J = 1 is not KEY = VALUE"),
])
def test_what_cannot_be_used_is_named_with_its_line_and_its_substitute(file: Path, line: str, message: str) -> None:
    file.write_text(f"# first\n\n{line}\nspan = 120\n")
    config = load(file)
    (warning,) = config.warnings
    assert warning.startswith(f"{file}:3: ") and message in warning and "\x1b" not in warning and len(warning) < 400
    assert config["span"] == 120.0, "the other lines count"
    assert config["interval"] == 1.0


def test_an_array_may_take_several_lines(file: Path) -> None:
    file.write_text('attach = [\n  "a:1",  # one\n  "b:2",\n]\n"theme" = "nord"\n')
    config = load(file)
    assert config.warnings == () and config.values == {"attach": ("a:1", "b:2"), "theme": "nord"}


def test_the_parser_is_imported_only_for_a_file(tmp_path: Path) -> None:
    code = "import sys; from gputop.commands.settings import config_path, load; load(config_path()); "
    for exists in (False, True):
        if exists:
            (tmp_path / "gputop").mkdir()
            (tmp_path / "gputop" / "config.toml").write_text("interval = 2\n")
        done = subprocess.run([sys.executable, "-c", f"{code}print(bool({{'tomllib', 'tomli'}} & {{*sys.modules}}))"],
                              capture_output=True, text=True, timeout=60, check=True,
                              env={**os.environ, "XDG_CONFIG_HOME": str(tmp_path)})
        assert done.stdout.strip() == str(exists)


def test_a_setting_made_twice_counts_once_with_a_warning(file: Path) -> None:
    file.write_text("interval = 2\ninterval = 3\n")
    config = load(file)
    assert config["interval"] == 3.0 and "was already set in line 1" in config.warnings[0]


def test_a_file_that_cannot_be_read_is_said_and_harmless(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b'theme = "\xe9"\n')
    (tmp_path / "large").write_bytes(b"#" * (1 << 21))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for path in (tmp_path, *(tmp_path / name for name in ("latin", "large", "pipe", "device"))):
        (warning,) = load(path).warnings
        assert str(path) in warning and "uses the defaults" in warning
        assert ("not a regular file" in warning) == (path.name in (tmp_path.name, "pipe", "device"))
    assert load(None).warnings == () and load(tmp_path / "absent").warnings == ()


@given(st.text())
def test_no_text_whatever_stops_it(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    config = load(file)
    assert all(isinstance(config[key], type(SETTINGS[key].default)) or key == "ascii"
               for key in SETTINGS)


def test_what_it_prints_is_a_file_of_the_same_settings(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text('theme = "nord"\nattach = ["a:1"]\ninterval = 0.25\nascii = true\n')
    assert main(["config"]) == 0
    text = capsys.readouterr().out
    assert str(file) in text and all(key in text for key in SETTINGS)
    again = file.with_name("again.toml")
    again.write_text(text)
    assert load(again).values == load(file).values and load(again).warnings == ()
    assert main(["config", "--path"]) == 0
    assert capsys.readouterr().out == f"{file}\n"


def test_the_example_s_defaults_are_values_it_takes(tmp_path: Path) -> None:
    lines = [line[2:] for line in document(Config(None)).splitlines() if line.startswith("# ") and " = " in line]
    assert len(lines) == len(SETTINGS)
    file = tmp_path / "c.toml"
    file.write_text("\n".join(lines))
    assert load(file).warnings == () and load(file).values == {s.key: s.default for s in SETTINGS.values()}


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative/is/no/place")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config_path() == tmp_path / ".config" / "gputop" / "config.toml"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "c"))
    assert config_path() == tmp_path / "c" / "gputop" / "config.toml"


def test_a_theme_is_remembered_and_all_else_in_the_file_stays(file: Path) -> None:
    assert save_setting(file, "theme", "gputop-light") == ""
    assert file.read_text() == 'theme = "gputop-light"\n'
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_text('# mine\ninterval = 2 # slow\ntheme = "nord"\n\n# end')
    assert save_setting(file, "theme", 'say "hi"') == ""
    assert file.read_text() == '# mine\ninterval = 2 # slow\ntheme = "say \\"hi\\""\n\n# end\n'
    assert load(file)["theme"] == 'say "hi"'


def test_a_link_to_it_stays_a_link_and_a_folder_is_made(tmp_path: Path) -> None:
    real, link = tmp_path / "dotfiles.toml", tmp_path / "new" / "gputop" / "config.toml"
    assert save_setting(link, "theme", "nord") == "" and link.exists()
    link.unlink()
    link.symlink_to(real)
    assert save_setting(link, "theme", "dracula") == ""
    assert link.is_symlink() and real.read_text() == 'theme = "dracula"\n'


def test_what_cannot_be_remembered_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "was not saved" in save_setting(tmp_path / "file" / "config.toml", "theme", "nord")
    (tmp_path / "latin").write_bytes(b"\xff\n")
    assert "not saved" in save_setting(tmp_path / "latin", "theme", "nord")
    assert (tmp_path / "latin").read_bytes() == b"\xff\n", "what was there is not lost"
    assert "no home" in save_setting(None, "theme", "nord")


def test_each_command_says_what_is_wrong_and_goes_on(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("interval = never\n")
    assert main(["--demo", "healthy", "--gpus", "0", "snapshot", "--seconds", "0.1", "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("{") and f"gputop: {file}:1: interval = never" in err and "using 1" in err


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make files of another user")
def test_root_remembers_nothing_in_the_home_of_another_user(tmp_path: Path) -> None:
    home, target = tmp_path / "home", tmp_path / "root-only"
    home.mkdir()
    target.write_text("theirs = 1\n")
    (home / "config.toml").symlink_to(target)
    os.chown(home, 12345, -1)
    assert "belongs to another user (uid 12345)" in save_setting(home / "config.toml", "theme", "light")
    assert target.read_text() == "theirs = 1\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make files of another user")
@pytest.mark.parametrize("theirs", ["home", "file", "link", "writable"])
def test_root_obeys_no_settings_and_rules_in_the_home_of_another_user(
        theirs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As with sudo -E, which leaves HOME as it was."""
    folder = tmp_path / "home" / ".config" / "gputop"
    folder.mkdir(parents=True)
    settings, rules = folder / "config.toml", folder / "rules.toml"
    settings.write_text('prometheus = "http://theirs:9090"\nprometheus_token_file = "/root/token"\n'
                        'remote_command = "sh -c theirs"\n')
    rules.write_text('[limits]\n"no-such" = 1\n')
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert load(config_path()).values, "root's own are read"
    if theirs == "home":
        os.chown(tmp_path / "home", 12345, -1)
    for file in (settings, rules):
        if theirs == "file":
            os.chown(file, 12345, -1)
        elif theirs == "link":
            real = file.rename(tmp_path / file.name)
            file.symlink_to(real)
            os.chown(file, 12345, -1, follow_symlinks=False)
        elif theirs == "writable":
            file.chmod(0o664)
    assert main(["config"]) == 0
    out, err = capsys.readouterr()
    assert "theirs" not in out and "/root/token" not in out
    assert load(config_path()).values == {}
    why = "is writable by other users" if theirs == "writable" else "belongs to another user (uid 12345)"
    assert err.count(why) == 1 and "uses the defaults" in err
    assert main(["rules", "list"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "rules.toml" in line]
    assert len(said) == 1 and "is not read" in said[0] and why in said[0]


def test_settings_that_somebody_else_wrote_are_not_used(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("interval = 9\n")
    owner = file.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert load(file)["interval"] == (9 if owner == 0 else 1)
    file.chmod(0o666)
    assert load(file)["interval"] == 1


@pytest.mark.parametrize("plant", ["pipe", "device"])
def test_what_is_planted_as_settings_is_said_and_waited_for_by_nobody(plant: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    if plant == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    warning = load(path).warnings[0]
    assert "uses the defaults: it is" in warning and "not a regular file" in warning

"""Recordings of days: a folder of parts, bounded, one recorder at a time, whole after whatever ended it."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from gputop.cli import main
from gputop.core.errors import GputopError
from gputop.replay.format import SYNC_PERIOD_S, RecordingWriter, header
from gputop.replay.parts import Bounds, PartsWriter, Rotation, recordings_in
from gputop.replay.reader import Recording
from tests.fakes import START_S, node_sample
from tests.waiting import until

DAY = 86400.0


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".rec")


def times(folder: Path) -> list[float]:
    """Of all samples in the order of the parts, from the start."""
    out: list[float] = []
    for path in recordings_in(folder):
        with Recording(path) as part:
            assert part.notes == ()
            out += [time_s - START_S for time_s in part.times_s]
    return out


def write(folder: Path, rotation: Rotation, ticks: range) -> PartsWriter:
    writer = PartsWriter(folder, rotation)
    for tick in ticks:
        writer.append(node_sample(tick, 1))
    return writer


def test_a_part_ends_at_its_age(tmp_path: Path) -> None:
    write(tmp_path / "new" / "days", Rotation(Bounds(age_s=10.0)), range(35)).close()
    folder = tmp_path / "new" / "days"
    assert times(folder) == list(range(35))
    assert [len(Recording(path)) for path in recordings_in(folder)] == [10, 10, 10, 5]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert files(folder)[0].startswith("gputop-20") and not any("host" in name for name in files(folder))


def test_a_part_ends_at_its_size_and_all_together_are_bounded(tmp_path: Path) -> None:
    keep = 1 << 15
    with closing(write(tmp_path, Rotation(Bounds(), Bounds(size_bytes=keep)), range(1500))) as writer:
        sizes = [path.stat().st_size for path in recordings_in(tmp_path)]
        assert writer.samples == 1500 and writer.size_bytes > 3 * keep
        assert keep / 2 < sum(sizes) < keep + 4096
        assert max(sizes) < keep / 8 + 4096  # the last sample is written whole
    assert times(tmp_path) == list(range(1500))[-len(times(tmp_path)):]


def test_parts_are_kept_by_number_and_age(tmp_path: Path) -> None:
    write(tmp_path, Rotation(Bounds(age_s=10.0), Bounds(parts=2)), range(55)).close()
    assert times(tmp_path) == list(range(40, 55))
    old = recordings_in(tmp_path)[0]
    last_s = time.time() - 1.1 * DAY
    os.utime(old, (last_s, last_s))
    write(tmp_path, Rotation(Bounds(age_s=10.0), Bounds(age_s=DAY)), range(100, 105)).close()
    assert not old.exists() and times(tmp_path) == [*range(50, 55), *range(100, 105)]


def test_nothing_else_is_removed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    folder = tmp_path / "days"
    folder.mkdir()
    mine = [folder / name for name in ("night.rec", "gputop-20200101T000000Z.rec.gz", "notes")]
    for path in mine:
        path.write_text("mine")
    (folder / "gputop-20200101T000000Z.rec").symlink_to(target)
    (folder / "gputop-20200101T000001Z.rec").mkdir()
    write(folder, Rotation(Bounds(age_s=1.0), Bounds(parts=1)), range(5)).close()
    assert target.read_text() == "precious" and all(path.read_text() == "mine" for path in mine)
    assert times(folder) == [4]


def test_a_clock_that_is_set_back_begins_a_part(tmp_path: Path) -> None:
    with closing(PartsWriter(tmp_path, Rotation())) as writer:
        for tick in (50, 51, 52, 3, 4):
            writer.append(node_sample(tick, 1))
    assert [len(Recording(path)) for path in recordings_in(tmp_path)] == [2, 3]


def test_two_recorders_refuse_each_other(tmp_path: Path) -> None:
    with closing(PartsWriter(tmp_path, Rotation())):
        with pytest.raises(GputopError, match=f"another gputop record is writing to .*PID {os.getpid()} on ") as caught:
            PartsWriter(tmp_path, Rotation())
        assert caught.value.exit_code == 1 and "-o" in caught.value.fix
    write(tmp_path, Rotation(), range(3)).close()
    assert times(tmp_path) == [0, 1, 2]


@pytest.mark.parametrize("planted", ["fifo", "link", "folder"])
def test_a_planted_lock_is_not_opened(planted: str, tmp_path: Path) -> None:
    lock, target = tmp_path / ".gputop-record.lock", tmp_path / "precious"
    target.write_text("precious")
    {"fifo": lambda: os.mkfifo(lock), "link": lambda: lock.symlink_to(target), "folder": lock.mkdir}[planted]()
    with pytest.raises(GputopError, match="cannot write to"):
        PartsWriter(tmp_path, Rotation())
    assert target.read_text() == "precious"


def test_without_locks_it_goes_on_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refused)
    said: list[str] = []
    PartsWriter(tmp_path, Rotation(), said.append).close()
    assert len(said) == 1 and "has no locks" in said[0]


def test_what_a_power_failure_left_is_passed_over_and_kept(tmp_path: Path) -> None:
    """A part without a sample goes; one with a tail of zeros stays as it is and is read up to it."""
    write(tmp_path, Rotation(), range(5)).close()
    (first,) = recordings_in(tmp_path)
    with first.open("ab") as file:
        file.write(bytes(5000))
    (tmp_path / "gputop-20200101T000000Z.rec").write_bytes(header())
    (tmp_path / "gputop-20200101T000001Z.rec").touch()
    before = first.read_bytes()
    write(tmp_path, Rotation(), range(100, 103)).close()
    assert first.read_bytes() == before and len(files(tmp_path)) == 2
    assert len(Recording(first)) == 5 and "truncated" in Recording(first).notes[0]


def test_a_part_that_is_removed_is_followed_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(RecordingWriter.__init__, "__defaults__", (lambda: now[0], None))
    said: list[str] = []
    with closing(PartsWriter(tmp_path / "days", Rotation(), said.append)) as writer:
        writer.append(node_sample(0, 1))
        recordings_in(tmp_path / "days")[0].unlink()
        now[0] = SYNC_PERIOD_S
        writer.append(node_sample(30, 1))
        assert times(tmp_path / "days") == [30] and "gputop was writing it; gputop starts" in said[0]
        shutil.rmtree(tmp_path / "days")
        now[0] = 2 * SYNC_PERIOD_S
        with pytest.raises(GputopError, match="cannot write"):
            writer.append(node_sample(60, 1))


def test_the_full_disk_ends_it_and_the_next_run_goes_on(tmp_path: Path) -> None:
    limited = ("import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)); "
               "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])")
    command = ["-m", "gputop", "record", "--demo", "--interval", "0.1", "--rotate", "-o", str(tmp_path)]
    full = subprocess.run([sys.executable, "-c", limited, *command], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})  # half a module would stay behind
    assert full.returncode == 1 and "cannot write" in full.stderr and "Free some space" in full.stderr
    assert main([*command[2:], "--seconds", "0.3"]) == 0
    first, second = recordings_in(tmp_path)
    assert len(Recording(first)) >= 5 and len(Recording(second)) >= 1 and Recording(first).notes == ()


def test_after_a_kill_it_goes_on_with_a_new_part(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gputop", "record", "--demo", "--interval", "0.1", "--rotate", "-o", str(tmp_path)]

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None and "recording to" in process.stderr.readline()
        return process

    def written(parts: int) -> Path:
        def last() -> Path | None:
            assert process.poll() is None
            there = recordings_in(tmp_path)
            return there[-1] if len(there) == parts and there[-1].stat().st_size > 9000 else None

        return until(last)

    process = start()
    try:
        first = written(1)
        assert main([*command[3:], "--seconds", "1"]) == 1  # a second one beside it
    finally:
        process.kill()
        process.communicate()
    before = first.read_bytes()
    process = start()
    try:
        second = written(2)
    finally:
        process.send_signal(signal.SIGTERM)
        said = process.communicate()[1]
    assert process.returncode == 0 and f"gputop report {tmp_path}" in said
    assert first.read_bytes() == before and recordings_in(tmp_path) == [first, second]
    assert len(Recording(first)) >= 3 and len(Recording(second)) >= 3


@pytest.mark.parametrize(("words", "says"), [
    (["--keep", "7d"], "Add --rotate"), (["--systemd-unit"], "Add --rotate"),
    (["--rotate", "--keep", "7M"], "less than 8M")])
def test_options_that_do_not_go_together(words: list[str], says: str, tmp_path: Path,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "--demo", "-o", str(tmp_path / "days"), *words]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "days").exists()


# -- the unit ---------------------------------------------------------------------------------------

HOSTILE = 'a b\'s "%h" $HOME \\d ${x} ;  # ü'


def test_systemd_reads_the_unit_as_it_is_meant(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    systemd = shutil.which("systemd", path="/usr/lib/systemd:/lib/systemd")
    setpriv = shutil.which("setpriv")
    if systemd is None or setpriv is None:
        pytest.skip("no systemd here")
    wanted = str(place / HOSTILE)
    assert main(["record", "--demo", "a,b", "--rotate", "7d,1G", "--keep", "3,2G", "-o", wanted, "--systemd-unit"]) == 0
    units, runtime = place / "config" / "systemd" / "user", place / "runtime"
    units.mkdir(parents=True)
    runtime.mkdir(mode=0o777)
    runtime.chmod(0o777)
    (units / "gputop-record.service").write_text(capsys.readouterr().out)
    env = {**os.environ, "HOME": str(place), "XDG_CONFIG_HOME": str(place / "config"),
           "XDG_RUNTIME_DIR": str(runtime)}
    # systemd --user is not for root.
    user = [setpriv, "--reuid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    done = subprocess.run([*user, systemd, "--user", "--test", "--unit=gputop-record.service"], capture_output=True,
                          text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    unit = done.stdout.partition("-> Unit gputop-record.service")[2]
    assert "Load State: loaded" in unit
    line = unit.partition("Command Line: ")[2].partition("\n")[0]
    # It shows words as a shell would need them; $$ becomes $ when the program is started.
    shown = subprocess.run(["sh", "-c", f'for word in {line}; do printf "%s\\0" "$word"; done'], capture_output=True,
                           text=True, check=True).stdout.replace("$$", "$").split("\0")
    assert shown[shown.index("-o") + 1] == wanted
    assert {"--rotate=7d,1G", "--keep=3,2G", "--demo=a,b", "--interval=1"} <= set(shown)
    verify = shutil.which("systemd-analyze")
    if verify is not None:
        found = subprocess.run([verify, "--user", "verify", str(units / "gputop-record.service")], env=env,
                               capture_output=True, text=True, timeout=60)
        assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_a_name_that_is_no_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "--rotate", "-o", os.fsdecode(b"/tmp/\xff"), "--systemd-unit"]) == 2
    assert "cannot contain" in capsys.readouterr().err

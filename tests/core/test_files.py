"""Files are opened and written so that a name planted by another user does no harm."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gputop.core import files
from gputop.core.errors import GputopError
from gputop.core.files import (
    Folder,
    UnsafeFile,
    copy_bounded,
    make_folders,
    open_regular,
    read_regular,
    refuse_untrusted,
    replacing,
    temporary_place,
    untrusted_ancestor,
    writable_folder,
    write_file,
    write_new_files,
)
from tests.descriptors import open_below

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make files of another user")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(b"for root alone")
    return path


def test_a_regular_file_is_read(secret: Path) -> None:
    assert read_regular(secret, 100) == b"for root alone"


@pytest.mark.parametrize(("kind", "word"), [("pipe", "a pipe"), ("folder", "a folder"), ("device", "a device")])
def test_what_is_no_regular_file_is_refused_at_once(kind: str, word: str, tmp_path: Path) -> None:
    path = {"pipe": tmp_path / "p", "folder": tmp_path, "device": Path("/dev/zero")}[kind]
    if kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(OSError) as caught:
        open_regular(path)
    assert isinstance(caught.value, IsADirectoryError) or word in str(caught.value)
    assert not open_below(tmp_path)


def test_what_is_no_regular_file_is_not_even_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device does things when it is opened: a watchdog restarts the machine. A job's user may mount one over a file
    that gputop expects, in a mount namespace of their own."""
    os.mkfifo(tmp_path / "p")
    (tmp_path / "l").symlink_to("/dev/zero")
    opened = []
    real = os.open

    def noted(path: str | Path, flags: int, *arguments: int, **options: int | None) -> int:
        opened.append(flags)
        return real(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", noted)
    for path in (tmp_path / "p", tmp_path / "l", Path("/dev/zero")):
        with pytest.raises(UnsafeFile):
            open_regular(path)
    assert len(opened) == 3 and all(flags & os.O_PATH for flags in opened)


@ROOT
def test_a_file_that_may_not_be_read_is_named_by_its_own_path(secret: Path) -> None:
    secret.chmod(0o600)
    for folder in (secret.parent, *secret.parent.parents[:-2]):
        folder.chmod(folder.stat().st_mode | 0o055)
    child = os.fork()
    if child == 0:
        try:
            os.setuid(12345)
            open_regular(secret)
        except PermissionError as error:
            os._exit(7 if error.filename == str(secret) else 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_link_is_followed_only_where_that_is_meant(secret: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(secret)
    assert open_regular(link).read() == b"for root alone"
    with pytest.raises(UnsafeFile, match="symbolic link"):
        open_regular(link, follow_links=False)


def test_a_sparse_file_is_refused_by_its_size(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(6_000_000_000)
    with pytest.raises(UnsafeFile, match="6,000 MB"):
        open_regular(path, 1_000_000)


@ROOT
def test_the_file_of_another_user_is_refused(secret: Path) -> None:
    os.chown(secret, 12345, -1)
    with pytest.raises(UnsafeFile, match="uid 12345"):
        open_regular(secret, owners=frozenset({0}))
    assert open_regular(secret, owners=frozenset({12345})).read()


def test_writing_replaces_a_planted_link_or_pipe_and_leaves_the_link_s_target(secret: Path, tmp_path: Path) -> None:
    (link := tmp_path / "link").symlink_to(secret)
    os.mkfifo(pipe := tmp_path / "pipe")
    for path in (link, pipe):
        write_file(path, b"{}")
        assert not path.is_symlink() and path.read_bytes() == b"{}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret.read_bytes() == b"for root alone"


def test_nothing_changes_where_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert path.read_bytes() == b"before" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_is_exchanged_meanwhile_is_not_followed(tmp_path: Path) -> None:
    """The attack of a user who owns a folder above: the run folder becomes a link while the capture waits."""
    (tmp_path / "root-only").mkdir()
    run = tmp_path / "run"
    run.mkdir()
    with Folder(run) as folder:
        os.close(folder.create(".partial"))
        run.rename(tmp_path / "aside")
        run.symlink_to(tmp_path / "root-only")
        folder.move(".partial", "trace", replace=False)
    assert (tmp_path / "aside" / "trace").exists() and not any((tmp_path / "root-only").iterdir())


def test_in_a_folder_no_link_is_entered_and_no_name_taken_over(secret: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with Folder(tmp_path) as folder:
        with pytest.raises(OSError):
            folder.enter("link")
        (tmp_path / "planted").symlink_to(secret)
        with pytest.raises(FileExistsError):
            folder.create("planted")
        os.close(folder.create("new"))
        with pytest.raises(FileExistsError):
            folder.move("new", "secret", replace=False)
    assert secret.read_bytes() == b"for root alone"


def test_a_copy_ends_at_its_bound_and_when_it_is_stopped() -> None:
    with Path("/dev/zero").open("rb") as endless, Path("/dev/null").open("wb") as nowhere:
        with pytest.raises(OSError, match="more than 2 MB"):
            copy_bounded(endless, nowhere, 2_000_000)
        asked = iter([False, False, True])
        with pytest.raises(InterruptedError):
            copy_bounded(endless, nowhere, 1 << 40, lambda: next(asked))


def test_a_folder_that_others_can_write_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert untrusted_ancestor(tmp_path / "new" / "run") is None
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert untrusted_ancestor(shared / "run") == (shared, "is writable by other users")
    shared.chmod(0o1777)
    assert untrusted_ancestor(shared / "run") is None
    shared.chmod(0o777)
    with pytest.raises(GputopError, match=r"shared is writable by other users") as caught:
        refuse_untrusted(shared, "--logdir")
    assert "--logdir" in caught.value.fix


@ROOT
def test_a_folder_of_another_user_is_named(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "logs").mkdir(parents=True)
    os.chown(theirs, 12345, -1)
    assert untrusted_ancestor(theirs / "logs") == (theirs, "belongs to another user (uid 12345)")
    link = tmp_path / "link"
    link.symlink_to(theirs / "logs")
    assert untrusted_ancestor(link / "run") == (theirs, "belongs to another user (uid 12345)")


@ROOT
def test_a_link_of_another_user_on_the_way_is_named(tmp_path: Path) -> None:
    """A link to a safe folder is not safe where its owner can point it elsewhere."""
    (tmp_path / "safe").mkdir()
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o1777)
    (link := shared / "link").symlink_to("../safe")
    assert untrusted_ancestor(link / "run") is None
    os.chown(link, 12345, -1, follow_symlinks=False)
    assert untrusted_ancestor(link / "run") == (link, "belongs to another user (uid 12345)")
    (tmp_path / "way").symlink_to(link)
    assert untrusted_ancestor(tmp_path / "way" / ".." / "x") == (link, "belongs to another user (uid 12345)")


@ROOT
def test_an_ordinary_user_may_work_in_a_folder_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (theirs := tmp_path / "theirs").mkdir()
    os.chown(theirs, 12345, -1)
    theirs.chmod(0o2775)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert untrusted_ancestor(theirs / "run") is None
    theirs.chmod(0o777)
    assert untrusted_ancestor(theirs / "run") == (theirs, "is writable by other users")


def test_a_tree_is_removed_and_no_link_in_it_followed(secret: Path, tmp_path: Path) -> None:
    (tmp_path / "tree" / "a" / "b").mkdir(parents=True)
    (tmp_path / "tree" / "a" / "file").touch()
    (tmp_path / "tree" / "link").symlink_to(tmp_path)
    (tmp_path / "other").symlink_to(tmp_path)
    with Folder(tmp_path) as folder:
        folder.remove_tree("tree")
        folder.remove_tree("other")
        folder.remove_tree("gone")
    assert secret.exists() and not (tmp_path / "tree").exists() and (tmp_path / "other").is_symlink()


def test_folders_made_in_vain_are_removed_again(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        make_folders(tmp_path / "file" / "below")
    with pytest.raises(OSError):
        make_folders(tmp_path / "a" / ("x" * 300))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@ROOT
def test_the_root_of_a_user_namespace_is_an_ordinary_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There even / may belong to nobody."""
    (theirs := tmp_path / "theirs").mkdir()
    os.chown(theirs, 65534, -1)
    real = Path.read_text
    for mapped, safe in (("0 1000 1", True), ("0 0 4294967295", False)):
        monkeypatch.setattr(Path, "read_text", lambda path, *a, mapped=mapped, **k:
                            mapped if path.name == "uid_map" else real(path, *a, **k))
        assert (untrusted_ancestor(theirs / "run") is None) == safe


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(GputopError, match=r"cannot write .*file/x") as caught:
        write_file(tmp_path / "file" / "x", b"")
    assert "writable folder" in caught.value.fix


def test_a_full_disk_leaves_no_partial_file(tmp_path: Path) -> None:
    # A file size limit stands in for the full disk: the write fails half-way in the same place.
    program = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from gputop.core.errors import GputopError\n"
        "from gputop.core.files import write_file\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))\n"
        "try:\n"
        "    write_file(Path(sys.argv[1]), b'x' * 100_000)\n"
        "except GputopError as error:\n"
        "    print(error.message)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "big.json")], capture_output=True, text=True,
                          env={**os.environ}, check=True)
    assert "cannot write" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_new_files_of_one_name_take_the_place_of_none(tmp_path: Path) -> None:
    contents = {".txt": b"t", ".json": b"j"}
    assert write_new_files(tmp_path / "new", "a", contents) == [tmp_path / "new" / "a.txt", tmp_path / "new" / "a.json"]
    (tmp_path / "new" / "a-2.json").symlink_to("nowhere")
    (path, _) = write_new_files(tmp_path / "new", "a", contents)
    assert path.name == "a-3.txt" and path.read_bytes() == b"t"
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700 and stat.S_IMODE(path.stat().st_mode) == 0o600
    (tmp_path / "file").touch()
    with pytest.raises(GputopError, match="cannot write to"):
        write_new_files(tmp_path / "file", "a", contents)


# -- the one way to a folder that is written to ------------------------------------------------------


def test_a_folder_to_write_to_is_made_private_and_removed_where_it_cannot_be_held(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with writable_folder(tmp_path / "a" / "b", "-o") as folder:
        assert folder.made == [tmp_path / "a", tmp_path / "a" / "b"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.made} == {0o700}
    with pytest.raises(FileNotFoundError):
        writable_folder(tmp_path / "none", "-o", make=False)
    answers = iter([None, (tmp_path, "belongs to another user")])
    monkeypatch.setattr(files, "untrusted_ancestor", lambda _: next(answers))
    with pytest.raises(GputopError, match="not safe to write to"):
        writable_folder(tmp_path / "c" / "d", "-o")
    assert not open_below(tmp_path) and not (tmp_path / "c").exists()


@ROOT
def test_root_writes_to_no_folder_that_a_link_of_a_user_leads_to(tmp_path: Path) -> None:
    (tmp_path / "roots").mkdir()
    (home := tmp_path / "home").mkdir()
    (home / "out").symlink_to(tmp_path / "roots")
    os.chown(home, 12345, -1)
    with pytest.raises(GputopError, match="belongs to another user"):
        writable_folder(home / "out", "-o")
    with pytest.raises(GputopError, match="belongs to another user"):
        writable_folder(home / "out" / "new", "-o")
    assert list((tmp_path / "roots").iterdir()) == []


@ROOT
def test_temporary_folders_of_root_are_not_in_a_user_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sudo -E keeps TMPDIR, too."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert temporary_place() == str(tmp_path)
    os.chown(tmp_path, 12345, -1)
    assert temporary_place() == "/tmp"
    os.chown(tmp_path, 0, -1)


def test_no_lock_is_written_into_a_file_that_has_another_name(secret: Path, tmp_path: Path) -> None:
    (tmp_path / "lock").hardlink_to(secret)
    with Folder(tmp_path) as folder, pytest.raises(UnsafeFile, match="has another name"):
        folder.lock("lock", "me")
    assert secret.read_bytes() == b"for root alone"


def test_a_device_that_has_become_a_link_is_not_written_through(
        secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that its user exchanges between the look at it and its opening."""
    os.mkfifo(tmp_path / "out")
    judged = files._is_special

    def exchanged(file: Path | int) -> bool:
        special = judged(file)
        if isinstance(file, Path):
            file.unlink()
            file.symlink_to(secret)
        return special

    monkeypatch.setattr(files, "_is_special", exchanged)
    write_file(tmp_path / "out", b"mine", devices=True)
    assert secret.read_bytes() == b"for root alone"
    assert (tmp_path / "out").read_bytes() == b"mine" and not (tmp_path / "out").is_symlink()


@ROOT
def test_to_a_file_that_root_names_no_link_of_a_user_leads(tmp_path: Path) -> None:
    (tmp_path / "roots").mkdir()
    (home := tmp_path / "home").mkdir()
    (tmp_path / "way").symlink_to("home")  # root's own
    (tmp_path / "far").symlink_to(tmp_path / "way")
    (home / "out").symlink_to("../roots")
    (home / "loop").symlink_to("loop")
    os.chown(home, 12345, -1)
    for link in ("out", "loop"):
        os.chown(home / link, 12345, -1, follow_symlinks=False)
    write_file(tmp_path / "far" / ".." / "home" / "x.html", b"named")
    assert (home / "x.html").read_bytes() == b"named", "a user's folder that root names is fine"
    for way in (home, tmp_path / "way", tmp_path / "far"):
        for link in ("out", "loop"):
            with pytest.raises(GputopError, match=r"symbolic link of another user \(uid 12345\)"):
                write_file(way / link / "x.html", b"elsewhere")
    os.chown(home / "loop", 0, 0, follow_symlinks=False)
    with pytest.raises(GputopError, match="Too many levels"):
        write_file(home / "loop" / "x", b"")
    with pytest.raises(GputopError, match="No such file"):
        write_file(home / "none" / "x", b"")
    assert not open_below(tmp_path) and list((tmp_path / "roots").iterdir()) == []


def test_nothing_else_makes_folders_and_files() -> None:
    """What attacks a folder is held off at one door: no source goes past it."""
    package = Path(__file__).resolve().parents[2] / "gputop"
    past = re.compile(r"\.mkdir\(|\bmakedirs\(|O_CREAT\b|mkdtemp\((?!.*dir=)|TemporaryDirectory\((?!.*dir=)"
                      r"|\bmake_folders\(")
    found = {str(file.relative_to(package)) for file in package.rglob("*.py")
             for line in file.read_text().splitlines() if past.search(line)}
    # The simulated server is a profiler server, and writes where it is told to as TensorFlow's does. The other one is
    # the job's: what runs inside it, as its user.
    assert found == {"core/files.py", "simulation/server.py", "launch/inside/gputop_kineto.py"}


@pytest.mark.parametrize("name", ["/dev/fd/{}", "/proc/self/fd/{}", "/dev/stdout"])
def test_standard_output_that_leads_to_a_file_is_written_to(
        name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root its name was replaced for all users."""
    monkeypatch.setattr(files, "replacing", lambda path: pytest.fail(f"{path} is replaced"))
    with (tmp_path / "out").open("wb") as file:
        if name == "/dev/stdout":
            monkeypatch.setattr(files.Path, "readlink", lambda path: Path(f"/proc/self/fd/{file.fileno()}"))
        write_file(Path(name.format(file.fileno())), b"mine", devices=True)
    assert (tmp_path / "out").read_bytes() == b"mine"


def test_a_device_is_written_to_and_never_replaced() -> None:
    write_file(Path("/dev/null"), b"x", devices=True)
    assert Path("/dev/null").is_char_device()
    with pytest.raises(GputopError, match="No space left"):
        write_file(Path("/dev/full"), b"x", devices=True)
    assert Path("/dev/full").is_char_device()


def test_writing_replaces_a_planted_link_and_leaves_its_target(secret: Path, tmp_path: Path) -> None:
    target = tmp_path / "snapshot.json"
    target.symlink_to(secret)
    write_file(target, b"{}")
    assert secret.read_bytes() == b"for root alone" and not target.is_symlink() and target.read_bytes() == b"{}"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_writing_replaces_a_planted_pipe_instead_of_waiting_for_a_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "snapshot.json")
    write_file(tmp_path / "snapshot.json", b"{}")
    assert (tmp_path / "snapshot.json").read_bytes() == b"{}"

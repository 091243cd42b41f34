from __future__ import annotations

import pytest

from gputop.core.errors import NoDataError
from gputop.core.extras import install_command
from gputop.launch import xprof


@pytest.fixture
def logdir(tmp_path):
    run = tmp_path / "logs" / "plugins" / "profile" / "run 1"
    run.mkdir(parents=True)
    (run / "host.xplane.pb").write_bytes(b"")
    return tmp_path / "logs"


def test_trace_run_and_logdir_are_all_understood(logdir):
    run = logdir / "plugins" / "profile" / "run 1"
    for path in (logdir, logdir / "plugins" / "profile", run, run / "host.xplane.pb"):
        assert xprof.logdir_of(path) == logdir
    assert xprof.logdir_of(logdir.parent) == logdir.parent  # TensorBoard looks in folders of folders


def test_what_is_no_logdir(tmp_path):
    with pytest.raises(NoDataError, match="there is no"):
        xprof.logdir_of(tmp_path / "none")
    with pytest.raises(NoDataError, match="no traces in TensorBoard's layout"):
        xprof.logdir_of(tmp_path)


def test_the_command_fits_what_is_installed(logdir, monkeypatch):
    there: set[str] = set()
    monkeypatch.setattr(xprof.shutil, "which", lambda name: name if name in there else None)
    monkeypatch.setattr(xprof, "find_spec", lambda name: name if name in there else None)
    installed_first = f"{install_command('xprof')} && xprof --logdir {logdir}"
    assert xprof.open_command(logdir) == installed_first
    there |= {"tensorboard"}
    assert xprof.open_command(logdir) == installed_first  # a TensorBoard that shows no profiles
    there |= {"tensorboard_plugin_profile"}
    assert xprof.open_command(logdir) == f"tensorboard --logdir {logdir}"
    there |= {"xprof"}
    assert xprof.open_command(logdir / "a b") == f"xprof --logdir '{logdir}/a b'"

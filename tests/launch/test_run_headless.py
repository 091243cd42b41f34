"""``gputop run --headless``: the job is what it would have been without."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from gputop.core.own_memory import NUMPY_SETTINGS
from gputop.launch.environment import INSIDE
from tests.launch.jobs import GPUTOP, addresses, environment, frameworks, run

_TELL = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ), sys.path]))"


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    return frameworks(tmp_path_factory.mktemp("packages"))


def test_arguments_and_environment_are_the_jobs_own():
    words = ["a b", "--", "--port", "-x", "", "ü"]
    ended = run("--", sys.executable, "-c", _TELL, *words)
    arguments, environ, path = json.loads(ended.stdout)
    bare = subprocess.run([sys.executable, "-c", _TELL, *words], env=environment(), capture_output=True, check=True)
    own_arguments, inherited_environ, own_path = json.loads(bare.stdout)
    assert (arguments, path) == (own_arguments, own_path)
    assert environ.pop("PYTHONPATH") == str(INSIDE)
    assert len(environ.pop("GPUTOP_RUN")) == 16
    assert environ == inherited_environ
    assert ended.stderr == ""


def test_a_job_in_the_c_locale_keeps_it():
    bare = {"PATH": os.environ["PATH"], "HOME": "/"}
    ended = subprocess.run([*GPUTOP, "run", "--headless", "env"], env=bare, capture_output=True, text=True, check=True)
    assert "LC_CTYPE" not in ended.stdout


@pytest.mark.parametrize("chosen", [{}, {"OPENBLAS_NUM_THREADS": "8"}, {"NUMPY_MADVISE_HUGEPAGE": "1"}])
def test_what_gputop_tells_numpy_for_itself_is_not_the_jobs(chosen):
    environ = {name: value for name, value in environment().items() if name not in NUMPY_SETTINGS} | chosen
    ended = subprocess.run([*GPUTOP, "run", "--headless", "env"], env=environ, capture_output=True, text=True,
                           check=True)
    assert [line for line in ended.stdout.splitlines() if line.split("=")[0] in NUMPY_SETTINGS] == [
        f"{name}={value}" for name, value in chosen.items()]


def test_standard_streams_are_the_jobs_own():
    ended = run("--", "cat", stdin="through\n")
    assert (ended.stdout, ended.stderr, ended.returncode) == ("through\n", "", 0)


@pytest.mark.parametrize(("script", "status"), [("exit 7", 7), ("kill -TERM $$", -signal.SIGTERM),
                                                ("kill -KILL $$", -signal.SIGKILL)])
def test_it_ends_as_the_job_does(script, status):
    assert run("--", "sh", "-c", script).returncode == status


def test_its_output_goes_into_the_file_that_was_asked_for(tmp_path):
    ended = run("--output", str(tmp_path / "job.log"), "--", "sh", "-c", "echo said; echo warned >&2")
    assert ended.returncode == 0 and "said" not in ended.stdout
    assert (tmp_path / "job.log").read_text() == "said\nwarned\n"
    again = run("--output", str(tmp_path / "job.log"), "--", "true")
    assert again.returncode == 1 and "--output" in again.stderr, "what is there is kept"
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o700)
    ended = run("--output", str(tmp_path / "other.log"), "--", str(broken))
    assert "cannot start" in ended.stderr and not (tmp_path / "other.log").exists()


def test_its_process_is_the_jobs():
    # So signals, job control and the terminal need no help.
    with subprocess.Popen([*GPUTOP, "run", "--headless", "--", "sh", "-c", "echo $$; exec cat"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True, env=environment()) as job:
        assert int(job.stdout.readline()) == job.pid
        job.send_signal(signal.SIGINT)
        assert job.wait(60) == -signal.SIGINT


def test_signals_are_ignored_or_not_as_without():
    command = ("grep", "SigIgn", "/proc/self/status")
    bare = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run("--", *command).stdout == bare.stdout


def test_commands_that_cannot_start(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    nowhere, not_executable = run("--", "no-such-command"), run("--", str(script))
    assert (nowhere.returncode, not_executable.returncode) == (127, 126)
    assert "there is no command named no-such-command" in nowhere.stderr
    assert f"gputop run -- python {script}" in not_executable.stderr
    assert run().returncode == 2


@pytest.mark.parametrize(("name", "version"), [("jax", "JAX 0.0.jax"), ("tensorflow", "TensorFlow 0.0.tf")])
def test_the_import_of_a_framework_starts_its_server(packages, name, version):
    ended = run("--", sys.executable, "-c", f"import {name}", path=packages)
    assert len(addresses(ended.stderr)) == 1 and version in ended.stderr
    assert ended.returncode == 0


def test_through_a_shell_and_by_the_documented_variable(packages):
    job = f"{sys.executable} -c 'import jax'"
    assert len(addresses(run("--", "bash", "-c", f"{job}; true", path=packages).stderr)) == 1
    path = subprocess.run([*GPUTOP, "run", "--print-path"], capture_output=True, text=True, check=True).stdout.strip()
    job_environ = subprocess.run([sys.executable, "-c", "import jax"], capture_output=True, text=True, check=True,
                              env=environment(None, {"PYTHONPATH": f"{path}:{packages}"}))
    assert len(addresses(job_environ.stderr)) == 1


def test_modules_are_left_as_their_loaders_made_them(packages):
    code = ("import jax, sys, types; print(vars(jax.__spec__.loader).keys() - {'name', 'path'}, "
            "'sitecustomize' in sys.modules, type(jax) is types.ModuleType)")
    assert run("--", sys.executable, "-c", code, path=packages).stdout == "set() False True\n"


def test_only_the_first_process_serves_and_its_children_do_not(packages):
    code = ("import jax, multiprocessing, os, subprocess, sys\n"
            "subprocess.run([sys.executable, '-c', 'import jax'])\n"
            "child = os.fork()\n"
            "if not child:\n    subprocess.run([sys.executable, '-c', 'import jax']); os._exit(0)\n"
            "os.waitpid(child, 0)\n"
            "multiprocessing.get_context('spawn').Pool(2).map(__import__, ['jax', 'jax'])")
    ended = run("--", sys.executable, "-c", code, path=packages)
    assert len(addresses(ended.stderr)) == 1, ended.stderr
    # The next process of the job's script may have it when the first has ended.
    script = f"{sys.executable} -c 'import jax'; {sys.executable} -c 'import tensorflow'; true"
    assert len(addresses(run("--", "bash", "-c", script, path=packages).stderr)) == 2


def test_each_rank_serves(packages):
    code = ("import jax, json, os, subprocess, sys\n"
            "def worker(**more):\n"
            "    subprocess.run([sys.executable, '-c', 'import jax'], env={**os.environ, **more})\n"
            "worker()\n"
            "worker(LOCAL_RANK='0', RANK='8')\n"
            "worker(LOCAL_RANK='1', RANK='9')\n"
            "worker(TF_CONFIG=json.dumps({'task': {'type': 'worker', 'index': 1}}))\n"
            "worker(TF_CONFIG='no json')\n")
    err = run("--", sys.executable, "-c", code, path=packages).stderr
    assert len(addresses(err)) == 4  # the first process itself, and three more
    assert [part for part in ("rank 8", "rank 9", "rank worker1") if part not in err] == []


def test_ranks_get_the_ports_after_the_first_one(packages):
    # Two free ones in a row, as far as anybody can know.
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        taken.listen()
        code = ("import os, subprocess, sys\n"
                "for rank in '01':\n"
                "    subprocess.run([sys.executable, '-c', 'import jax'], env={**os.environ, 'LOCAL_RANK': rank})\n")
        err = run("--port", str(port), "--", sys.executable, "-c", code, path=packages).stderr
    first, second = addresses(err)
    assert f"rank 0, port {port} was in use" in err and first != f"127.0.0.1:{port}"
    assert second == f"127.0.0.1:{port + 1}" or f"port {port + 1} was in use" in err


def test_two_frameworks_in_one_process_have_a_server_each(packages):
    ended = run("--", sys.executable, "-c", "import tensorflow, jax", path=packages)
    assert len(set(addresses(ended.stderr))) == 2


def test_a_server_the_job_starts_itself_is_none_of_ours(packages):
    code = "import jax; from jax._src.lib import _profiler; print(_profiler.start_server(0).getsockname()[1] > 0)"
    ended = run("--", sys.executable, "-c", code, path=packages)
    assert (ended.stdout, ended.returncode) == ("True\n", 0)


@pytest.mark.parametrize(("listen", "reached"), [("local", False), ("all", True)])
def test_who_reaches_it(packages, listen, reached):
    own = [a.address for addresses_ in psutil.net_if_addrs().values() for a in addresses_
           if a.family == socket.AF_INET and not a.address.startswith("127.")]
    code = "import jax, sys; sys.stdin.read()"
    with subprocess.Popen([*GPUTOP, "run", "--headless", "--listen", listen, "--", sys.executable, "-c", code],
                          stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(packages)) as job:
        err = job.stderr.readline()
        port = int(addresses(err)[0].rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port), 5).close()
        assert ("reachable from any host" in err) == reached
        answered = [_answers(address, port) for address in own]
        job.communicate()
    if not own:
        pytest.skip("this machine has the loopback interface only")
    assert answered == [reached] * len(own)


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), 5).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("broken", ["def start_server(port): raise RuntimeError('no such luck')", "",
                                    "def start_server(port): return None"])
def test_a_server_that_does_not_start_harms_nobody(tmp_path, broken):
    packages = frameworks(tmp_path, broken)
    ended = run("--", sys.executable, "-c", "import jax; print(jax.__version__)", path=packages)
    assert (ended.stdout, ended.returncode) == ("0.0.jax\n", 0)
    assert ended.stderr.startswith("gputop: no profiler server in process ") and ended.stderr.count("\n") == 1


def test_a_closed_stderr_or_import_that_fails_harms_nobody(tmp_path, packages):
    ended = run("--", "sh", "-c", f"exec {sys.executable} -c 'import jax; print(1)' 2>&-", path=packages)
    assert (ended.stdout, ended.returncode) == ("1\n", 0)
    (tmp_path / "jax.py").write_text("raise ImportError('of its own')")
    code = ("for _ in 0, 1:\n    try:\n        import jax\n    except ImportError as error:\n        print(error)\n")
    ended = run("--", sys.executable, "-c", code, path=tmp_path)
    assert (ended.stdout, ended.stderr) == ("of its own\nof its own\n", "")


def test_the_environments_own_sitecustomize_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.theirs = __file__")
    code = "import sys, sitecustomize; print(sys.theirs, sitecustomize.__file__)"
    own = str(tmp_path / "sitecustomize.py")
    assert run("--", sys.executable, "-c", code, path=tmp_path).stdout == f"{own} {own}\n"


def test_the_error_of_the_environments_own_sitecustomize_is_reported_as_without(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('theirs')")
    bare = subprocess.run([sys.executable, "-c", "print(1)"], env=environment(tmp_path), capture_output=True, text=True,
                          check=True)
    ended = run("--", sys.executable, "-c", "print(1)", path=tmp_path)
    assert "theirs" in bare.stderr
    assert (ended.stdout, ended.stderr) == (bare.stdout, 2 * bare.stderr)  # gputop's own Python says it too


def test_a_python_that_ignores_the_environment_is_reported_before_it_starts(packages):
    ended = run("--", sys.executable, "-I", "-c", "print(1)", path=packages)
    assert ended.stdout == "1\n"
    assert "Python's -I ignores the environment" in ended.stderr

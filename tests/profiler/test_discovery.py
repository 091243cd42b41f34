"""Finding servers by the sockets processes listen on: real processes here, a made-up /proc for containers."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gputop.core.errors import GputopError
from gputop.core.proc import command_of, environ_of, stat_of, user_name
from gputop.profiler import discovery, sockets
from gputop.profiler.addresses import listening_pid
from gputop.profiler.discovery import Finder, TrainingProcesses
from gputop.profiler.sockets import Listener
from tests.processes import asleep, once_ready
from tests.profiler.fake_server import COMMAND, FakeProfiler, serve, serving_process
from tests.records import replace

# Listens on all interfaces, accepts, says nothing; prints how often it was called when stdin closes.
SILENT = (
    sys.executable, "-c",
    "import socket, sys, threading\n"
    "s = socket.create_server(('', 0)); n = []\n"
    "def run():\n"
    "    while True: n.append(s.accept())\n"
    "threading.Thread(target=run, daemon=True).start()\n"
    "print(s.getsockname()[1], flush=True); sys.stdin.read(); print(len(n), flush=True)\n",
)


def test_server_of_a_named_process_is_found_once_and_for_good(monkeypatch):
    monkeypatch.setenv("RANK", "5")
    finder = Finder()
    with serving_process() as (running, address):
        found = finder.find([running.pid])
        (server,) = found.servers
        assert (server.address, server.pid) == (address, running.pid)
        assert server.command == " ".join(COMMAND)
        assert server.user is not None and server.uid == os.geteuid() and server.rank == "rank 5"
        assert server.framework is None and server.version is None
        assert found.notes == ()
        assert finder.find([running.pid]) == found
    assert finder.find([running.pid]).servers == ()
    assert finder._sockets.keys().isdisjoint({v for v in finder._sockets if str(v.port) in address})


def test_server_of_a_child_is_found():
    with serving_process("sh", "-c", f"{sys.executable} -m tests.profiler.fake_server; true") as (shell, address):
        servers = Finder().find([shell.pid]).servers
        assert [s.address for s in servers] == [address]
        assert servers[0].pid != shell.pid
        os.kill(servers[0].pid, 9)


def test_processes_without_training_libraries_are_not_asked():
    with serving_process() as (running, _):
        assert running.pid not in [s.pid for s in Finder().find().servers]


# Listens on as many ports as it is told, and answers at none.
MANY = (
    sys.executable, "-c",
    "import socket, sys\n"
    "held = [socket.create_server(('', 0)) for _ in range(int(sys.argv[1]))]\n"
    "print(len(held), flush=True); sys.stdin.read()\n",
)


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """The addresses that were asked; nobody answers there."""
    addresses: list[str] = []

    def note(address: str, *_: object, **__: object) -> None:
        addresses.append(address)
        raise GputopError("no route")

    monkeypatch.setattr(discovery, "check_http2", note)
    return addresses


def test_ports_that_nobody_answers_at_are_asked_some_at_a_time(asked, monkeypatch):
    """Two thousand of them kept one search busy for two minutes, and the maps were read for each."""
    read: list[int] = []
    monkeypatch.setattr(discovery, "_mapped_libraries", lambda proc, pid: read.append(pid) or [])
    finder = Finder()
    with serving_process(*MANY, "200") as (running, _):
        for search in range(1, 12):
            assert finder.find([running.pid]).servers == ()
            assert len(asked) <= 64 * 2 * search and len(read) <= search  # at 127.0.0.1 and ::1
    assert len({*asked}) == 400 and len(asked) == 3 * 400  # each in its turn, and no more often than before


def test_each_user_has_a_turn_and_gputops_own_first(asked, monkeypatch):
    """Whoever opens very many ports delays nobody else's server."""
    finder = Finder()
    ports = {7: range(1000, 3000), 8: range(5), 9: range(10, 13)}
    listening = {Listener(port, port, 1): ["127.0.0.1"] for own in ports.values() for port in own}
    pids = {port: pid for pid, own in ports.items() for port in own}
    finder._sockets = {listener: discovery._SocketState((pids[listener.port],)) for listener in listening}
    monkeypatch.setattr(discovery, "effective_uid", lambda pid, proc: {7: 4242, 8: 4343, 9: os.geteuid()}[pid])
    monkeypatch.setattr(discovery, "_mapped_libraries", lambda proc, pid: ["/x/tensorflow/a.so"])
    monkeypatch.setattr(sockets, "arrives_in", lambda *_: True)
    finder._probe_listeners(listening, named=False)
    of = [pids[int(address.rpartition(":")[2])] for address in asked]
    assert len(asked) == 64 and of.count(8) == 5 and of.count(9) == 3


def test_own_process_is_left_out():
    with serve(host="[::]") as own:
        assert own.address not in [s.address for s in Finder().find([os.getpid()]).servers]


def test_ports_that_do_not_greet_are_asked_few_times(monkeypatch):
    monkeypatch.setattr(discovery, "_TIMEOUT_S", 0.05)
    finder = Finder()
    with serving_process(*SILENT) as (running, _):
        for _ in range(discovery._ATTEMPTS + 3):
            assert finder.find([running.pid]).servers == ()
        running.stdin.close()
        assert int(running.stdout.readline()) <= discovery._ATTEMPTS


def test_sockets_bound_to_one_address_are_left_alone():
    """NCCL's are: a stray connection is none of their business."""
    own = sockets.network_namespace(Path("/proc"), os.getpid())
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as wildcard:
        ports = {listener.port for listener in sockets.listeners(Path("/proc"), os.getpid(), own)}
        assert wildcard.getsockname()[1] in ports
        assert one.getsockname()[1] not in ports


def test_the_kernel_lists_the_same_sockets_as_proc():
    own = sockets.network_namespace(Path("/proc"), os.getpid())
    with socket.create_server(("", 0)) as four, socket.create_server(("::", 0), family=socket.AF_INET6) as six, \
            socket.create_server(("127.0.0.1", 0)) as inner, socket.create_connection(inner.getsockname()):
        ports = {four.getsockname()[1], six.getsockname()[1], inner.getsockname()[1]}
        asked = {listener for listener in sockets.listeners(Path("/proc"), os.getpid(), own) if listener.port in ports}
        assert asked == {Listener(row.inode, row.port, own) for row in sockets._table_rows("/proc/self/net")
                         if row.port in ports and not any(row.address)}
        assert {listener.inode for listener in asked} == {os.fstat(s.fileno()).st_ino for s in (four, six)}


def test_users_and_addresses_are_the_same_by_the_kernel_and_by_proc():
    with socket.create_server(("127.0.0.1", 0)) as inner, \
            socket.create_server(("::1", 0), family=socket.AF_INET6) as six:
        inodes = {os.fstat(s.fileno()).st_ino for s in (inner, six)}
        asked, read = ({row for row in rows if row.inode in inodes}
                       for rows in (sockets._kernel_rows(), sockets._table_rows("/proc/net")))
        assert asked == read and {(row.port, row.uid) for row in asked} == {
            (s.getsockname()[1], os.geteuid()) for s in (inner, six)}


def test_a_network_full_of_connections_is_read_up_to_a_bound(tmp_path, monkeypatch):
    """Whoever has a network of its own fills its tables at will."""
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    row = "   0: 00000000:{:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 7 1 0 100\n"
    (tmp_path / "1" / "net").mkdir(parents=True)
    (tmp_path / "1" / "net" / "tcp").write_text(head + "".join(map(row.format, range(1, 101))))
    monkeypatch.setattr(sockets, "_TABLE_BYTES", len(head) + 10 * len(row.format(1)) + 20)
    assert [row.port for row in sockets.listeners(tmp_path, 1, 5)] == [*range(1, 11)], "not the line that is cut"


def test_very_many_sockets_are_listed_up_to_a_bound(monkeypatch):
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        monkeypatch.setattr(sockets, "_TABLE_BYTES", 500)
        rows = sockets._kernel_rows()
    assert rows is not None and 1 <= len(rows) < 20


def test_a_network_full_of_connections_is_not_read_for_those_that_listen(monkeypatch):
    """The kernel says those alone."""
    def tables(folder):
        raise AssertionError(folder)

    monkeypatch.setattr(sockets, "_tables", tables)
    own = sockets.network_namespace(Path("/proc"), os.getpid())
    with socket.create_server(("", 0)) as server:
        found = sockets.listeners(Path("/proc"), os.getpid(), own)
    assert server.fileno() == -1 and found


def test_of_a_process_that_is_gone_nothing_listens():
    assert sockets.listeners(Path("/proc"), 1 << 22, 7) == []


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_those_that_listen_in_another_network_are_listed_by_the_kernel(monkeypatch):
    code = "import socket, sys; s = socket.create_server(('', 6009)); print('ready', flush=True); sys.stdin.read()"
    with once_ready("unshare", "--net", sys.executable, "-c", code, stderr=subprocess.DEVNULL,
                    or_skip="no networks can be made here") as child:
        by_table = [*sockets._table_rows(f"/proc/{child.pid}/net")]
        monkeypatch.setattr(sockets, "_tables", lambda folder: iter(()))
        found = sockets.listeners(Path("/proc"), child.pid, 7)
    assert [(own.inode, own.port, own.namespace) for own in found] == [(by_table[0].inode, 6009, 7)]


def test_a_user_s_many_open_files_hold_no_search_up(tmp_path, monkeypatch):
    """Each is a question to the kernel: a million of them cost seconds, in each of a hundred processes."""
    asked = []
    real = os.readlink

    def readlink(path):
        asked.extend([path] * str(path).startswith(str(tmp_path)))  # threads of other tests ask, too
        return real(path)

    for pid, uid in ((7, 1000), (8, 1000), (9, 1000), (10, 1001)):
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "status").write_text(f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (x) S 1 " + " ".join(["0"] * 20))
        for number in range(100 if pid < 10 else 3):
            (tmp_path / str(pid) / "fd" / str(number)).symlink_to(f"socket:[{pid}000{number}]")
    monkeypatch.setattr(sockets, "_MANY_DESCRIPTORS", 8)
    monkeypatch.setattr(sockets, "_MAX_DESCRIPTORS", 40)
    monkeypatch.setattr(sockets, "_MAX_DESCRIPTORS_OF_USER", 64)
    monkeypatch.setattr(sockets.os, "readlink", readlink)
    assert sockets.holders(tmp_path, {100002}) == {100002: [10]}
    assert len(asked) <= 40 + 40 + 8 + 3
    asked.clear()
    assert len(sockets.open_inodes(tmp_path, 7)) == len(asked) == 40


def test_where_the_kernel_does_not_list_sockets_proc_does(monkeypatch):
    class Refused(socket.socket):
        def __init__(self, family, *more):
            if family == socket.AF_NETLINK:
                raise PermissionError("seccomp")
            super().__init__(family, *more)

    with socket.create_server(("", 0)) as server:
        monkeypatch.setattr(sockets.socket, "socket", Refused)
        assert sockets._kernel_rows() is None
        listening, _ = Finder()._listening({os.getpid()})
        assert server.getsockname()[1] in {listener.port for listener in listening}


def test_holders_are_listed_oldest_first():
    with socket.create_server(("", 0)) as wildcard:
        wildcard.set_inheritable(True)
        with asleep(pass_fds=[wildcard.fileno()]) as child:
            inode = os.fstat(wildcard.fileno()).st_ino
            assert sockets.holders(Path("/proc"), {inode}) == {inode: [os.getpid(), child.pid]}
            # Of a named address, too: a worker that was forked later does not serve, and its stacks are not the job's.
            assert listening_pid(f"127.0.0.1:{wildcard.getsockname()[1]}") == os.getpid()
    assert listening_pid("127.0.0.1:1") is None


def test_processes_of_others_are_noted(monkeypatch):
    real = sockets.network_namespace

    def refuse(proc: Path, pid: int) -> int:
        if pid != os.getpid():
            raise PermissionError(13, "Permission denied")
        return real(proc, pid)

    monkeypatch.setattr(sockets, "network_namespace", refuse)
    with serving_process() as (running, _):
        found = Finder().find([running.pid])
    assert found.servers == ()
    assert f"process {running.pid} belongs to" in found.notes[0]
    assert Finder().find().notes == ()  # unasked, nobody wants to hear of every process


def test_vanished_process():
    with serving_process() as (running, _):
        pass
    assert Finder().find([running.pid]) == discovery.Discovery()


MAPS = """7f00-7f01 r-xp 0000 08:01 1   {site}/tensorflow/libtensorflow_cc.so.2
7f02-7f03 r-xp 0000 08:01 2   /lib/libc.so.6
"""
FIB_TRIE = """Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 127.0.0.1
        /32 host LOCAL
     |-- 172.17.0.0
        /16 link UNICAST
     |-- 172.17.0.2
        /32 host LOCAL
"""


# /proc/net/route: a default route over eth0, 10.0.0.0/8 over it, 10.9.0.0/16 over the tunnel wg0, 172.17.0.0/16 over
# docker0, 10.8.0.0/16 over the bridge br0, 10.7.0.0/16 by the machine 172.17.0.9, 10.6.0.0/16 by 172.17.0.1 itself.
_ROUTES = """Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT
eth0 00000000 0100000A 0003 0 0 0 00000000 0 0 0
eth0 0000000A 00000000 0001 0 0 0 000000FF 0 0 0
wg0 0000090A 00000000 0001 0 0 0 0000FFFF 0 0 0
docker0 000011AC 00000000 0001 0 0 0 0000FFFF 0 0 0
br0 0000080A 00000000 0001 0 0 0 0000FFFF 0 0 0
docker0 0000070A 090011AC 0003 0 0 0 0000FFFF 0 0 0
docker0 0000060A 010011AC 0003 0 0 0 0000FFFF 0 0 0
cut
"""


def _interface(folder: Path, name: str, *entries: str, kind: str = "1") -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "type").write_text(f"{kind}\n")
    for entry in entries:
        (folder / name / entry).touch()


@pytest.mark.parametrize(("claimed", "counts"), [
    ("172.17.0.3", True), ("10.6.0.3", True), ("10.7.0.3", False), ("10.1.2.3", False), ("8.8.8.8", False),
    ("10.9.0.3", False), ("10.8.0.3", False), ("172.17.0.1", False), ("127.0.0.2", False)])
def test_a_container_cannot_claim_the_address_of_another_machine(proc, claimed, counts):
    """Nor one of this machine's own. The bridge br0 has a card of this machine in it."""
    interfaces = proc.parent / "sys/class/net"
    _interface(interfaces, "eth0", "device")
    _interface(interfaces, "wg0", kind="65534")
    _interface(interfaces, "br0", "lower_eth0", "lower_veth1")
    (proc / "77" / "net" / "fib_trie").write_text(FIB_TRIE.replace("172.17.0.2", claimed))
    assert sockets.addresses_of(proc, 77) == [claimed] * counts


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc with ourselves and one TensorFlow process, 77, in a container of its own."""
    _interface(tmp_path / "sys/class/net", "docker0", "lower_veth1")
    _interface(tmp_path / "sys/class/net", "veth1")
    tmp_path = tmp_path / "proc"
    (tmp_path / "net").mkdir(parents=True)
    (tmp_path / "net" / "fib_trie").write_text(FIB_TRIE.replace("172.17.0.2", "172.17.0.1"))
    (tmp_path / "net" / "route").write_text(_ROUTES)
    site = "/usr/lib/python3/dist-packages"
    header = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    listening = "   0: 00000000000000000000000000000000:1779 0:0 0A 0:0 00:0 0 0 0 4711 1 0 100 0 0 10 0\n"
    established = "   1: 0100007F:1779 0100007F:9999 01 0:0 00:0 0 0 0 4712 1 0 100 0 0 10 0\n"
    for pid, namespace in ((os.getpid(), "own"), (77, "container")):
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "net").mkdir()
        (tmp_path / str(pid) / "ns").mkdir()
        (tmp_path / namespace).touch()
        (tmp_path / str(pid) / "ns" / "net").symlink_to(tmp_path / namespace)
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) b) S 1 " + "0 " * 17 + f"{pid} 0 0\n")
    job = tmp_path / "77"
    (job / "net" / "tcp6").write_text(header + listening)
    (job / "net" / "tcp").write_text(header + established)
    (job / "net" / "fib_trie").write_text(FIB_TRIE)
    (job / "fd" / "5").symlink_to("socket:[4711]")
    (job / "maps").write_text(MAPS.format(site=site))
    (job / "cmdline").write_bytes(b"python\0train.py\0")
    for name in ("tensorflow_io_gcs_filesystem-0.37.1.dist-info", "tensorflow-2.17.0.dist-info"):
        Path(f"{job}/root{site}/{name}").mkdir(parents=True)
    return tmp_path


def test_container_is_reached_by_its_address(proc, monkeypatch):
    asked = []
    monkeypatch.setattr(sockets, "arrives_in", lambda *_: True)
    monkeypatch.setattr(discovery, "check_http2", lambda address, *_, **__: asked.append(address))
    monkeypatch.setattr(discovery, "probe", lambda address, *_: asked.append(address))
    (server,) = Finder(proc).find().servers
    assert asked == ["172.17.0.2:6009"] * 2
    assert (server.address, server.pid, server.command) == ("172.17.0.2:6009", 77, "python train.py")
    assert (server.framework, server.version) == ("TensorFlow", "2.17.0")


def test_container_out_of_reach_is_noted(proc, asked, monkeypatch):
    monkeypatch.setattr(sockets, "arrives_in", lambda *_: True)
    found = Finder(proc).find()
    assert found.servers == () and asked == ["172.17.0.2:6009"]
    assert "process 77 listens on port 6009 inside a container" in found.notes[0] and "no route" in found.notes[0]


def test_long_tables_of_a_container_hold_no_search_up(proc, monkeypatch):
    """Each look costs a tenth of a second with 100,000 connections."""
    looks = []
    monkeypatch.setattr(sockets, "_has_connection", lambda *_: bool(looks.append(1)))
    seconds = itertools.count()
    monkeypatch.setattr(sockets, "time", SimpleNamespace(monotonic=lambda: float(next(seconds)), sleep=lambda _: None))
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not sockets.arrives_in(proc, 77, "127.0.0.1", server.getsockname()[1], 2.0)
    assert 2 <= len(looks) <= 4


def test_a_server_at_an_address_that_is_another_container_s_is_not_taken(proc, monkeypatch):
    """Its bridge leads there, as it would to this one."""
    monkeypatch.setattr(sockets, "arrives_in", lambda *_: False)
    monkeypatch.setattr(discovery, "check_http2", lambda *_, **__: None)
    monkeypatch.setattr(discovery, "probe", lambda *_: None)
    found = Finder(proc).find()
    assert found.servers == () and "172.17.0.2:6009 do not reach it" in found.notes[0]


def _connection(host: str, port: int, remote_port: int) -> str:
    words = int.from_bytes(ipaddress.ip_address(host).packed, sys.byteorder)
    return f"   0: {words:08X}:{port:04X} 00000000:{remote_port:04X} 01 0:0 00:0 0 0 0 4713 1 0 100 0 0 10 0\n"


def test_a_connection_is_seen_on_the_side_where_it_arrives(proc):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert sockets.arrives_in(Path("/proc"), os.getpid(), "127.0.0.1", port, 10.0)
        assert not sockets.arrives_in(proc, 77, "127.0.0.1", port, 10.0)
        # A container that has one for each port that gputop's may come from.
        (proc / "77" / "net" / "tcp").write_text("header\n" + "".join(
            _connection("127.0.0.1", port, remote) for remote in range(1, 1 << 16)))
        assert not sockets.arrives_in(proc, 77, "127.0.0.1", port, 10.0)
    assert not sockets.arrives_in(Path("/proc"), os.getpid(), "127.0.0.1", port, 10.0)


def test_very_many_claimed_addresses_cost_little(proc, monkeypatch):
    looked_at = []
    monkeypatch.setattr(sockets, "_stays", lambda address, *_: looked_at.append(address) or False)
    (proc / "77" / "net" / "fib_trie").write_text("".join(
        f"     |-- 172.17.{n >> 8}.{n & 255}\n        /32 host LOCAL\n" for n in range(1 << 16)))
    assert sockets.addresses_of(proc, 77) == [] and 0 < len(looked_at) <= 256


def test_very_many_networks_of_a_user_are_not_all_looked_at(tmp_path):
    pids = range(1, 101)
    for pid in pids:
        (tmp_path / str(pid) / "ns").mkdir(parents=True)
        (tmp_path / str(pid) / "ns" / "net").touch()
        if os.geteuid() == 0:
            os.chown(tmp_path / str(pid), 12345 if pid < 90 else 12346, -1)
    networks, refused = sockets.networks(tmp_path, pids)
    others = 11 if os.geteuid() == 0 else 0
    assert len(networks) == 64 + others and not refused
    assert set(networks.values()) >= {1, *range(90, 90 + others)}


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def two_containers() -> Iterator[tuple[int, int]]:
    """The PIDs of two processes, each in a network of its own at one bridge: 10.231.77.2 and .3; both listen at 6009,
    and the first claims the second one's address, too."""
    program = ("import socket, sys; sys.stdin.readline(); "
               "own = socket.create_server(('', 6009)); print('ready', flush=True); sys.stdin.read()")
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(subprocess.Popen(
            ["unshare", "--net", sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True)) for _ in range(2)]
        for process in processes:
            stack.callback(process.kill)
        try:
            _ip("link", "add", "gpbr0", "type", "bridge")
            stack.callback(_ip, "link", "del", "gpbr0")
            _ip("address", "add", "10.231.77.1/24", "dev", "gpbr0")
            _ip("link", "set", "gpbr0", "up")
            own = Path("/proc/self/ns/net").stat().st_ino
            for n, process in enumerate(processes, 2):
                while sockets.network_namespace(Path("/proc"), process.pid) == own:
                    assert process.poll() is None
                _ip("link", "add", f"gpv{n}", "type", "veth", "peer", "name", "eth0", "netns", str(process.pid))
                _ip("link", "set", f"gpv{n}", "master", "gpbr0", "up")
                inside = ["nsenter", "--net", "--target", str(process.pid), "ip"]
                for words in (["address", "add", f"10.231.77.{n}/24", "dev", "eth0"], ["link", "set", "eth0", "up"],
                              ["link", "set", "lo", "up"]):
                    subprocess.run([*inside, *words], check=True, capture_output=True)
            # On its loopback interface, so that it does not answer for it on the bridge either.
            subprocess.run(["nsenter", "--net", "--target", str(processes[0].pid), "sh", "-c",
                            "ip address add 10.231.77.3/32 dev lo; echo 1 > /proc/sys/net/ipv4/conf/eth0/arp_ignore"],
                           check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("no networks can be made here")
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.stdout.readline() == "ready\n"
        yield processes[0].pid, processes[1].pid


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and ip")
def test_a_container_cannot_claim_the_address_of_its_neighbor(two_containers):
    claiming, neighbor = two_containers
    proc = Path("/proc")
    assert set(sockets.addresses_of(proc, claiming)) == {"10.231.77.2", "10.231.77.3"}
    arrives = [(pid, n) for pid in two_containers for n in (2, 3)
               if sockets.arrives_in(proc, pid, f"10.231.77.{n}", 6009, 10.0)]
    assert arrives == [(claiming, 2), (neighbor, 3)]


def test_made_up_proc_is_read_as_meant(proc):
    namespace = sockets.network_namespace(proc, 77)
    assert sockets.listeners(proc, 77, namespace) == [Listener(4711, 6009, namespace)]
    stat = stat_of(77, proc)
    assert stat is not None and (stat.parent, stat.start) == (1, 77)
    assert sockets.with_children(proc, [1]) == {1, 77, os.getpid()}


@pytest.mark.parametrize(("maps", "framework", "version"), [
    ("/opt/v/lib/python3.12/site-packages/jaxlib/libjax_common.so", "JAX", "0.6.1"),
    ("/s/tensorflow/libtensorflow_framework.so.2\n1-2 r-xp 0 08:01 1 /s/jaxlib/xla_extension.so", "JAX", None),
    ("/usr/lib/libcuda.so.535", None, None),
    ("/usr/lib/libc.so.6", None, None),
])
def test_framework_from_what_is_mapped(proc, maps, framework, version):
    (proc / "77" / "maps").write_text(f"7f00-7f01 r-xp 0000 08:01 1   {maps}\n")
    (proc / "77" / "root" / "opt/v/lib/python3.12/site-packages/jax-0.6.1.dist-info").mkdir(parents=True)
    relevant, *found = Finder(proc)._libraries(77)
    assert found == [framework, version]
    assert relevant == ("libc." not in maps)


def test_jobs_without_a_server_are_found_by_what_they_have_mapped(proc):
    """A process that is young is looked at again; one that is older than ten minutes once."""
    (proc / "uptime").write_text("100.0 1.0\n")
    jobs = TrainingProcesses(proc)
    maps = proc / "77" / "maps"
    library = maps.read_text()
    maps.write_text("")
    assert jobs.find() == ()
    maps.write_text(library)
    assert jobs.find() == (77,)
    maps.write_text("")
    assert jobs.find() == (77,)  # it stays what it is
    (proc / "77" / "stat").write_text((proc / "77" / "stat").read_text().replace(" 77 ", " 78 "))  # another process
    (proc / "uptime").write_text("1000.0 1.0\n")
    assert jobs.find() == ()
    maps.write_text(library)
    assert jobs.find() == ()


def test_a_forked_worker_of_a_job_is_no_job_and_neither_is_one_of_another_user(proc, monkeypatch):
    (proc / "uptime").write_text("100.0 1.0\n")
    shutil.copytree(proc / "77", proc / "78", symlinks=True)
    (proc / "78" / "stat").write_text((proc / "77" / "stat").read_text().replace("77", "78").replace(" 1 ", " 77 ", 1))
    stat = stat_of(78, proc)
    assert stat is not None and stat.parent == 77
    assert TrainingProcesses(proc).find() == (77,)
    monkeypatch.setattr(discovery, "effective_uid", lambda _pid, _proc: os.geteuid() + 1)
    assert TrainingProcesses(proc).find() == ()


@pytest.mark.parametrize(("environ", "rank"), [
    ({}, None), ({"RANK": "3", "LOCAL_RANK": "1"}, "rank 3"), ({"SLURM_PROCID": "7"}, "rank 7"),
    ({"LOCAL_RANK": "1"}, "rank 1"), ({"RANK": "x"}, None), ({"OMPI_COMM_WORLD_RANK": "0"}, "rank 0"),
    ({"TF_CONFIG": '{"task": {"type": "worker", "index": 2}}', "RANK": "9"}, "worker 2"),
    ({"TF_CONFIG": "{", "RANK": "9"}, "rank 9"), ({"TF_CONFIG": '{"cluster": {}}'}, None),
    ({"RANK": "9" * 5000, "LOCAL_RANK": "1"}, "rank 1"),  # more digits than int() takes
    ({"TF_CONFIG": '{"task": {"type": "rank", "index": %s}}' % ("9" * 4000)}, None),
    ({"TF_CONFIG": '{"task": {"type": "rank", "index": -1}}'}, None),
])
def test_the_place_in_the_job(environ, rank):
    assert discovery.rank_of(environ) == rank


def test_a_file_that_is_only_named_like_a_library_or_mapped_as_data_is_no_job(proc):
    """Mapping a file of any name costs a process nothing."""
    maps = proc / "77" / "maps"
    maps.write_text(MAPS.format(site="/s").replace("r-xp", "r--p"))
    assert discovery.is_training(77, proc) is False and Finder(proc).find().servers == ()


@pytest.mark.parametrize(("content", "job"), [
    (b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\0", True), (b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\0", False),
    (b"", False), (None, False), ("link", False), ("pipe", False)])
def test_of_another_user_s_process_the_library_itself_is_looked_at(proc, content, job, monkeypatch):
    monkeypatch.setattr(discovery, "effective_uid", lambda _pid, _proc: os.geteuid() + 1)
    library = proc / "77" / "root" / "usr/lib/python3/dist-packages/tensorflow/libtensorflow_cc.so.2"
    library.parent.mkdir(parents=True)
    if content == "link":
        library.symlink_to("/proc/self/exe")
    elif content == "pipe":
        os.mkfifo(library)
    elif isinstance(content, bytes):
        library.write_bytes(content)
    assert discovery.is_training(77, proc) is job


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to run a process of another user")
def test_the_user_of_a_server_is_the_effective_one():
    with asleep(user=12345) as running:
        assert discovery.effective_uid(running.pid) == 12345


TWO_WORKERS = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'


@pytest.mark.parametrize(("version", "config", "mapped", "at_risk"), [
    ("2.21.0", TWO_WORKERS, "", True), ("2.15.1", TWO_WORKERS, "", False), ("2.21.0", None, "", False),
    ("2.21.0", TWO_WORKERS.replace(', "b:1"', ""), "", False), ("2.21.0", "[1]", "", False),
    ("2.21.0", TWO_WORKERS, "/usr/lib/libcuda.so.535", False),
])
def test_workers_that_a_capture_may_crash_are_known(proc, version, config, mapped, at_risk):
    (folder,) = (proc / "77").rglob("tensorflow-2.17.0.dist-info")
    folder.rename(folder.with_name(f"tensorflow-{version}.dist-info"))
    with (proc / "77" / "maps").open("a") as maps:
        maps.write(f"7f02-7f03 r-xp 0000 08:01 2   {mapped}\n")
    if config is not None:
        (proc / "77" / "environ").write_bytes(b"A=b\0TF_CONFIG=" + config.encode() + b"\0")
    warning = Finder(proc).crash_risk([77, 78])
    assert (warning is not None) == at_risk
    assert warning is None or ("process 77" in warning and "can crash workers" in warning)


@pytest.mark.parametrize(("servers", "at_risk"), [(1, False), (2, True)])
def test_workers_whose_script_sets_tf_config_by_itself_are_known_by_their_second_server(servers, at_risk, monkeypatch):
    """What a script sets is not in /proc; tf.distribute's own gRPC server is beside the profiler's."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    finder = Finder()
    monkeypatch.setattr(finder, "_libraries", lambda pid: (True, "TensorFlow", "2.21.0"))
    monkeypatch.setattr(discovery, "read_maps", lambda pid, proc: b"")
    with contextlib.ExitStack() as running:
        for _ in range(servers):
            running.enter_context(serve(FakeProfiler(), host="0.0.0.0"))
        assert (finder.crash_risk([os.getpid()]) is not None) == at_risk


def test_a_server_is_described_in_a_line():
    server = discovery.ProfilerServer("a:1", 7, user_name(os.geteuid()), "python train.py", "TensorFlow", "2.21.0",
                                      "worker 1")
    assert server.about() == "TensorFlow 2.21.0, worker 1: python train.py"
    assert replace(server, user="ana", rank=None, version=None).about() == "TensorFlow, ana: python train.py"
    assert replace(server, framework=None, rank=None).about() == "python train.py"
    for uid, user, other in ((None, "bob", ""), (os.geteuid(), "bob", ""), (os.geteuid() + 1, "bob", "bob"),
                             (12345, None, "12345")):
        assert replace(server, uid=uid, user=user).owner_if_other == other


IPV6_ONLY = (
    sys.executable, "-c",
    "import socket, sys\n"
    "s = socket.socket(socket.AF_INET6); s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)\n"
    "s.bind(('::', 0)); s.listen(); print(s.getsockname()[1], flush=True); sys.stdin.read()\n",
)


def test_a_server_on_ipv6_only_is_asked_there(asked):
    with serving_process(*IPV6_ONLY) as (running, port):
        if not port:
            pytest.skip("this machine has no IPv6")
        Finder().find([running.pid])
    assert asked == [f"127.0.0.1:{port}", f"[::1]:{port}"]


@pytest.mark.parametrize(("path", "found"), [
    ("/v/lib/python3.11/site-packages/tensorflow/python/_x.so", ("tensorflow", "/v/lib/python3.11/site-packages/")),
    ("/my files/jaxlib/_jax.so", ("jaxlib", "/my files/")), ("/x/tensorflow/y/jaxlib/z.abi3.so.2", ("jaxlib",
     "/x/tensorflow/y/")), ("/usr/lib/libcuda.so.535.1", ("", "")), ("/x/libtensorflow_cc.so.2", ("", "")),
    ("/usr/lib/libc.so.6", None), ("/home/ana/tensorflow/model.ckpt", None), ("/usr/bin/tensorflow.so", None),
    ("/" + "tensorflow/" * 370, None),
])
def test_a_mapped_file_is_known_by_its_path(path, found):
    assert discovery._package_of(path) == found


def test_paths_made_to_be_slow_are_judged_in_linear_time(tmp_path):
    """200 of these took a minute of the monitor's process. 65,530 mappings of 4,095 bytes are cut at 32 MB."""
    (tmp_path / "7").mkdir()
    lines = (f"7f00-7f01 r-xp 0000 08:01 1   /{'tensorflow/' * 370}{i}\n" for i in range(2000))
    (tmp_path / "7" / "maps").write_text("".join(lines))
    assert discovery.is_training(7, tmp_path) is False


def test_what_a_process_says_of_itself_is_read_within_bounds(tmp_path):
    """It may point to any of its memory as its environment or its command (prctl(2), PR_SET_MM_MAP)."""
    (tmp_path / "7").mkdir()
    for name in ("environ", "cmdline"):
        with (tmp_path / "7" / name).open("wb") as file:
            file.write(b"RANK=3\0")
            file.truncate(64 << 30)  # sparse
    assert discovery.rank_of(environ_of(7, tmp_path)) == "rank 3"
    assert len(command_of(7, tmp_path)) <= 1 << 16


def test_of_another_users_process_few_files_are_opened(tmp_path, monkeypatch):
    (tmp_path / "7").mkdir()
    lines = (f"7f00-7f01 r-xp 0000 08:01 1   /x/tensorflow/{i}.so\n" for i in range(5000))
    (tmp_path / "7" / "maps").write_text("".join(lines))
    opened: list[Path] = []
    monkeypatch.setattr(discovery, "effective_uid", lambda pid, proc: os.geteuid() + 1)
    monkeypatch.setattr(discovery, "_is_library", lambda proc, pid, path: opened.append(path) or False)
    assert discovery.is_training(7, tmp_path) is False and len(opened) == 64


def test_a_training_job_is_recognized_by_its_libraries(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "maps").write_text(MAPS.format(site="/site-packages"))
    assert discovery.is_training(7, tmp_path) is True and discovery.is_training(8, tmp_path) is None
    # Not this process: another test may have loaded a library of TensorFlow's.
    with asleep() as other:
        assert discovery.is_training(other.pid) is False

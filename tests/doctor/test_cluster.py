"""What the node is to a cluster: clocks as chrony and the kernel tell them, adapters, RAS, exporters."""

from __future__ import annotations

import http.server
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gputop.core.errors import GputopError
from gputop.doctor import cluster
from gputop.doctor.driver_facts import DriverFacts, GpuFacts
from tests.cluster import engines
from tests.dripping import DRIPS, dripping
from tests.listening import free_port
from tests.records import replace
from tests.sources.host.rdma_tree import RdmaTree

FACTS = DriverFacts(init_code=0, driver="580.1", count=2, gpus=tuple(GpuFacts(i, 0, "NVIDIA H100") for i in range(2)))
TRACKED = "A9FEA97B,169.254.169.123,4,1763866868.1,-0.000012500,0.000001,0.000002,-1.2,0.0,0.01,{},{},16.2,Normal\n"


@pytest.mark.parametrize(("said", "status", "words"), [
    (TRACKED.format("0.000200", "0.000087500"), "ok", "so two nodes like this differ by up to 400 µs"),
    (TRACKED.format("0.200", "0.010"), "warn", "the order of short events"),
    ("7F7F0101,,8,1795402428.6,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,Normal\n", "ok", "its own reference"),
    (TRACKED.format("0", "0").replace("Normal", "Not synchronised"), "warn", "no source yet"),
    (TRACKED.format("x", "y"), "unknown", "cannot parse"),
])
def test_what_chrony_expects_its_error_to_be(tmp_path: Path, said: str, status: str, words: str) -> None:
    check = cluster.clock(tmp_path, lambda: said)
    assert check.status == status and words in check.detail, check.detail


def test_without_chrony_the_kernel_tells(tmp_path: Path) -> None:
    def kernel(*told: int) -> cluster.Check:
        return cluster.clock(tmp_path, lambda: None, lambda: (told[0], told[1]) if told else None)

    assert kernel(16_000_000, 0x40).status == "warn" and "chrony" in (kernel(16_000_000, 0x40).fix or "")
    assert kernel(2000, 1).status == "ok" and "differ by up to 4" in kernel(2000, 1).detail
    assert kernel().status == "unknown"
    assert cluster.clock(tmp_path, lambda: None).status in ("ok", "warn")  # this machine's kernel
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/comm").write_text("ptp4l\n")
    assert "PTP (ptp4l) is running" in kernel(16_000_000, 0x40).detail


def test_a_real_chrony_is_understood(tmp_path: Path) -> None:
    daemon, chronyc = engines.needed("chronyd", "chronyc")
    (tmp_path / "run").mkdir(mode=0o770)
    (tmp_path / "conf").write_text(f"local stratum 8\ncmdport 0\nport 0\nbindcmdaddress {tmp_path}/run/s\n"
                                   f"pidfile {tmp_path}/run/pid\nuser {tmp_path.owner()}\n")
    with subprocess.Popen([daemon, "-x", "-d", "-f", tmp_path / "conf"], stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL) as process:
        try:
            ask = [chronyc, "-c", "-h", f"{tmp_path}/run/s", "tracking"]
            engines.until_serving(lambda: not subprocess.run(ask, capture_output=True).returncode, "chronyd", [process])
            check = cluster.clock(tmp_path, lambda: subprocess.run(ask, capture_output=True, text=True).stdout)
        finally:
            process.terminate()
    assert check.status == "ok" and "stratum 8" in check.detail


# -- adapters -------------------------------------------------------------------------------------


def two_sockets(root: Path) -> RdmaTree:
    for index, node in enumerate((0, 1)):
        bus = f"0000:{0x18 + index:02x}:00.0"
        (root / "proc/driver/nvidia/gpus" / bus).mkdir(parents=True)
        (root / "sys/bus/pci/devices" / bus).mkdir(parents=True)
        (root / "sys/bus/pci/devices" / bus / "numa_node").write_text(f"{node}\n")
    return RdmaTree(root)


def test_adapters_and_the_gpus_without_one(tmp_path: Path) -> None:
    assert cluster.adapters(FACTS, tmp_path).status == "ok"
    tree = two_sockets(tmp_path)
    tree.add("mlx5_0", node=0, pci="0000:17:00.0")
    other = tree.add("mlx5_1", node=1, pci="0000:97:00.0")
    assert cluster.adapters(FACTS, tmp_path).status == "ok"
    (other / "rate").write_text("100 Gb/sec (4X EDR)\n")
    slow = cluster.adapters(FACTS, tmp_path)
    assert slow.status == "warn" and "mlx5_1 is slower" in slow.detail and "12.5 GB/s" in slow.detail
    (other / "state").write_text("1: DOWN\n")
    far = cluster.adapters(FACTS, tmp_path)
    assert "GPU 1 has no adapter with a link on its NUMA node (mlx5_1 there is down)" in far.detail
    assert far.fix == "ibstat mlx5_1"
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/1/state").write_text("2: INIT\n")
    assert cluster.adapters(FACTS, tmp_path).status == "fail"


# -- RAS and exporters ----------------------------------------------------------------------------


def test_ras_is_there_or_not() -> None:
    port = free_port()
    there = {"NCCL_RAS_ADDR": f"localhost:{port}"}
    with socket.create_server(("127.0.0.1", port)):
        assert "can name" in cluster.ras(FACTS, there).detail
    assert cluster.ras(FACTS, there).status == "ok"  # no job
    job = replace(FACTS, gpus=(GpuFacts(0, 0, "NVIDIA H100", pids=(7,)),))
    assert cluster.ras(job, there).status == "warn" and "missing rank" in cluster.ras(job, there).detail
    with pytest.raises(GputopError, match="is not HOST:PORT"):
        cluster.ras(job, {"NCCL_RAS_ADDR": "nonsense"})


@pytest.fixture
def page() -> Iterator[dict[str, bytes]]:
    said = {"": b""}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(said[""])

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        said["port"] = str(server.server_address[1]).encode()
        yield said
        server.shutdown()


@pytest.mark.parametrize(("kind", "text", "status", "words"), [
    ("dcgm", 'DCGM_FI_PROF_SM_ACTIVE{gpu="0"} 0.5\nDCGM_FI_DEV_POWER_USAGE{gpu="0"} 300\n', "ok", "2 values"),
    ("dcgm", 'DCGM_FI_DEV_POWER_USAGE{gpu="0"} 300\n', "warn", "does not report SM activity"),
    ("dcgm", 'DCGM_FI_DEV_GPU_UTIL_RATIO{gpu="0"} 0.9\n', "warn", "does not report SM activity"),
    ("dcgm", 'DCGM_FI_DEV_POWER_USAGE{gpu="0"} 9223372036854775794\n', "warn", "without GPU metrics"),
    ("dcgm", "", "warn", "without GPU metrics"),
    ("gputop", 'gputop_gpu_power_watts{gpu="0"} 300\ngputop_sample_timestamp_seconds 1000.0\n', "ok", "1 values"),
    ("gputop", 'gputop_gpu_power_watts{gpu="0"} 300\ngputop_sample_timestamp_seconds 300.0\n', "warn", "12 min old"),
    ("gputop", "gputop_sample_timestamp_seconds 300.0\n", "warn", "12 min old"),  # which leaves the figures out
    ("gputop", 'gputop_gpu_power_watts{gpu="0"} e\ngputop_sample_timestamp_seconds -\n', "warn", "without GPU metrics"),
    ("all-smi", "prometheus_build_info 1\n", "ok", "no exporter answers"),
    ("nvitop", 'gpu_power_usage_W{index="0"} NaN\n\xff\xfe', "warn", "without GPU metrics"),
])
def test_an_exporter_answers_and_its_figures_are_judged(page: dict[str, bytes], kind: str, text: str, status: str,
                                                        words: str) -> None:
    page[""] = text.encode("latin-1")
    check = cluster.exporter({int(page["port"]): kind}, lambda: 1000.0)
    assert check.status == status and words in check.detail, check.detail


@pytest.mark.parametrize("way", DRIPS)
def test_a_program_at_the_port_that_answers_a_byte_at_a_time_is_left(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_TIMEOUT_S", 0.2)
    with dripping(way) as address:
        assert cluster.exporter({int(address.rpartition(":")[2]): "dcgm"}).detail.startswith("no exporter answers")


def test_a_port_without_an_exporter_is_no_fault() -> None:
    assert cluster.exporter({free_port(): "dcgm"}).status == "ok"

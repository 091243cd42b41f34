"""RDMA ports: what the kernel's files of mlx5 say, and what adapters without counters say."""

from __future__ import annotations

from pathlib import Path

import pytest

from gputop.sources.host import rdma
from gputop.sources.host.rdma import FIRST, FULL, PERIOD_S, REDISCOVER_S, WENT_BACK, RdmaPorts
from tests.sources.host.proc_tree import Ticking
from tests.sources.host.rdma_tree import RdmaTree


def test_traffic_is_counted_in_words_of_four_bytes(tmp_path: Path) -> None:
    tree, clock = RdmaTree(tmp_path), Ticking()
    folder = tree.add(node=1)
    tree.count(folder, port_rcv_data=10**12, port_xmit_data=5, packet_seq_err=3, local_ack_timeout_err=4,
               out_of_sequence=99)
    ports = RdmaPorts(clock, tmp_path)
    first, = ports.read()
    assert (first.name, first.state, first.link_layer, first.numa_node) == ("mlx5_0", "ACTIVE", "InfiniBand", 1)
    assert first["rdma_max_bytes_per_s"].value == 50e9
    assert first["rdma_rx_bytes_per_s"].reason == FIRST
    assert first["rdma_retransmits"].value == 7
    clock.now_s += 2.0
    tree.count(folder, port_rcv_data=10**12 + 20 * 10**9, port_xmit_data=5 + 10**9)
    second, = ports.read()
    assert second["rdma_rx_bytes_per_s"].value == 40e9 and second["rdma_tx_bytes_per_s"].value == 2e9
    assert second.load_ratio == 0.8


def test_ports_stand_in_the_order_of_their_numbers_and_new_ones_are_found(tmp_path: Path) -> None:
    tree, clock = RdmaTree(tmp_path), Ticking()
    assert RdmaPorts(clock, tmp_path / "none").read() == ()
    for i in (10, 2):
        tree.add(f"mlx5_{i}", pci=f"0000:{i:02x}:00.0", link_layer="Ethernet", node=-1)
    ports = RdmaPorts(clock, tmp_path)
    assert [(port.name, port.numa_node) for port in ports.read()] == [("mlx5_2", None), ("mlx5_10", None)]
    tree.add("mlx5_2", 2, pci="0000:02:00.0")
    clock.now_s += REDISCOVER_S
    assert [port.name for port in ports.read()] == ["mlx5_2:1", "mlx5_2:2", "mlx5_10"]


@pytest.mark.parametrize(("count", "why"), [
    ("N/A (no PMA)", "the adapter does not count this: N/A (no PMA)"), (0xFFFFFFFF, FULL), (3, WENT_BACK), ("-1", "-1"),
    ("", "empty")])
def test_a_counter_that_says_nothing_is_no_traffic(tmp_path: Path, count: int | str, why: str) -> None:
    tree, clock = RdmaTree(tmp_path), Ticking()
    folder = tree.add(state="1: DOWN", rate="")
    tree.count(folder, port_rcv_data=7, port_xmit_data=7)
    ports = RdmaPorts(clock, tmp_path)
    ports.read()
    clock.now_s += 1.0
    tree.count(folder, port_rcv_data=count, port_xmit_data=8)
    port, = ports.read()
    assert port.state == "DOWN" and why in (port["rdma_rx_bytes_per_s"].reason or "")
    assert port["rdma_tx_bytes_per_s"].value == 4
    assert port["rdma_max_bytes_per_s"].value is None and port.load_ratio is None


def test_an_adapter_without_the_files_has_reasons(tmp_path: Path) -> None:
    folder = RdmaTree(tmp_path).add()
    for file in (*(folder / "counters").iterdir(), *(folder / "hw_counters").iterdir()):
        file.unlink()  # as rxe has them
    port, = RdmaPorts(Ticking(), tmp_path).read()
    assert "does not report port_rcv_data" in (port["rdma_rx_bytes_per_s"].reason or "")
    assert "does not report packet_seq_err" in (port["rdma_retransmits"].reason or "")


def test_an_adapter_that_is_slow_to_answer_is_asked_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RdmaTree(tmp_path).add()
    clock, asked = Ticking(), []
    read = rdma.proc_files.read

    def slow(path: str, limit: int = 4096) -> bytes:
        clock.now_s += 0.1
        asked.append(path)
        return read(path, limit)

    monkeypatch.setattr(rdma.proc_files, "read", slow)
    ports = RdmaPorts(clock, tmp_path)
    ports.read()
    clock.now_s += 5 * PERIOD_S  # it took 0.8 s
    before = len(asked)
    ports.read()
    assert len(asked) == before
    clock.now_s += 60.0
    ports.read()
    assert len(asked) > before

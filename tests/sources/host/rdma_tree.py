"""/sys/class/infiniband as the kernel lays it out for mlx5: the class has links into /sys/devices."""

from __future__ import annotations

from pathlib import Path

# What a ConnectX-7 has below counters and hw_counters, with the values of a port that has just come up.
COUNTERS = ("excessive_buffer_overrun_errors", "link_downed", "link_error_recovery", "local_link_integrity_errors",
            "multicast_rcv_packets", "multicast_xmit_packets", "port_rcv_constraint_errors", "port_rcv_data",
            "port_rcv_errors", "port_rcv_packets", "port_rcv_remote_physical_errors", "port_rcv_switch_relay_errors",
            "port_xmit_constraint_errors", "port_xmit_data", "port_xmit_discards", "port_xmit_packets",
            "port_xmit_wait", "symbol_error", "unicast_rcv_packets", "unicast_xmit_packets", "VL15_dropped")
HW_COUNTERS = ("duplicate_request", "implied_nak_seq_err", "lifespan", "local_ack_timeout_err", "out_of_buffer",
               "out_of_sequence", "packet_seq_err", "req_cqe_error", "resp_cqe_error", "rnr_nak_retry_err",
               "rx_atomic_requests", "rx_read_requests", "rx_write_requests")


class RdmaTree:
    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, name: str = "mlx5_0", port: int = 1, *, node: int = 0, state: str = "4: ACTIVE",
            rate: str = "400 Gb/sec (4X NDR)", link_layer: str = "InfiniBand", pci: str = "0000:18:00.0") -> Path:
        device = self.root / "sys/devices/pci0000:15" / pci
        folder = device / "infiniband" / name / "ports" / str(port)
        for below, names in (("counters", COUNTERS), ("hw_counters", HW_COUNTERS)):
            (folder / below).mkdir(parents=True)
            for file in names:
                (folder / below / file).write_text("0\n")
        (folder / "hw_counters/lifespan").write_text("10\n")
        for file, text in (("state", state), ("phys_state", "5: LinkUp"), ("rate", rate), ("link_layer", link_layer)):
            (folder / file).write_text(f"{text}\n")
        (device / "numa_node").write_text(f"{node}\n")
        link = self.root / "sys/class/infiniband" / name
        if not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            (device / "infiniband" / name / "device").symlink_to("../..")
            link.symlink_to(f"../../devices/pci0000:15/{pci}/infiniband/{name}")
        return folder

    def count(self, folder: Path, **counts: int | str) -> None:
        for name, value in counts.items():
            kind = "counters" if name in COUNTERS else "hw_counters"
            (folder / kind / name).write_text(f"{value}\n")

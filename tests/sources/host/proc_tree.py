"""Made-up /proc trees, a clock to turn, and GPUs that list processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gputop.core.samples import GpuInfo, GpuProcess, GpuSample, Reading

FIRST_NAMESPACE, SOME_NAMESPACE = 4026531836, 4026532999
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Ticking:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def on_gpus(*pids: int, gpus: int | Sequence[int] = 1) -> list[GpuSample]:
    held = tuple(GpuProcess(pid, "C", None, Reading(1.0, "bytes"), Reading.missing("ratio", "not sampled yet"))
                 for pid in pids)
    indices = range(gpus) if isinstance(gpus, int) else gpus
    return [GpuSample(GpuInfo(i, f"GPU-{i}", "H100", f"00000000:{0x1B + i:02X}:00.0"), {}, held) for i in indices]


class ProcTree:
    """A folder that looks like /proc as far as gputop reads it."""

    def __init__(self, root: Path, inode: int = FIRST_NAMESPACE) -> None:
        self.root = root
        (root / "self/ns").mkdir(parents=True)
        (root / "self/ns/pid").symlink_to(f"pid:[{inode}]")
        (root / "stat").write_text("cpu 0 0 0 0 0 0 0 0 0 0\nbtime 1000\n")

    def add(self, pid: int, parent: int = 1, *, ticks: int = 0, start: int = 500, state: str = "S",
            name: bytes = b"a ) b (c", cmdline: bytes = b"python\0train.py\0", uid: int = 4711,
            pids: Sequence[int] = (), cgroup: str = "0::/user.slice\n", environ: bytes = b"HOME=/\0",
            io: tuple[int, int] | None = (0, 0)) -> Path:
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        fields = [state, parent, 0, 0, 0, 0, 0, 0, 0, 0, 0, ticks, 0, 0, 0, 20, 0, 7, 0, start, 0, 256]
        stat = b"%d (%s) " % (pid, name) + " ".join(map(str, fields)).encode() + b" 0 0\n"
        nspid = "\t".join(map(str, pids or (pid,)))
        files = {
            "stat": stat, "cmdline": cmdline, "cgroup": cgroup.encode(), "environ": environ,
            "status": f"Name:\tpython\nUid:\t{uid}\t0\t0\t0\nNSpid:\t{nspid}\n".encode()}
        if io is not None:
            files["io"] = b"rchar: 999\nread_bytes: %d\nwrite_bytes: %d\ncancelled_write_bytes: 0\n" % io
        for file, content in files.items():
            (folder / file).write_bytes(content)
        return folder

    def remove(self, pid: int) -> None:
        folder = self.root / str(pid)
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()

    def open_device(self, pid: int, device: str = "/dev/nvidia0") -> None:
        folder = self.root / str(pid) / "fd"
        folder.mkdir(exist_ok=True)
        (folder / str(3 + len(list(folder.iterdir())))).symlink_to(device)

    def map_device(self, pid: int, *devices: int) -> None:
        lines = ["55d0-55d1 r-xp 00000000 08:01 7 /usr/bin/python3", "7f00-7f01 rw-s 00000000 00:06 9 /dev/nvidiactl"]
        lines += [f"7f{n}0-7f{n}1 rw-s 00000000 00:06 530 /dev/nvidia{n}" for n in devices]
        (self.root / str(pid) / "maps").write_text("\n".join(lines) + "\n")

    def map_libraries(self, pid: int, *paths: str) -> None:
        lines = [f"7f{n}0-7f{n}1 r-xp 00000000 08:01 7                          {path}" for n, path in enumerate(paths)]
        (self.root / str(pid) / "maps").write_text("\n".join(lines) + "\n")

    def add_driver(self, minors: Sequence[int]) -> None:
        """/proc/driver/nvidia of GPUs 0, 1, … that have these minor numbers."""
        for index, minor in enumerate(minors):
            folder = self.root / f"driver/nvidia/gpus/0000:{0x1B + index:02x}:00.0"
            folder.mkdir(parents=True)
            (folder / "information").write_text(f"Model: \t\t NVIDIA H100\nDevice Minor: \t {minor}\n")

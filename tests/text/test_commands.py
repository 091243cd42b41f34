from __future__ import annotations

import pytest

from gputop.text.commands import command_of, cut_path, program_name, short_command, short_description


@pytest.mark.parametrize(("command", "short", "program"), [
    ("/opt/conda/bin/python3.11 -u /home/ana/vit/train.py --lr 1", "train.py --lr 1", "train.py"),
    ("python -W ignore -Xdev -O train.py", "train.py", "train.py"),
    ("/usr/bin/python -m pkg.train --x 1", "python -m pkg.train --x 1", "pkg.train"),
    ("python3 -c import time", "python3 -c import time", "python3"),
    ("python3 /opt/conda/bin/torchrun --nproc 8 train.py", "torchrun --nproc 8 train.py", "torchrun"),
    ("bash -x /home/ana/run.sh --fast", "run.sh --fast", "run.sh"), ("/usr/lib/xorg/Xorg :0", "Xorg :0", "Xorg"),
    ("-bash", "bash", "bash"), ("python", "python", "python"), ("[kworker/0:1]", "[kworker/0:1]", "[kworker/0:1]"),
    ("", "", ""), ("python train.py --token abcdef123456", "train.py --token ***", "train.py"),
    ("train --data=/mnt/a/very/long/path/to/imagenet/train", "train --data=/mnt/…/path/to/imagenet/train", "train")])
def test_a_command_begins_with_what_tells_it_apart(command: str, short: str, program: str) -> None:
    assert (short_command(command), program_name(command)) == (short, program)


def test_the_command_of_a_server_is_short_and_what_is_known_of_it_stays() -> None:
    assert short_description("TensorFlow 2.21.0, rank 1: /opt/bin/python /a/train.py") == (
        "train.py (TensorFlow 2.21.0, rank 1)")
    assert short_description("python /a/train.py --name x: y") == "train.py --name x: y"
    assert short_description("attached") == "attached"
    assert command_of("TensorFlow 2.21.0, rank 1: /opt/bin/python /a/train.py") == "/opt/bin/python /a/train.py"
    assert command_of("python /a/train.py --name x: y") == "python /a/train.py --name x: y"


@pytest.mark.parametrize("chars", range(4, 40))
def test_a_path_is_cut_in_the_middle_to_the_room_there_is(chars: int) -> None:
    path = "/mnt/data/runs/2026/experiment-17/events"
    assert len(cut_path(path, chars)) <= max(6, chars) and cut_path(path, 99) == path
    assert chars < 14 or cut_path(path, chars).endswith("/events")

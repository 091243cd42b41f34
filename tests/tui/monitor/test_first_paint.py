from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

from gputop.core.samples import LOST, GpuSample
from gputop.render.palette import SCHEMES
from gputop.tui.monitor.first_paint import paint
from gputop.tui.terminal.color_support import Preferences, TerminalPalette
from gputop.tui.terminal.first_frame import FirstFrame, ended_by_signals
from tests.fakes import node_sample
from tests.records import replace

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.mark.parametrize(("width", "height"), [(1, 1), (6, 12), (20, 5), (80, 24), (120, 40), (200, 50)])
def test_it_fits_the_screen_and_shows_the_figures(width: int, height: int) -> None:
    lines = ESCAPES.sub("", paint(node_sample(10), 1.0, width, height, TerminalPalette())).split("\r\n")
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    if width >= 80:
        first = next(line for line in lines if line.startswith(" 0 "))
        assert "node-07" in lines[0] and "71.2/79.6" in first and "50%" in first


def test_without_color_there_are_no_color_sequences_and_in_ascii_nothing_else() -> None:
    text = paint(node_sample(10), 1.0, 100, 30, TerminalPalette(colors="none", glyphs="ascii"))
    assert set(re.findall(r"\x1b\[([0-9;]*)m", text)) <= {"0", "1"}, "bold at most"
    assert text.isascii()


def test_a_lost_gpu_and_doctored_names_are_harmless() -> None:
    def lose(gpu: GpuSample, tick: int) -> GpuSample:
        return replace(gpu, state=LOST, message="gone\x1b[2J", readings={}) if gpu.info.index == 2 else gpu

    text = paint(node_sample(10, change=lose), 1.0, 120, 40, TerminalPalette(colors="none"))
    assert "lost: gone�[2J" in text


@pytest.mark.parametrize("theme", ["gputop-dark", "gputop-light", "gputop-contrast"])
def test_it_stands_on_the_ground_of_the_theme(theme: str) -> None:
    palette = Preferences(theme=theme).palette()
    color = SCHEMES[palette.scheme].names["ground"]
    ground = "48;2;{};{};{}m".format(*(int(color[i:i + 2], 16) for i in (1, 3, 5)))
    text = paint(node_sample(10), 1.0, 100, 30, palette, "\x1b[2J")
    assert text.startswith("\x1b[" + ground + "\x1b[2J")
    assert all(ground in line for line in text.split("\r\n")[1:])


def test_nothing_heavy_is_imported_before_the_first_frame() -> None:
    program = ("import sys, gputop.cli, gputop.commands.monitor, gputop.telemetry.sampler, gputop.sources.nvml.source\n"
               "import gputop.tui.monitor.first_paint\n"
               "from gputop.commands import arguments, settings\n"
               "gputop.cli.use_user_rules(arguments.parse([]), settings.load(settings.config_path()))\n"
               "print(sorted({'numpy', 'textual', 'grpc', 'google.protobuf', 'psutil', 'gputop.session.session',\n"
               "              'gputop.core.findings', 'gputop.advice.registry', 'gputop.text.redaction', 'shutil',\n"
               "              'gputop.sources.host.gpu_processes'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_while_textual_is_imported_ends_the_program(number: signal.Signals) -> None:
    frame = FirstFrame()
    with pytest.raises(SystemExit, match=str(128 + number)), ended_by_signals(frame):
        signal.raise_signal(number)
    assert frame.ended

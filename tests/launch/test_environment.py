from __future__ import annotations

import pytest

from gputop.launch.environment import INSIDE, job_environ, launch_warning


def test_what_was_there_stays():
    before = {"PYTHONPATH": "/mine", "HOME": "/home/ana"}
    assert job_environ(before, "t") == {"PYTHONPATH": f"{INSIDE}:/mine", "HOME": "/home/ana", "GPUTOP_RUN": "t"}
    assert job_environ({"PYTHONPATH": ""}, "t", 6009, "all") == {
        "PYTHONPATH": str(INSIDE), "GPUTOP_RUN": "t", "GPUTOP_PORT": "6009", "GPUTOP_LISTEN": "all"}


@pytest.mark.parametrize(("words", "option"), [
    ("python train.py", None),
    ("python -I train.py", "-I"),
    ("/usr/bin/python3.11 -uE train.py", "-E"),
    ("python -W ignore -S train.py", "-S"),
    ("python -Wignore -X dev -I -m train", "-I"),
    ("python -m train -I", None),
    ("python -c pass -I", None),
    ("python train.py -I", None),
    ("python -WI train.py", None),
    ("python --check-hash-based-pycs always -I", None),  # no warning rather than a wrong one
    ("train -I", None),
])
def test_options_that_ignore_the_environment(words, option):
    doubt = launch_warning(words.split(), "/bin/true")
    assert (doubt is None) == (option is None)
    assert option is None or f"Python's {option} " in str(doubt)


@pytest.mark.parametrize(("line", "deaf"), [
    ("#!/usr/bin/python3 -E\n", True), ("#!/usr/bin/env -S python -I\n", True), ("#!/usr/bin/env python\n", False),
    ("#!/bin/sh -E\n", False), ("", False), ("\x7fELF -I\n", False)])
def test_scripts_say_it_in_their_first_line(tmp_path, line, deaf):
    script = tmp_path / "train"
    script.write_text(line)
    assert (launch_warning([str(script)], str(script)) is not None) == deaf


@pytest.mark.parametrize(("words", "warned"), [("docker run x python train.py", True), ("sudo python train.py", True),
                                             ("env -i python train.py", True), ("env A=1 python train.py", False),
                                             ("mpirun -n 2 python train.py", False)])
def test_commands_that_do_not_pass_the_environment_on(words, warned):
    doubt = launch_warning(words.split(), "/bin/true")
    assert (doubt is not None) == warned
    assert not warned or "gputop run inside" in str(doubt)

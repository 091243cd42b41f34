"""Which servers a job has, from what the user, TF_CONFIG or Slurm say."""

from __future__ import annotations

import json

import pytest

from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.profiler.workers import addresses, expand_hostlist, job_hosts, parse_ports, split_list, tf_config_hosts


@pytest.mark.parametrize(("text", "hosts"), [
    ("node7", ["node7"]),
    ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
    ("node[01-03,7],login", ["node01", "node02", "node03", "node7", "login"]),
    ("a[1-2]-ib,b[9-11]", ["a1-ib", "a2-ib", "b9", "b10", "b11"]),
    ("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]),
    ("n[001]", ["n001"]),
    ("n[1,1-2],n2", ["n1", "n2"]),
    ("n[1-2]:6009,[::1]:6010", ["n1:6009", "n2:6009", "[::1]:6010"]),
    (" a , b ", ["a", "b"]),
    ("unix:/run/p[1].sock,n1:1,unix-abstract:a]", ["unix:/run/p[1].sock", "n1:1", "unix-abstract:a]"]),
    ("", []),
])
def test_hostlists(text, hosts):
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize("text", ["n[3-1]", "n[a-b]", "n[1-2", "n1-2]", "n[]", "n[1-]", "n[1-9999999]",
                                  "a[1-99]b[1-99]"])
def test_what_is_no_hostlist_is_said_and_not_tried(text):
    with pytest.raises(GputopError, match="not a list of hosts") as caught:
        expand_hostlist(text)
    assert caught.value.exit_code == EXIT_USAGE


def test_commas_in_brackets_do_not_split():
    assert split_list("a[1,2]:1,b:2,,c:3") == ["a[1,2]:1", "b:2", "c:3"]


@pytest.mark.parametrize(("text", "ports"), [("6009", (6009,)), ("6009-6011", (6009, 6010, 6011)),
                                             ("6009,7000-7001,6009", (6009, 7000, 7001))])
def test_ports(text, ports):
    assert parse_ports(text) == ports


@pytest.mark.parametrize("text", ["", "x", "0", "70000", "9-8", "1-1000", "6009:6010"])
def test_what_are_no_ports(text):
    with pytest.raises(GputopError, match="not a list of ports") as caught:
        parse_ports(text)
    assert caught.value.exit_code == EXIT_USAGE


class TestAddresses:
    def test_commas_and_repeats(self):
        assert addresses(["a:1,b:2", "localhost:3", "a:1"]) == ("a:1", "b:2", "127.0.0.1:3")

    def test_ports_for_those_without(self):
        assert addresses(["a,b[1-2]:7,[::1]"], (6009, 6010)) == (
            "a:6009", "a:6010", "b1:7", "b2:7", "[::1]:6009", "[::1]:6010")

    def test_a_port_alone_is_this_machine_s(self):
        assert addresses(["6012"], (6009,)) == ("127.0.0.1:6012",)

    def test_without_any_port_it_is_wrong_usage(self):
        with pytest.raises(GputopError, match="port is missing"):
            addresses(["nodeA"])

    def test_the_environment_counts_only_where_a_port_was_given(self):
        slurm = {"SLURM_JOB_NODELIST": "n[1-2]"}
        assert addresses([], (), slurm) == ()
        assert addresses([], (6009,), slurm) == ("n1:6009", "n2:6009")
        assert addresses(["x:1"], (6009,), slurm) == ("x:1",)

    def test_nothing_tells_the_machines(self):
        with pytest.raises(GputopError, match="neither TF_CONFIG nor SLURM_JOB_NODELIST") as caught:
            addresses([], (6009,), {})
        assert caught.value.exit_code == EXIT_USAGE


class TestTfConfig:
    def test_training_tasks_without_their_ports(self):
        text = json.dumps({"cluster": {"chief": ["c:1"], "worker": ["a:12345", "b:12345", "a:2"], "ps": ["p:1"]},
                           "task": {"type": "worker", "index": 0}})
        assert tf_config_hosts(text) == ["c", "a", "b"]
        assert job_hosts({"TF_CONFIG": text, "SLURM_JOB_NODELIST": "z"}) == ["c", "a", "b"]

    def test_ipv6(self):
        assert tf_config_hosts(json.dumps({"cluster": {"worker": ["[fd00::1]:1", "fd00::2"]}})) == [
            "[fd00::1]", "[fd00::2]"]

    @pytest.mark.parametrize("text", ["{", "[]", "{}", '{"cluster": []}', '{"cluster": {"worker": [1]}}'])
    def test_damaged(self, text):
        with pytest.raises(GputopError, match="TF_CONFIG is not"):
            tf_config_hosts(text)

    def test_no_worker(self):
        with pytest.raises(GputopError, match="does not name any workers"):
            tf_config_hosts('{"cluster": {"ps": ["a:1"]}}')

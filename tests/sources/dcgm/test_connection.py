"""One connection to a host engine, against the contract double."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.sources.dcgm import fields
from gputop.sources.dcgm.bindings import find_installed, load
from gputop.sources.dcgm.connection import Address, Engine, EngineError, parse_address
from gputop.sources.dcgm.engine_reader import EngineReader
from gputop.sources.dcgm.fields import PROFILING_IDS, FieldValue, decode
from gputop.sources.dcgm.watches import Subscription
from tests.dcgm_double import PROFILING
from tests.dcgm_double.scene import START_S, Scene

G0, G1 = (1, 0), (1, 1)


@pytest.fixture
def scene(make_scene: Callable[..., Scene]) -> Scene:
    return make_scene()


def connect(scene: Scene) -> Engine:
    return Engine(load(find_installed(scene.root, {})[0]), parse_address(scene.engine.address))


@pytest.mark.parametrize(("text", "address"), [
    ("gpu-7", Address("gpu-7", 5555)),
    ("10.0.0.1:6000", Address("10.0.0.1", 6000)),
    ("[::1]:6000", Address("::1", 6000)),
    ("[fe80::1%eth0]", Address("fe80::1%eth0", 5555)),
    ("unix:///run/nvidia/dcgm.sock", Address(path="/run/nvidia/dcgm.sock")),
])
def test_addresses(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize("text", [
    "", "a:b", "a:0", "a:65536", "::1", "[::1", "[gpu]:5", "unix://rel", "a b:1", "h:1:2",
])
def test_wrong_addresses_are_wrong_usage(text: str) -> None:
    with pytest.raises(GputopError, match="not the address") as caught:
        parse_address(text)
    assert caught.value.exit_code == EXIT_USAGE


def test_lists_gpus_and_its_version(scene: Scene) -> None:
    engine = connect(scene)
    assert engine.version == "4.6.0"
    assert [(gpu.gpu, gpu.uuid, gpu.pci_bus_id) for gpu in engine.gpus] == [
        (0, "GPU-0", "00000000:00:00.0"), (1, "GPU-1", "00000000:01:00.0")]
    engine.close()
    assert not scene.engine.clients


def test_unix_socket(make_scene: Callable[..., Scene], tmp_path: Path) -> None:
    scene = make_scene(path=str(tmp_path / "dcgm.sock"))
    assert parse_address(scene.engine.address).reach(1.0)
    assert len(connect(scene).gpus) == 2


@pytest.mark.parametrize("function", ["dcgmConnect_v2", "dcgmGetAllDevices", "dcgmHostengineVersionInfo"])
def test_a_connection_that_breaks_while_it_is_made(scene: Scene, function: str) -> None:
    scene.engine.fails[function] = fields.CONNECTION_NOT_VALID
    with pytest.raises(EngineError) as caught:
        connect(scene)
    assert caught.value.code == fields.CONNECTION_NOT_VALID and function in str(caught.value)
    assert not scene.engine.clients


def test_what_an_engine_does_not_tell_is_left_out(scene: Scene) -> None:
    scene.engine.fails |= {"dcgmGetDeviceAttributes": fields.GPU_IS_LOST,
                           "dcgmHostengineVersionInfo": fields.GENERIC_ERROR,
                           "dcgmGetGpuInstanceHierarchy": fields.NOT_SUPPORTED}
    engine = connect(scene)
    assert ([gpu.name for gpu in engine.gpus], engine.version, engine.instances) == (["GPU 0", "GPU 1"], "", ())


def test_reads_what_others_watch_without_adding_a_watch(scene: Scene) -> None:
    scene.engine.watched_by_others([1002])
    engine = connect(scene)
    assert engine.read([G0], [1002])[G0, 1002].code == fields.NO_DATA
    scene.engine.update()
    assert "first sample" in engine.read([G0], [1002])[G0, 1002].reason
    scene.engine.update()
    values = engine.read([G0, G1], [1002, 1003])
    assert values[G1, 1002].value == 0.5 and values[G1, 1002].time_us == START_S * 1e6
    assert values[G0, 1003].code == fields.NOT_WATCHED
    assert not scene.engine.calls["dcgmWatchFields"] and not scene.engine.died_of_live_data


def test_the_age_of_a_value_is_judged_by_the_interval_of_the_reads(scene: Scene) -> None:
    reader = EngineReader(connect(scene), local=True)
    scene.engine.watched_by_others([1002])

    def read(interval_s: float) -> FieldValue:
        scene.now_s += interval_s
        scene.engine.update()
        answer = reader.read(Subscription((1002,), None), interval_s, scene.now_s, scene.now_s)
        return answer.values["GPU-0"][1002]

    for _ in range(3):
        read(1.0)
    scene.engine.watched_by_nobody_else()
    assert read(3.0).value == 0.5 and read(1.0).code == fields.STALE_DATA


def test_a_value_stays_readable_after_its_watch(scene: Scene) -> None:
    engine = connect(scene)
    engine.watch([G0], [155], 1.0, 10.0)
    engine.update()
    engine.unwatch()
    assert not scene.engine.watched()
    assert engine.read([G0], [155])[G0, 155].value == 3


def test_an_unknown_field_is_left_out_of_reads_from_then_on(scene: Scene) -> None:
    scene.engine.unknown.add(1012)
    scene.engine.watched_by_others(PROFILING)
    scene.engine.update()
    scene.engine.update()
    engine = connect(scene)
    first = engine.read([G0, G1], PROFILING_IDS)
    reads = len(scene.engine.read_ids)
    second = engine.read([G0, G1], PROFILING_IDS)
    assert len(scene.engine.read_ids) == reads + 1 and 1012 not in scene.engine.read_ids[-1]
    for values in (first, second):
        assert values[G1, 1002].value == 0.5 and "field 1012" in values[G1, 1012].reason


def test_a_gpu_that_fails_every_read_does_not_take_the_others_with_it(scene: Scene) -> None:
    scene.engine.watched_by_others([155, 150])
    scene.engine.update()
    scene.engine.bad_gpus.add(1)
    engine = connect(scene)
    values = engine.read([G0, G1], [155, 150])
    assert values[G0, 155].value == 3 and "lost" in values[G1, 155].reason
    assert engine.read([G0, G1], [155])[G1, 155].reason == values[G1, 155].reason


@pytest.mark.parametrize("code", [fields.BADPARAM, fields.GENERIC_ERROR, -5, fields.NO_PERMISSION, -99])
def test_a_read_that_fails_for_all_is_an_error(scene: Scene, code: int) -> None:
    engine = connect(scene)
    scene.engine.fails["dcgmEntitiesGetLatestValues"] = code
    with pytest.raises(EngineError) as caught:
        engine.read([G0, G1], [155, 150])
    assert caught.value.code == code and f"(DCGM {code})" in str(caught.value)


def test_watches_are_small_and_undone(scene: Scene) -> None:
    engine = connect(scene)
    engine.watch([G0, G1], PROFILING_IDS, 0.01, 10.0)
    client = scene.engine.clients[0]
    assert [(period_us, keep_s) for period_us, keep_s, _ in client.watches.values()] == [(100_000, 10.0)]
    assert scene.engine.watched() == {(gpu, i) for gpu in (0, 1) for i in PROFILING_IDS}
    engine.unwatch()
    assert not client.watches and not client.groups and not client.field_groups


def test_profiling_fields_never_share_a_field_group(scene: Scene) -> None:
    with pytest.raises(ValueError, match="separate field group"):
        connect(scene).watch([G0], [155, 1002], 1.0, 10.0)


def test_a_refused_watch_leaves_nothing_behind(scene: Scene) -> None:
    scene.engine.gpus[0].profiling = None
    engine = connect(scene)
    with pytest.raises(EngineError) as caught:
        engine.watch([G0], [1002], 1.0, 10.0)
    assert caught.value.code == fields.MODULE_NOT_LOADED
    client = scene.engine.clients[0]
    assert not client.groups and not client.field_groups and not client.watches


def test_what_mixing_them_would_do_on_the_engine(scene: Scene) -> None:
    """The double itself: why profiling fields go alone."""
    scene.engine.gpus[0].profiling = None
    agent = load(find_installed(scene.root, {})[0]).agent
    connect(scene)
    client = scene.engine.clients[0]
    group = agent.dcgmGroupCreate(client, 1, "g")
    agent.dcgmGroupAddEntity(client, group, 1, 0)
    both = agent.dcgmFieldGroupCreate(client, [155, 1002], "f")
    with pytest.raises(Exception, match="-33"):
        agent.dcgmWatchFields(client, group, both, 1_000_000, 10.0, 2)
    scene.show({155: 9})
    scene.engine.update()
    assert scene.engine.samples[0, 155].value == 3


def test_names_carry_the_pid_and_give_way_to_a_namesake(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getpid", lambda: 77)
    scene.engine.other_groups.append(("gputop-77-2", [1]))
    engine = connect(scene)
    engine.watch([G0], [155], 1.0, 10.0)
    (name, _), = scene.engine.clients[0].field_groups.values()
    assert name.startswith("gputop-77-") and name != "gputop-77-2"


def test_a_name_that_is_always_taken_is_an_error(scene: Scene) -> None:
    engine = connect(scene)
    scene.engine.fails["dcgmFieldGroupCreate"] = fields.DUPLICATE_KEY
    with pytest.raises(EngineError) as caught:
        engine.watch([G0], [155], 1.0, 10.0)
    assert caught.value.code == fields.DUPLICATE_KEY and scene.engine.calls["dcgmFieldGroupCreate"] < 10


def test_an_unknown_field_is_left_out_of_a_watch(scene: Scene) -> None:
    scene.engine.unknown.add(253)
    engine = connect(scene)
    engine.watch([G0], [155, 252, 253], 1.0, 10.0)
    assert scene.engine.watched() == {(0, 155), (0, 252)}
    assert "field 253" in engine.read([G0], [253])[G0, 253].reason


def test_supported_fields_are_asked_beforehand(scene: Scene) -> None:
    scene.engine.gpus[0].profiling = frozenset((1002, 1004))
    engine = connect(scene)
    assert engine.profiling_fields(0) == {1002, 1004}
    for supported, code in ((None, fields.MODULE_NOT_LOADED), (frozenset(), fields.PROFILING_NOT_SUPPORTED)):
        scene.engine.gpus[1].profiling = supported
        with pytest.raises(EngineError) as caught:
            engine.profiling_fields(1)
        assert caught.value.code == code


def test_who_watches_by_the_names_of_field_groups(scene: Scene) -> None:
    scene.engine.other_groups += [("dcgm-exporter-0", [1002, 155]), ("health", [230])]
    engine = connect(scene)
    engine.watch([G0], [1002], 1.0, 10.0)
    assert engine.watchers([1002]) == ("dcgm-exporter-0",)


def test_mig_instances_are_found_by_nvml_s_numbers(scene: Scene) -> None:
    scene.engine.gpus[1].instances = {5: 9, 6: 2}
    engine = connect(scene)
    assert [(found.entity, found.gpu, found.uuid) for found in engine.instances] == [
        ((4, 5), 1, "mig:1:9"), ((4, 6), 1, "mig:1:2")]
    engine.watch([(4, 5)], [1002], 1.0, 10.0)
    assert scene.engine.watched() == {(1005, 1002)}
    scene.engine.figures[1005, 1002] = 0.25
    scene.engine.update()
    scene.engine.update()
    assert engine.read([(4, 5), (4, 6)], [1002])[(4, 5), 1002].value == 0.25


_INT, _DOUBLE = 0x7FFFFFFFFFFFFFF0, 140737488355328.0


@pytest.mark.parametrize(("above", "words"), [
    (0, "first sample"), (1, "not found"), (2, "not supported"), (3, "lacks permission"), (4, "blank"),
])
def test_blanks_by_type(above: int, words: str) -> None:
    assert words in decode(0, False, _INT + above, 0.0, 5).reason
    assert words in decode(0, True, 0, _DOUBLE + above, 5).reason


def test_values_just_below_a_blank_are_values() -> None:
    assert decode(0, False, _INT - 1, 0.0, 5).value == float(_INT - 1)
    assert decode(0, True, 0, _DOUBLE - 1, 5).value == _DOUBLE - 1
    assert decode(-16, False, 3, 0.0, 5).value is None


def test_the_live_data_flag_kills_the_engine(scene: Scene) -> None:
    """The double itself: what gputop must never do."""
    bindings = load(find_installed(scene.root, {})[0])
    connect(scene)
    entity = bindings.structs.c_dcgmGroupEntityPair_t(1, 0)
    client = scene.engine.clients[0]
    bindings.agent.dcgmEntitiesGetLatestValues(client, [entity], [155], 1)
    with pytest.raises(Exception, match="-21"):
        bindings.agent.dcgmEntitiesGetLatestValues(client, [entity], [155, 1002], 1)
    assert scene.engine.died_of_live_data and not scene.engine.alive


# -- an engine that cannot be trusted ----------------------------------------------------------------


def test_counts_beyond_their_arrays_are_not_followed(scene: Scene) -> None:
    scene.engine.wild_counts = True
    scene.engine.gpus[0].instances = {4: 2}
    scene.engine.other_groups = [("dcgm-exporter", [1002])]
    engine = connect(scene)
    assert [(gpu.gpu, gpu.uuid) for gpu in engine.instances] == [(0, "mig:0:2")]
    assert engine.profiling_fields(0) >= PROFILING and engine.watchers([1002]) == ("dcgm-exporter",)


def test_strings_without_an_end_and_with_escape_codes(scene: Scene) -> None:
    gpu = scene.engine.gpus[0]
    gpu.name, gpu.uuid = "\x1b]52;c;" * 32, "GPU-" + "\x9b" * 124
    scene.engine.version = "4" * 200 + "." + "6" * 200
    scene.engine.other_groups = [("\x1b[2J" + "x" * 252, [1002])]
    engine = connect(scene)
    found = engine.gpus[0]
    assert len(found.name) <= 256 and found.name.isprintable() and found.uuid.isprintable()
    assert all(name.isprintable() for name in engine.watchers([1002])) and len(engine.version) < 20


def test_a_gpu_that_is_listed_twice_is_one(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = load(find_installed(scene.root, {})[0])
    monkeypatch.setattr(bindings.agent, "dcgmGetAllDevices", lambda handle: [0, 0, 1])
    engine = Engine(bindings, parse_address(scene.engine.address))
    assert [gpu.gpu for gpu in engine.gpus] == [0, 1]


@pytest.mark.parametrize("number", [-1.0, float("-inf"), float("inf"), float("nan")])
@pytest.mark.parametrize("time_us", [0, -1, 1 << 62, 5])
def test_numbers_and_times_that_mean_nothing(number: float, time_us: int) -> None:
    value = decode(fields.OK, True, -1, number, time_us)
    assert value.value is None and value.time_us == (5 if time_us == 5 else 0)
    assert value.reason.startswith("DCGM ") and "valid " in value.reason


def test_a_version_of_many_digits_is_cut_short(scene: Scene) -> None:
    scene.engine.version = "4" * 200 + "." + "6" * 200
    assert len(connect(scene).version) < 20

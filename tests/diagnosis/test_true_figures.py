"""The figures of real traces that others made, against figures that were computed straight from their events by
another program (protobuf's own parser, events of the lines ``Stream #`` alone)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.diagnosis.real_traces import DATA, analysis_of, needs_data

pytestmark = needs_data

# Kernels of the trace, their time in ms, and by GPU: kernels, window in µs, busy %. GPUs without events are left out.
TRUE = {
    "xplane_amd/jax_conv_minimal_08_tw003.xplane.pb": (200, 27.57, {
        0: (25, 138470.8, 2.89), 1: (25, 112106.1, 2.98), 2: (25, 106992.7, 3.29), 3: (25, 95261.1, 3.57),
        4: (25, 91596.1, 3.81), 5: (25, 92938.5, 3.73), 6: (25, 104221.5, 3.27), 7: (25, 90563.1, 3.87)}),
    "xplane_amd/jax_conv_minimal_legacy_chi-mi300x-013.xplane.pb": (25, 3.59, {
        0: (0, 27867.7, 3.19), 7: (25, 15761.3, 22.76)}),
    "xplane_amd/te_fused_attn_934987a2fc2f.xplane.pb": (130, 11.97, {0: (130, 12956.8, 93.64)}),
    "xplane_nvidia/autoencoder_eager.xplane.pb": (442, 9.15, {0: (442, 44006.9, 20.84)}),
    "xplane_nvidia/autoencoder_fit.xplane.pb": (330, 11.53, {0: (330, 112302.8, 10.3)}),
    "xplane_nvidia/autoencoder_generator.xplane.pb": (334, 10.05, {0: (334, 17645.5, 57.13)}),
    "xplane_nvidia/keras_laptop_cc61.xplane.pb": (109, 27.19, {0: (109, 992327.7, 2.79)}),
    "xplane_nvidia/keras_laptop_cc61.trace.json.gz": (109, 27.19, {0: (109, 992327.7, 2.79)}),
    "xplane_nvidia/mirrored_4v100_mnist.xplane.pb": (872, 32.72, {
        0: (221, 56813.6, 14.77), 1: (217, 54804.1, 15.21), 2: (217, 55109.2, 15.03), 3: (217, 54986.3, 15.08)}),
    "xplane_nvidia/mirrored_4v100_mnist.trace.json.gz": (872, 32.72, {
        0: (221, 56813.6, 14.77), 1: (217, 54804.1, 15.21), 2: (217, 55109.2, 15.03), 3: (217, 54986.3, 15.08)}),
    "xplane_nvidia/mirrored_4v100_text.xplane.pb": (83, 0.45, {0: (83, 61057.3, 4.98)}),
    "xplane_nvidia/multiworker_8v100.xplane.pb": (1330, 29.69, {
        1: (0, 13417.4, 0.25), 4: (665, 119308.7, 12.56), 6: (665, 490469.9, 3.07)}),
}
# Of the host the export has not all events; of the kernels it has no launch shapes, and no name of the host.
OF_THE_GPUS = ("gpus", "collectives", "kernels", "kernel_sizes", "copies", "replicas", "steps", "breakdown")
NOT_EXPORTED = ("shape", "shapes", "host")


@pytest.mark.parametrize("name", TRUE)
def test_kernels_their_time_and_busy(name):
    kernels, time_ms, gpus = TRUE[name]
    a = analysis_of(DATA / name)
    assert sum(use.kernels for use in a.gpus) == kernels
    assert a.kernels is not None and a.kernels.time_s * 1e3 == pytest.approx(time_ms, abs=0.006)
    ran = {use.gpu: use for use in a.gpus if use.busy}
    assert {gpu: use.kernels for gpu, use in ran.items()} == {gpu: row[0] for gpu, row in gpus.items()}
    for gpu, (_, window_us, busy) in gpus.items():
        assert ran[gpu].window_s * 1e6 == pytest.approx(window_us, abs=0.06)
        assert ran[gpu].busy * 100 == pytest.approx(busy, abs=0.006)


@pytest.mark.parametrize("run", ["keras_laptop_cc61", "mirrored_4v100_mnist"])
def test_both_files_of_one_run_give_the_same_figures(run):
    xspace, export = (analysis_of(DATA / f"xplane_nvidia/{run}.{ending}") for ending in ("xplane.pb", "trace.json.gz"))
    for figure in OF_THE_GPUS:
        assert flat(xspace.to_json()[figure]) == pytest.approx(flat(export.to_json()[figure]), rel=1e-9), figure


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """The numbers and texts of a JSON value, by their place in it."""
    if not isinstance(value, (dict, list)):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {key: leaf for name, own in items if name not in NOT_EXPORTED
            for key, leaf in flat(own, f"{path}.{name}").items()}

"""Words of the live findings that differ between TensorFlow, JAX and PyTorch jobs (:mod:`gputop.core.framework`)."""

from __future__ import annotations

from gputop.advice.fix_code import code

NO_FIGURE = "live samples contain no step boundaries, so capture a trace to get a per-step estimate"  # for the gain


def code_for(framework: str, finding_id: str, kind: str = "", **values: object) -> str:
    """The code of a fix for a job of this framework; where that is not known TensorFlow's, called so."""
    return code(finding_id, kind + framework, **values) or (
        f"# in TensorFlow:\n{code(finding_id, kind + 'tensorflow', **values)}")

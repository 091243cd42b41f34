"""The GPU table on the terminal: which columns fit its width, and what one GPU says in each. Pure, no widgets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from msgspec import Struct

from gputop.core.metrics import BYTES_PER_S, GPU_METRICS, LANE_METRICS, RATIO
from gputop.core.samples import OK, GpuSample
from gputop.render.gpu_columns import COLUMNS, Draw, Figure, plain_figure
from gputop.render.palette import BAD, BOLD, DIM, PLAIN, WARN
from gputop.render.styled_text import StyledText
from gputop.text.units import compact, fit, percent, printable, rate_gb
from gputop.tui.monitor.status_lines import bar

ACTIVITY = "activity"  # the main lane's default: SM active, or coarse utilization where that is all there is
METRICS: tuple[str, ...] = (ACTIVITY, *(m for m in LANE_METRICS if m != "sm_active"))
Figures = dict[tuple[str, int], dict[str, StyledText]]  # by lane and row of the lane, then by field
_TONES = {"strong": BOLD, "text": PLAIN, "dim": DIM, "warn": WARN, "bad": BAD}


class Field(Struct, frozen=True):
    """A column of the table as it is laid out."""

    key: str  # the column's id
    draw: Draw
    x: int
    width: int
    title: str = ""
    title_width: int = 0  # the title of a lane reaches over the figure that follows it

    @property
    def is_lane(self) -> bool:
        return self.draw == "spectrogram"


def plan(width: int) -> list[Field]:
    """Columns that fit a terminal of this width, and where; the main lane takes what is left."""
    sizes = {column.id: column.cells_at(width) for column in COLUMNS}
    shown = [column for column in COLUMNS if sizes[column.id] or column.id == "main"]
    gaps = sum(column.draw == "spectrogram" for column in shown) - 1  # one cell before each lane but the main one
    sizes["main"] = max(0, width - sum(sizes.values()) - gaps)
    fields: list[Field] = []
    x = 0
    for column, following in zip(shown, [*shown[1:], None], strict=True):
        size = title_size = sizes[column.id]
        if column.draw == "spectrogram" and column.id != "main":
            x += 1
            title_size += sizes[following.id] if following is not None else 0
        fields.append(Field(column.id, column.draw, x, size, column.heading_in("screen"), title_size))
        x += size
    return fields


class Part(Struct, frozen=True):
    """Neighboring columns that change together: they are one widget, so that the rest stays as it is.

    ``lane`` says which: the lane in ``fields``, after the GPU's number, which changes once per slice; or the
    lane's newest slice and the figures of ``fields`` after it, which change with each sample.
    """

    x: int
    width: int
    lane: Field
    fields: tuple[Field, ...]

    @property
    def newest(self) -> bool:
        """Return whether it is the lane's newest slice and what follows, not the slices before."""
        return self.lane not in self.fields


def parts(fields: list[Field]) -> list[Part]:
    """The columns cut into parts, left to right, without holes; the first two are the GPU's number and a lane."""
    out: list[Part] = []
    x = 0
    for field in fields:
        if field.draw == "label":
            continue
        if field.is_lane:
            newest = field.x + field.width - 1
            out.append(Part(x, newest - x, field, (*(f for f in fields if f.draw == "label" and not x), field)))
            out.append(Part(newest, 1, field, ()))
        else:
            last = out.pop()
            out.append(Part(last.x, field.x + field.width - last.x, last.lane, (*last.fields, field)))
        x = field.x + field.width
    return out


def title_texts(fields: Iterable[Field], main_title: str, now: str = "now") -> Iterator[str]:
    """The line above the table, piece by piece; ``now`` is what the figures are of."""
    x = 0
    for field in fields:
        if field.x < x or not field.title_width:
            continue  # covered by the title of the lane before
        yield " " * (field.x - x)
        text = main_title if field.key == "main" else now if field.key == "now" else field.title
        yield fit(text, field.title_width, right=field.draw in ("figure", "flags"))
        x = field.x + field.title_width


def figures_of(gpu: GpuSample, metric: str, fields: Mapping[str, Field]) -> dict[str, StyledText]:
    """The figures of one GPU by column, as text with its style; ``metric`` is that of the main lane."""
    # A MIG instance stands under its GPU, and "0:1" begins a column further left than " 0".
    label = f" {gpu.info.label}" if gpu.info.mig is None else gpu.info.label
    if gpu.state != OK:
        message = gpu.message.removeprefix(f"GPU {gpu.info.label} ")
        if message == gpu.message:  # else it says the state itself
            message = f"{gpu.state}: {message}" if message else gpu.state
        return {"gpu": (label, BAD), "message": (printable(message), BAD)}
    out = {column.id: styled(column.figure_of(gpu, "screen")) for column in _FIGURES if column.id in fields}
    out["gpu"] = (label, BOLD if gpu.info.mig is None else PLAIN)
    if "bar" in fields:
        out["bar"] = bar_of(gpu, metric, fields["bar"].width - 1)
    if metric != ACTIVITY:
        out["now"] = styled(_figure(gpu, metric))
    for key, form in _NARROW_FORMS.items():
        if key in out:
            text, style = out[key]
            out[key] = form(text), style
    return out


def bar_of(gpu: GpuSample, metric: str, cells: int) -> StyledText:
    """The present value of the main lane's metric as a share of its full scale; blank where either is not known."""
    now = gpu.activity()[1] if metric == ACTIVITY else gpu[metric]
    scale = GPU_METRICS["sm_active" if metric == ACTIVITY else metric].full_scale
    most = gpu[scale].value if isinstance(scale, str) else scale
    if now.value is None or not most:
        return "", PLAIN
    return bar(now.value / most, cells)


def styled(figure: Figure) -> StyledText:
    """A figure in the colors of the terminal."""
    return figure[0], _TONES[figure[1]]


def _figure(gpu: GpuSample, metric: str) -> Figure:
    now = gpu[metric]
    if now.value is not None and now.unit == BYTES_PER_S:
        return rate_gb(now.value), "text"  # the column is narrow: the unit stands in the lane's title
    return plain_figure(now)


# The first word of what is wrong, where there is room for three letters.
_SHORT = {"Xid": "Xid", "ECC": "ECC", "remap": "row", "power": "pwr", "thermal": "hot", "slowdown": "hw"}


def _short(flags: str) -> str:
    """The first flag, the gravest, in three letters."""
    return _SHORT.get(flags.removeprefix("hw ").replace(",", " ").split()[0], "clk")


_FIGURES = tuple(column for column in COLUMNS if column.screen and column.figure)
_NARROW_FORMS: dict[str, Callable[[str], str]] = {
    "temperature": lambda text: text.replace("°C", "°"),
    "flags": lambda text: f" {text}",
    "flag": lambda text: f" {_short(text)}" if text else "",
}


def mean_text(gpu: GpuSample, metric: str, mean: float, full_scale: float | None) -> str:
    """The mean of what a lane shows, a share of its full height, in the metric's unit, in five cells."""
    description = GPU_METRICS["sm_active" if metric == ACTIVITY else metric]
    scale = description.full_scale
    most = full_scale if scale is None else gpu[scale].value if isinstance(scale, str) else scale
    if description.unit == RATIO or not most:
        return percent(mean)
    return compact(mean * most, description.unit)


def second_line(
    gpu: GpuSample, mean: float | None, metric: str = ACTIVITY, full_scale: float | None = None,
) -> dict[str, StyledText]:
    """Figures of a GPU's second line, by column: means and limits.

    ``mean`` is that of the main lane, 0-1; ``full_scale`` 100% of a metric without a scale of its own.
    """
    out: dict[str, StyledText] = {}
    if gpu.state != OK:
        return out
    if mean is not None:
        out["now"] = (f"ø {mean_text(gpu, metric, mean, full_scale)}", DIM)
    limit, clock_max = gpu["power_limit_w"].value, gpu["sm_clock_max_hz"].value
    if limit is not None:
        out["power"] = (f"/{limit:.0f}W", DIM)
    if clock_max is not None:
        out["clock"] = (f"/{clock_max / 1e6:.0f}MHz", DIM)
    gen, width = gpu["pcie_gen"].value, gpu["pcie_width"].value
    if gen is not None and width is not None:
        out["pcie"] = (f"gen{gen:.0f} x{width:.0f}", DIM)
    return out

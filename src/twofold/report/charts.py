"""Figures as inline SVG. Their colours are CSS variables of the page, so they follow its light or dark theme."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from twofold.report.labels import Box, place_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Matplotlib needs colours; these stand for the page's variables and are replaced in the SVG.
INK, MUTED, FAINT, SHARED, PAPER = "#010101", "#020202", "#030303", "#040404", "#fdfdfd"
_VARIABLES = {INK: "--ink", MUTED: "--muted", FAINT: "--line", SHARED: "--accent", PAPER: "--page"}
_SPACE = "\N{NO-BREAK SPACE}"
_DPI = 72  # one point is one pixel of the SVG


@dataclass(frozen=True, kw_only=True)
class Point:
    """One variant in the quality-against-cache plot."""

    label: str
    """Its name."""
    share: float
    """Cache per token as a share of QKV's."""
    increase: float
    """Perplexity above QKV in percent."""
    low: float | None = None
    """Lower end of the 95 % interval."""
    high: float | None = None
    """Upper end of the 95 % interval."""
    own: bool
    """True for what was measured here, False for what was published."""
    one_tensor: bool
    """True when K = V."""
    comparable: bool = True
    """False when it differs from QKV in more than sharing and heads; drawn as a diamond, never on the front."""


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Points that no other beats in one respect without losing in the other, from the smallest cache up."""

    def beats(other: Point, point: Point) -> bool:
        no_worse = other.share <= point.share and other.increase <= point.increase
        return no_worse and (other.share < point.share or other.increase < point.increase)

    front = [point for point in points if not any(beats(other, point) for other in points)]
    return sorted(front, key=lambda point: (point.share, -point.increase))


def top_of_axis(values: Sequence[float]) -> float:
    """Where the axis of cost ends: at the largest value, unless it is so far out that it would flatten the others."""
    positive = sorted(value for value in values if value > 0)
    top = positive[-1] if positive else 1.0
    for smaller, larger in pairwise(positive):
        if larger > 2.5 * smaller and larger > 10 and positive.index(larger) >= len(positive) / 2:
            return smaller * 1.3
    return top * 1.15


def quality_against_cache(points: Sequence[Point], baseline_kib: float, *, width: int, height: int, name: str) -> str:
    """The main plot: cache to the right, cost upwards, so the better lies towards the lower left.

    Args:
        points: Measured and published variants.
        baseline_kib: QKV's cache per token here, for the second line of tick labels.
        width: Pixels.
        height: Pixels.
        name: Prefix of the SVG's ids.
    """
    small = width < 600
    figure, axes = _axes(width, height, left=28 if small else 36, right=12 if small else 24, bottom=72, top=34)
    top = top_of_axis([point.high if point.high is not None else point.increase for point in points])
    lowest = min([0.0, *(point.low if point.low is not None else point.increase for point in points)])
    axes.set_xscale("log", base=2)
    smallest = min(point.share for point in points)
    axes.set_xlim(smallest / (1.45 if small else 1.3), 1.9 if small else 1.55)
    axes.set_ylim(lowest - 0.1 * (top - lowest), top)
    shares = [0.5**power for power in range(12) if 0.5**power >= smallest / 1.01]
    percent, kib = ("", "") if small else (f"{_SPACE}%", f"{_SPACE}KiB")
    axes.set_xticks(shares, [f"{100 * share:g}{percent}\n{baseline_kib * share:g}{kib}" for share in shares])
    axes.minorticks_off()
    axes.axhline(0, color=MUTED, linewidth=1, zorder=1)
    axes.set_xlabel(
        f"KV cache per token: {'% of QKV, KiB here' if small else 'share of QKV, and KiB here'} (log scale)",
        color=MUTED,
        fontsize=12,
        loc="left",
        labelpad=10,
    )
    _text(axes, "Perplexity against QKV, %", 0, 1, offset=(-28 if small else -36, 18), color=MUTED, size=12)
    _text(axes, "↙ better", 0, 0, offset=(8, 12), color=MUTED, size=12)

    front = pareto_front([point for point in points if point.own and point.comparable])
    if len(front) > 1:
        xs, ys = [point.share for point in front], [min(point.increase, top) for point in front]
        axes.step(xs, ys, where="post", color=SHARED, alpha=0.35, linewidth=2, zorder=2)
    _draw_points(axes, points, top)
    _label_points(axes, points, top, front, small=small)
    return _svg(figure, name)


def training_curve(
    curves: Sequence[tuple[Sequence[float], Sequence[float]]],
    reference: Sequence[tuple[Sequence[float], Sequence[float]]],
    *,
    limits: tuple[float, float],
    steps: int,
    one_tensor: bool,
    name: str,
) -> str:
    """One small multiple: a variant's training loss and validation loss, with the reference behind.

    Args:
        curves: Steps and losses: training, then validation.
        reference: The same of the reference, or empty.
        limits: Lower and upper end of the loss axis, in nats per token.
        steps: End of the step axis.
        one_tensor: True when K = V, for the colour.
        name: Prefix of the SVG's ids.
    """
    figure, axes = _axes(210, 130, left=22, right=6, bottom=22, top=6)
    axes.set_xlim(0, steps)
    axes.set_ylim(*limits)
    axes.set_xticks([0, steps], ["0", f"{steps:,}"])
    axes.get_xticklabels()[1].set_horizontalalignment("right")
    axes.get_xticklabels()[0].set_horizontalalignment("left")
    axes.locator_params(axis="y", nbins=4)
    colour = SHARED if one_tensor else INK
    for xs, ys in reference[1:]:
        axes.plot(xs, ys, color=MUTED, linewidth=1, linestyle=(0, (3, 2)))
    for number, (xs, ys) in enumerate(curves):
        if number == 0:
            axes.plot(xs, ys, color=colour, linewidth=1, alpha=0.4)
        else:
            axes.plot(xs, ys, color=colour, linewidth=1.6, marker="o", markersize=3.5)
    return _svg(figure, name)


def _axes(width: int, height: int, *, left: int, right: int, bottom: int, top: int) -> "tuple[Figure, Axes]":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI)
    FigureCanvasAgg(figure)  # measures text for the labels
    figure.patch.set_alpha(0)
    axes = figure.add_axes(
        (left / width, bottom / height, (width - left - right) / width, (height - bottom - top) / height)
    )
    axes.patch.set_alpha(0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.grid(visible=True, axis="y", color=FAINT, linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelcolor=MUTED, labelsize=11, pad=6)
    return figure, axes


def _text(axes: "Axes", text: str, x: float, y: float, *, offset: tuple[float, float], color: str, size: float) -> None:
    axes.annotate(
        text,
        (x, y),
        xycoords="axes fraction",
        xytext=offset,
        textcoords="offset points",
        color=color,
        fontsize=size,
        verticalalignment="center",
        parse_math=False,
    )


def _draw_points(axes: "Axes", points: Sequence[Point], top: float) -> None:
    for point in points:
        colour = SHARED if point.one_tensor else INK
        if point.low is not None and point.high is not None:
            axes.plot([point.share] * 2, [point.low, point.high], color=colour, linewidth=1.6, alpha=0.6, zorder=3)
        beyond = point.increase > top
        axes.plot(
            [_shown_share(axes, point, top)],
            [top - 0.015 * top if beyond else point.increase],
            marker="^" if beyond else "o" if point.comparable else "D",
            markersize=8.5 if point.own else 6.5,
            markerfacecolor=colour if point.own else PAPER,
            markeredgecolor=colour,
            markeredgewidth=1.3,
            alpha=1 if point.own else 0.8,
            linestyle="none",
            clip_on=False,
            zorder=5 if point.own else 4,
        )


def _label_points(axes: "Axes", points: Sequence[Point], top: float, front: Sequence[Point], *, small: bool) -> None:
    figure = axes.figure
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    anchors, sizes, texts, obstacles = [], [], [], []
    for point in sorted(points, key=lambda point: not point.own):
        text = f"{point.label} +{point.increase:.1f}\N{NO-BREAK SPACE}%" if point.increase > top else point.label
        x, y = axes.transData.transform((_shown_share(axes, point, top), min(point.increase, top * 0.985)))
        size = (12.5 if point.own else 11) - (1.5 if small else 0)
        sample = axes.text(0, 0, text, fontsize=size, fontweight="bold" if point.own else 400, parse_math=False)
        extent = sample.get_window_extent(renderer)
        sample.remove()
        anchors.append((float(x), float(y)))
        sizes.append((extent.width + 2, size + 3.0))
        texts.append((text, size, point))
        obstacles.append(Box.around(float(x), float(y), 5.5))
        if point.low is not None and point.high is not None:
            low, high = (float(axes.transData.transform((point.share, end))[1]) for end in (point.low, point.high))
            obstacles.append(Box(left=float(x) - 2, right=float(x) + 2, bottom=low, top=high))
    obstacles += _front_boxes(axes, front)
    area = axes.bbox
    zero = float(axes.transData.transform((1, 0))[1])
    obstacles.append(Box(left=area.x0, right=area.x1, bottom=zero - 1, top=zero + 1))
    better = Box(left=area.x0, right=area.x0 + 80, bottom=area.y0, top=area.y0 + 22)
    frame = Box(left=area.x0 - 4, bottom=area.y0, right=area.x1 + 10, top=area.y1 + 8)
    for (x, y), (text, size, point), place in zip(
        anchors, texts, place_labels(anchors, sizes, [*obstacles, better], frame), strict=True
    ):
        colour = (SHARED if point.one_tensor else INK) if point.own else MUTED
        if place.far:
            near = min(max(x, place.box.left), place.box.right), min(max(y, place.box.bottom), place.box.top)
            ends = axes.transData.inverted().transform([(x, y), near])
            axes.plot(ends[:, 0], ends[:, 1], color=MUTED, linewidth=0.8, alpha=0.6, zorder=2, clip_on=False)
        axes.annotate(
            text,
            (place.x, place.y),
            xycoords="figure pixels",
            color=colour,
            fontsize=size,
            fontweight="bold" if point.own else 400,
            horizontalalignment=place.align,
            verticalalignment="center_baseline",
            parse_math=False,
            zorder=6,
        )


def _shown_share(axes: "Axes", point: Point, top: float) -> float:
    """Moves published points beyond the top aside, so that they do not hide behind ours."""
    if point.own or point.increase <= top:
        return point.share
    x, y = axes.transData.transform((point.share, top))
    return float(axes.transData.inverted().transform((x - 13, y))[0])


def _front_boxes(axes: "Axes", front: Sequence[Point]) -> list[Box]:
    boxes = []
    for first, second in pairwise(front):
        (left, high), (right, low) = (
            axes.transData.transform((point.share, point.increase)) for point in (first, second)
        )
        boxes.append(Box(left=float(left), right=float(right), bottom=float(high) - 1, top=float(high) + 1))
        ends = sorted((float(low), float(high)))
        boxes.append(Box(left=float(right) - 1, right=float(right) + 1, bottom=ends[0], top=ends[1]))
    return boxes


def _svg(figure: "Figure", name: str) -> str:
    """The figure as an SVG element for an HTML page: text as text, ids of its own, colours as the page's variables."""
    import matplotlib

    buffer = io.StringIO()
    metadata: dict[str, Any] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata=metadata)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style type=.*?</style>", "", svg, flags=re.DOTALL)  # it would style the whole page
    svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true" focusable="false">', svg)
    return svg.replace("xlink:href", "href")

"""Figures: what lies on the front, where labels go, and SVG that fits into a page."""

import re

import pytest

from twofold.report.charts import Point, pareto_front, quality_against_cache, top_of_axis
from twofold.report.labels import Box, place_labels
from twofold.report.published import load_published


def point(label: str, share: float, increase: float) -> Point:
    return Point(label=label, share=share, increase=increase, own=True, one_tensor=False)


def test_the_front_holds_what_nothing_beats() -> None:
    points = [point("a", 1, 0), point("b", 0.5, 3), point("c", 0.5, 2), point("d", 0.25, 2), point("e", 0.125, 5)]
    assert [found.label for found in pareto_front(points)] == ["e", "d", "a"]


def test_other_positions_are_never_on_the_front() -> None:
    points = [point("QKV", 1, 0), point("a", 0.5, 1)]
    rotary = Point(label="r", share=0.25, increase=-1, own=True, one_tensor=True, comparable=False)
    drawn = quality_against_cache([*points, rotary], 4.0, width=700, height=300, name="m")
    assert "opacity: 0.35" in drawn, "the front still runs from a to QKV"
    alone = quality_against_cache([points[0], rotary], 4.0, width=700, height=300, name="m")
    assert "opacity: 0.35" not in alone


def test_an_outlier_does_not_flatten_the_plot() -> None:
    assert top_of_axis([0, 1, 2, 3, 25]) == pytest.approx(3.9)
    assert top_of_axis([0, 1, 2, 3, 6]) == pytest.approx(6.9)
    assert top_of_axis([-1.0, 0.0]) > 0


def test_labels_avoid_each_other_and_the_points() -> None:
    anchors = [(100.0 + 6 * (index % 3), 100.0 + 5 * (index // 3)) for index in range(6)]
    markers = [Box.around(x, y, 4) for x, y in anchors]
    places = place_labels(anchors, [(40.0, 12.0)] * 6, markers, Box(left=0, bottom=0, right=300, top=200))
    boxes = [place.box for place in places]
    assert sum(a.overlap(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :]) == 0
    assert sum(box.overlap(marker) for box in boxes for marker in markers) == 0


def test_the_svg_keeps_to_itself() -> None:
    points = [point("<QKV> & $x$", 1, 0), point("b", 0.5, 3)]
    svg = quality_against_cache(points, 4.0, width=700, height=300, name="main")
    assert svg == quality_against_cache(points, 4.0, width=700, height=300, name="main")
    assert svg.startswith("<svg viewBox=")
    assert "&lt;QKV&gt; &amp; $x$" in svg
    assert "<style" not in svg
    assert "<metadata" not in svg
    assert all(name.startswith("main-") for name in re.findall(r'\bid="([^"]*)"', svg))
    used = re.findall(r'(?:href="#|url\(#)([^")]*)', svg)
    assert used
    assert set(used) <= set(re.findall(r'\bid="([^"]*)"', svg))
    assert set(re.findall(r"#[0-9a-f]{6}", svg)) <= {"#000000"}, "every colour is a variable of the page"


def test_the_published_figures() -> None:
    published = load_published()
    assert published.variants["Q-K=V"].increase == 3.1
    assert published.variants["Q-K=V"].source == "paper"
    assert published.variants["Q-MQA"].cache_share == 1 / 32
    assert [label for label, row in published.variants.items() if row.one_tensor] == [
        "Q-K=V",
        "Q=K=V",
        "Q-GQA-4",
        "Q-MQA",
    ]
    for row in published.variants.values():  # the paper prints one or two decimals
        assert 100 * float(1 - row.cache_share) == pytest.approx(row.cache_reduction, abs=0.05)
    assert published.masked_increase == pytest.approx(2.21, abs=0.005)

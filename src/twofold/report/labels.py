"""Places labels beside points so that none covers another label, a point or a line."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Box:
    """A rectangle in pixels; y grows upwards."""

    left: float
    bottom: float
    right: float
    top: float

    def overlap(self, other: "Box") -> float:
        """Shared area in square pixels."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return width * height if width > 0 and height > 0 else 0.0

    def area_outside(self, frame: "Box") -> float:
        """Area that lies outside a frame."""
        return (self.right - self.left) * (self.top - self.bottom) - self.overlap(frame)

    @classmethod
    def around(cls, x: float, y: float, radius: float) -> "Box":
        """The square around a point."""
        return cls(left=x - radius, bottom=y - radius, right=x + radius, top=y + radius)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a label goes."""

    x: float
    """Pixel at which the text is anchored."""
    y: float
    """Pixel of the text's vertical centre."""
    align: str
    """Which side of the text is anchored: left, center or right."""
    far: bool
    """True when the label is so far from its point that a thin line should join them."""
    box: Box
    """What the text covers."""


_DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
_DISTANCES = (9, 16, 26, 40, 58)
_FAR = 20
_SWEEPS = 4


def place_labels(
    anchors: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    obstacles: Sequence[Box],
    frame: Box,
) -> list[Placement]:
    """Chooses a place for each label: greedily, then again for each with the others in place.

    Args:
        anchors: Pixel positions of the points.
        sizes: Width and height of each label in pixels.
        obstacles: What labels should not cover: markers, intervals, lines.
        frame: Where labels must stay.
    """
    placed: list[Placement | None] = [None] * len(anchors)
    for _ in range(_SWEEPS):
        for index, (anchor, size) in enumerate(zip(anchors, sizes, strict=True)):
            others = [other.box for position, other in enumerate(placed) if other is not None and position != index]
            placed[index] = min(
                _candidates(anchor, size), key=lambda item: _cost(item[0], item[1], others, obstacles, frame)
            )[1]
    return [placement for placement in placed if placement is not None]


def _candidates(anchor: tuple[float, float], size: tuple[float, float]) -> list[tuple[float, Placement]]:
    (x, y), (width, height) = anchor, size
    found: list[tuple[float, Placement]] = []
    for distance in _DISTANCES:
        for rank, (right, up) in enumerate(_DIRECTIONS):
            reach = distance * (0.75 if right and up else 1)
            left = x + reach if right > 0 else x - reach - width if right < 0 else x - width / 2
            middle = y + up * (reach if right else reach + height / 4)
            align = "left" if right > 0 else "right" if right < 0 else "center"
            at = left if right > 0 else left + width if right < 0 else x
            box = Box(left=left, bottom=middle - height / 2, right=left + width, top=middle + height / 2)
            far = distance > _FAR
            found.append((distance + rank, Placement(x=at, y=middle, align=align, far=far, box=box)))
    return found


def _cost(effort: float, place: Placement, others: list[Box], obstacles: Sequence[Box], frame: Box) -> float:
    covered = sum(place.box.overlap(box) for box in others) + sum(place.box.overlap(box) for box in obstacles)
    return effort + 4 * covered + 40 * place.box.area_outside(frame)

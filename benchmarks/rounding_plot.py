"""The picture of docs/token_rounding.md, drawn from a sweep's JSON as an SVG with nothing but text.

    python -m benchmarks.rounding_plot benchmarks/results/NAME.json docs/token_rounding.svg

Left: unused rows of the tiles, right (where the sweep was timed): the time of a step, both against tokens per expert.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

PANEL_WIDTH, HEIGHT = 440, 350
LEFT, RIGHT, TOP, BOTTOM = 62, 26, 76, 58
# Legible on light and on dark pages, and told apart without colour by the dashes of rounding.
COLOURS = {"uniform": "#3b7dd8", "zipf": "#d9822b"}
DASHES = {"top_k": "", "nearest": ' stroke-dasharray="6 4"'}
NAMES = {"top_k": "top-K", "nearest": "rounded"}
GREY = "#808080"


class Panel(NamedTuple):
    """One set of axes: the horizontal one counts tokens per expert, in powers of two."""

    left: float
    title: str
    unit: str
    highest: float
    fewest: float
    most: float

    def x(self, tokens_per_expert: float) -> float:
        """Return the place of a number of tokens."""
        share = math.log2(tokens_per_expert / self.fewest) / math.log2(self.most / self.fewest)
        return self.left + LEFT + share * (PANEL_WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Return the place of a value; SVG counts from the top."""
        return HEIGHT - BOTTOM - value / self.highest * (HEIGHT - TOP - BOTTOM)


def draw(record: dict) -> str:
    """Return the SVG of a sweep's record."""
    points = record["points"]
    timed = all("both_ms" in point[label] for point in points for label in NAMES)
    drawn = _panel(points, 0, "Tile rows that hold no token", "%", lambda p, label: 100 * p[label]["unused_fraction"])
    if timed:
        title = "Forward and backward, for every 1,000 tokens"
        drawn += _panel(points, PANEL_WIDTH, title, "µs", lambda p, label: 1e6 * p[label]["both_ms"] / p["tokens"])
    width = PANEL_WIDTH * (2 if timed else 1)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}"',
            f'  font-family="sans-serif" font-size="12" fill="{GREY}">',
            f"<title>{_caption(record, timed)}</title>",
            *drawn,
            "</svg>\n",
        ]
    )


def _caption(record: dict, timed: bool) -> str:
    shape = record["shape"]
    caption = f"D {shape['D']}, N {shape['N']}, E {shape['E']}, K {shape['K']}, a tile of {record['tile_m']}"
    return f"{caption}, {record['gpu']}, {record['date']}" if timed else caption


def _panel(points: list[dict], left: float, title: str, unit: str, value: Callable[[dict, str], float]) -> list[str]:
    tokens = [point["tokens_per_expert"] for point in points]
    step, highest = _grid(max(value(point, label) for point in points for label in NAMES))
    panel = Panel(left, title, unit, highest, min(tokens), max(tokens))
    lines = _axes(panel, sorted(set(tokens)), step)
    for load, colour in COLOURS.items():
        chosen = sorted((p for p in points if p["load"] == load), key=lambda point: point["tokens_per_expert"])
        for label, dash in DASHES.items():
            places = [(panel.x(p["tokens_per_expert"]), panel.y(value(p, label))) for p in chosen]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
            lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
    return lines + _legend(panel)


def _grid(highest: float) -> tuple[float, float]:
    """Return a round step and the lowest multiple of it at or above ``highest``, about five steps up."""
    rough = highest / 5
    magnitude = 10 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough)
    return step, step * math.ceil(highest / step)


def _axes(panel: Panel, tokens: list[float], step: float) -> list[str]:
    first, last, floor = panel.x(panel.fewest), panel.x(panel.most), panel.y(0)
    lines = [f'<text x="{first:.1f}" y="{TOP - 54}" font-size="14">{panel.title}, {panel.unit}</text>']
    for index in range(round(panel.highest / step) + 1):
        y = panel.y(index * step)
        lines.append(f'<path d="M{first:.1f} {y:.1f}H{last:.1f}" stroke="{GREY}" stroke-opacity="0.3"/>')
        lines.append(f'<text x="{first - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{index * step:g}</text>')
    for number in tokens:
        lines.append(f'<text x="{panel.x(number):.1f}" y="{floor + 18:.1f}" text-anchor="middle">{number:g}</text>')
    middle = (first + last) / 2
    lines.append(f'<text x="{middle:.1f}" y="{floor + 38:.1f}" text-anchor="middle">tokens per expert</text>')
    return lines


def _legend(panel: Panel) -> list[str]:
    lines = []
    for row, (load, colour) in enumerate(COLOURS.items()):
        for column, (label, dash) in enumerate(DASHES.items()):
            x, y = panel.left + LEFT + 150 * column, TOP - 34 + 17 * row
            lines.append(f'<path d="M{x} {y}h26" stroke="{colour}" stroke-width="2"{dash}/>')
            lines.append(f'<text x="{x + 32}" y="{y + 4}" font-size="11">{load}, {NAMES[label]}</text>')
    return lines


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    parser.add_argument("svg", type=Path)
    arguments = parser.parse_args()
    arguments.svg.write_text(draw(json.loads(arguments.json.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Make stories happy or sad: a mood vector from prompts, and what it does at scales from -2 to 2.

    python examples/steering_mood.py
    python examples/steering_mood.py --openings 200 --plot doc/guides/steering_mood.svg

The vector comes from pairs of openings that differ in the mood word only. It then steers stories
whose openings leave the mood open: at the layer that tells the moods apart best, at a later one,
and there in the generated tokens only. All of it runs side by side in one batch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from demo.moods import SCALES, Point, Way, measure, mood_module
from tllm import LLM


def plot(points: Sequence[Point]) -> str:
    """The shares against the scale, as SVG: happy stories full, heroes named again dashed."""
    width, height, left, top, legend = 480, 280, 52, 16, 310
    colors = ("#c2410c", "#1d4ed8", "#15803d", "#7e22ce", "#a16207", "#0e7490")
    # Equal steps for unequal scales: most of what happens, happens between -1 and 1.
    at = {scale: left + i * width / (len(SCALES) - 1) for i, scale in enumerate(SCALES)}

    def y(share: float) -> float:
        return top + (1 - share) * height

    size = f"{left + width + legend} {height + 70}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" '
        'font-size="13" fill="#222">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<path d="M{left} {y(share)}h{width}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{left - 8}" y="{y(share) + 4}" text-anchor="end">{share:.0%}</text>'
        )
    for scale, x in at.items():
        parts.append(f'<text x="{x}" y="{y(0) + 20}" text-anchor="middle">{scale:g}</text>')
    middle = left + width / 2
    parts.append(
        f'<text x="{middle}" y="{y(0) + 44}" text-anchor="middle">'
        "scale of the mood vector (in unequal steps)</text>"
    )
    ways = list(dict.fromkeys(point.way for point in points))
    for i, way in enumerate(ways):
        of_way = [point for point in points if point.way == way]
        for j, dash in enumerate(("none", "5 4")):
            shares = {p.scale: p.kept if j else p.happy for p in of_way}
            line = " ".join(f"{at[scale]:.1f},{y(share):.1f}" for scale, share in shares.items())
            style = (
                f'stroke="{colors[i % len(colors)]}" stroke-width="2" stroke-dasharray="{dash}" '
                'fill="none"'
            )
            x, row = left + width + 18, top + 20 + 54 * i + 22 * j
            name = "hero named" if j else "happy"
            parts.append(f'<polyline points="{line}" {style}/>')
            parts.append(f'<path d="M{x} {row - 4}h26" {style}/>')
            parts.append(f'<text x="{x + 34}" y="{row}">{way}: {name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Print the scores of the layers and a table for each way, and draw the plot if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--ways",
        type=Way.parse,
        nargs="+",
        metavar="LAYER:POSITIONS",
        help="where to steer; default: BEST:all 3:all 3:all_generated",
    )
    parser.add_argument("--openings", type=int, default=24, help="stories for each point")
    parser.add_argument("--plot", type=Path, help="write an SVG file")
    chosen = parser.parse_args()

    llm = LLM(
        str(Path(__file__).parents[1] / "demo" / "model"),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=2**28,
    )
    module = mood_module(llm)
    print("layer  separation     d'  natural scale")
    for layer, entry in module.vectors["post_block"].items():
        scores = f"{module.separation[layer]:10.3f} {module.d_prime[layer]:6.2f}"
        print(f"{layer:5}  {scores} {entry['scale']:14.2f}")

    best = Way(module.best_layer, "all")
    ways = chosen.ways or [best, Way(3, "all"), Way(3, "all_generated")]
    points = list(measure(llm, module, ways, chosen.openings))
    for way in ways:
        print(f"\n{way}\nscale  happy    sad  hero named again")
        for p in points:
            if p.way == way:
                print(f"{p.scale:5.2f} {p.happy:6.1%} {p.sad:6.1%} {p.kept:17.1%}")
    if chosen.plot:
        chosen.plot.parent.mkdir(parents=True, exist_ok=True)
        chosen.plot.write_text(plot(points))


if __name__ == "__main__":
    main()

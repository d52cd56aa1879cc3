"""Writes the model card from a run's logs and scores: ``python -m training.card``."""

import argparse
import json
from pathlib import Path

from training import sheet
from training.score import MODEL

Rows = list[dict[str, float]]

GOALS = {
    "top1_20_steps": ("nearest reference is the asked one, 20 steps", 0.85),
    "top1_8_steps": ("the same, 8 steps", 0.75),
    "top1_4_steps": ("the same, 4 steps", None),
    "style_20_steps": ("nearest reference has the asked style, 20 steps", 0.90),
    "style_8_steps": ("the same, 8 steps", None),
    "name_20_steps": ("nearest reference has the asked name, any style, 20 steps", None),
    "border_background": ("mean border pixel is nearest to the asked background colour", 0.90),
    "top1_background": ("the emoji on that background is the asked one", None),
    "half_pair": ("pairs: a half shows the asked emoji", None),
    "both_pair": ("pairs: both halves do", None),
    "top1_128_px": ("nearest reference is the asked one, 128×128, 20 steps", None),
}


def main() -> None:
    """Fill the template and write card and curve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path(".train/run"))
    parser.add_argument("--out", type=Path, default=MODEL)
    options = parser.parse_args()
    flow = json.loads((options.run / "flow-log.json").read_text())
    vae = json.loads((options.run / "vae-log.json").read_text())
    scores = json.loads((options.run / "scores.json").read_text())
    template = (Path(__file__).parent / "card.md").read_text()
    last = flow[-1]
    values = {
        "scores": score_table(scores),
        "curve": curve_table(flow),
        "prompts": prompt_rows(),
        "steps": f"{last['step'] + 1:,.0f}",
        "samples": f"{last['samples'] / 1e6:.1f}",
        "seconds": f"{last['seconds']:.0f}",
        "error_64": f"{vae[-1]['error_64']:.4f}",
        "error_128": f"{vae[-1]['error_128']:.4f}",
    }
    (options.out / "README.md").write_text(template.format(**values))
    (options.out / "loss.svg").write_text(curve(flow))


def score_table(scores: dict[str, float]) -> str:
    """The measured shares beside their goals."""
    lines = ["| share of pictures | measured | goal |", "|---|---|---|"]
    for key, (meaning, goal) in GOALS.items():
        if key in scores:
            lines.append(f"| {meaning} | {scores[key]:.1%} | {f'{goal:.0%}' if goal else ''} |")
    return "\n".join(lines)


def curve_table(rows: Rows, count: int = 10) -> str:
    """About ``count`` rows of the loss log."""
    chosen = [row for row in rows[:: max(1, len(rows) // count)] if "loss_128" in row] + [rows[-1]]
    lines = ["| step | seconds | samples | loss at 64 px | loss at 128 px |", "|---|---|---|---|---|"]
    for row in chosen:
        lines.append(
            f"| {row['step']:.0f} | {row['seconds']:.0f} | {row['samples']:,.0f} "
            f"| {row['loss_64']:.3f} | {row['loss_128']:.3f} |"
        )
    return "\n".join(lines)


def prompt_rows() -> str:
    """The prompts of the contact sheet, row by row."""
    asked = sheet.prompts()
    return "\n".join(f"{i // 8 + 1}. {'; '.join(asked[i : i + 8])}" for i in range(0, len(asked), 8))


def curve(rows: Rows, width: int = 640, height: int = 240) -> str:
    """The two losses over time as a drawing: time across, loss from 0 to 0.6 upwards."""
    end, top, margin = rows[-1]["seconds"], 0.6, 30
    wide, high = width - 2 * margin, height - 2 * margin

    def line(key: str, colour: str) -> str:
        spots = [
            f"{margin + row['seconds'] / end * wide:.1f},{height - margin - min(row[key], top) / top * high:.1f}"
            for row in rows
            if key in row
        ]
        return f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{" ".join(spots)}"/>'

    def text(x: float, y: float, words: str, colour: str = "#555") -> str:
        return f'<text x="{x}" y="{y}" font-family="sans-serif" font-size="12" fill="{colour}">{words}</text>'

    box = f'<rect x="{margin}" y="{margin}" width="{wide}" height="{high}" fill="white" stroke="#999"/>'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">',
        box,
        line("loss_64", "#2166ac"),
        line("loss_128", "#b2182b"),
        text(margin + 8, margin + 16, "64 px", "#2166ac"),
        text(margin + 58, margin + 16, "128 px", "#b2182b"),
        text(4, margin + 4, f"{top}"),
        text(14, height - margin, "0"),
        text(width - margin - 40, height - 10, f"{end:.0f} s"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    main()

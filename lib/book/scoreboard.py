"""The scoreboard: totals, squares and tables of verdicts."""

import html
from collections import Counter

import matplotlib.pyplot as plt

from lib.book.toc import chapters, slug

COLORS = {"holds": "#009E73", "holds in part": "#E69F00", "fails": "#D55E00", "not yet run": "#DDDDDD"}


def totals(rows: list[dict]) -> dict[str, int]:
    """Counts for the prose: total, settled, holds, part, fails."""
    count = Counter(row["verdict"] for row in rows)
    settled = len(rows) - count["not yet run"]
    return {
        "total": len(rows),
        "settled": settled,
        "holds": count["holds"],
        "part": count["holds in part"],
        "fails": count["fails"],
    }


def squares(rows: list[dict], per_row: int = 20):
    """Draw each claim as a square coloured by verdict, paper by paper."""
    groups = [[row for row in rows if row["paper"] == paper] for paper in (1, 2)]
    heights = [-(-len(group) // per_row) for group in groups]
    fig, ax = plt.subplots(figsize=(6.4, 0.32 * (sum(heights) + 4.6)))
    top = 0.0
    for paper, (group, height) in enumerate(zip(groups, heights, strict=True), start=1):
        ax.text(0, top + 0.3, f"Paper {paper}", fontweight="bold", va="center")
        top += 1
        for i, row in enumerate(group):
            x, y = i % per_row, top + i // per_row
            ax.add_patch(plt.Rectangle((x, y), 0.86, 0.86, color=COLORS[row["verdict"]], linewidth=0))
        top += height + 0.4
    for i, (verdict, color) in enumerate(COLORS.items()):
        ax.add_patch(plt.Rectangle((i * 5, top + 0.2), 0.7, 0.7, color=color, linewidth=0))
        ax.text(i * 5 + 1.0, top + 0.55, verdict, va="center", fontsize=10)
    ax.set(xlim=(0, per_row), ylim=(top + 1.1, -0.3), aspect="equal")
    ax.axis("off")
    return fig


def table(rows: list[dict], paper: int):
    """Claims of one paper with place, verdict and the chapter that settles them, linked."""
    written = {slug(entry) for entry in chapters()}
    lines = []
    for row in (row for row in rows if row["paper"] == paper):
        chapter = row["chapter"]
        link = f'<a href="{chapter}.html">{chapter}</a>' if chapter in written else f"{chapter} (planned)"
        lines.append((row["id"], row["statement"], row["place"], row["verdict"], link))
    return Table(lines)


class Table:
    """Rows of claims as HTML with links, and as plain text for terminals and comparisons."""

    HEAD = ("claim", "says", "place", "verdict", "chapter")

    def __init__(self, lines: list[tuple]):
        self.lines = lines

    def __repr__(self) -> str:
        return "\n".join(f"{line[0]}: {line[3]}" for line in self.lines)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in self.HEAD)
        body = "".join(
            f'<tr class="verdict-{verdict.replace(" ", "-")}"><td><code>{name}</code></td>'
            f"<td>{html.escape(says)}</td><td>{html.escape(place)}</td>"
            f'<td><span class="verdict-word">{verdict}</span></td><td>{chapter}</td></tr>'
            for name, says, place, verdict, chapter in self.lines
        )
        inner = f'<table class="claims"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        return f'<div class="pst-scrollable-table-container">{inner}</div>'

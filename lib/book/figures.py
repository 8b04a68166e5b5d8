"""One look for all figures: colours with fixed meanings, theory dotted over simulation, every seed a thin line."""

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LinearSegmentedColormap

#: Okabe–Ito colours; a meaning keeps its colour through the whole book.
COLOR = {
    "qk": "#0072B2",
    "ov": "#D55E00",
    "embedding": "#009E73",
    "official": "#CC79A7",
    "theory": "#000000",
    "uniform": "#777777",
    "base": "#555555",
    "accent": "#E69F00",
    "sky": "#56B4E9",
}
ATTENTION = LinearSegmentedColormap.from_list("book_attention", ["#ffffff", "#cfe3f1", "#6aaed6", "#0072B2", "#08306b"])
RATIO = LinearSegmentedColormap.from_list("book_ratio", ["#E69F00", "#D55E00", "#8a5a7a", "#0072B2", "#08306b"])


def use_style() -> None:
    """Load the book's matplotlib style and register its colour maps. Safe to call again."""
    for colormap in (ATTENTION, RATIO):
        mpl.colormaps.register(colormap, force=True)
    plt.style.use(Path(__file__).with_name("book.mplstyle"))


def theory(ax, x, y, label: str | None = "theory", **kwargs):
    """Draw what the theory predicts: a black dotted line above everything else."""
    return ax.plot(x, y, color=COLOR["theory"], linestyle=(0, (1, 1.6)), linewidth=2.0, zorder=10, label=label, **kwargs)


def seeds(ax, x, ys, color: str, label: str | None = None, mean: bool = True):
    """Draw every seed as a thin line and, unless switched off, their mean as a thick one.

    Args:
        ax: axes.
        x: [point] or [seed, point].
        ys: [seed, point].
        color: of all lines.
        label: of the mean (of the first seed when `mean` is False).
        mean: whether to draw the mean; pass False where x differs from seed to seed.
    """
    ys = np.atleast_2d(np.asarray(ys))
    xs = np.broadcast_to(np.asarray(x), ys.shape)
    for i, (one_x, one_y) in enumerate(zip(xs, ys, strict=True)):
        ax.plot(one_x, one_y, color=color, linewidth=0.8, alpha=0.55, label=label if i == 0 and not mean else None)
    if mean:
        ax.plot(xs[0], ys.mean(0), color=color, linewidth=2.2, label=label)


def uniform(ax, level: float, label: str = "uniform", side: str = "left"):
    """Mark the level that attention has when it looks at everything equally: grey, dashed, always named."""
    ax.axhline(level, color=COLOR["uniform"], linestyle=(0, (5, 3)), linewidth=1.2, zorder=1)
    x, align = (0.01, "left") if side == "left" else (0.99, "right")
    ax.annotate(
        label,
        (x, level),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        color=COLOR["uniform"],
        fontsize=9,
        ha=align,
    )


def ratio_colors(ratios) -> list:
    """One colour a ratio r = eta_QK/eta_OV, from orange (slow QK) to dark blue (fast QK), in the given order."""
    order = np.argsort(np.argsort(np.asarray(ratios, dtype=float)))
    return [RATIO(i / max(len(order) - 1, 1)) for i in order]


def loss_axis(ax, axis: str = "x", label: str = "loss (nats)") -> None:
    """Make an axis of losses: logarithmic, and on x falling to the right so that training runs left to right."""
    if axis == "x":
        ax.set_xscale("log")
        ax.set_xlabel(f"{label}, falling →")
        if not ax.xaxis_inverted():
            ax.invert_xaxis()
    else:
        ax.set_yscale("log")
        ax.set_ylabel(label)


def attention_map(ax, pattern, rows=None, columns=None, annotate: bool = True, digits: int = 2):
    """Draw attention weights on the one scale that all maps share: white = 0, dark blue = 1.

    Args:
        ax: axes.
        pattern: [query, key], in [0, 1].
        rows: names of the queries.
        columns: names of the keys.
        annotate: whether to print each number in its square.
        digits: decimals of these.
    """
    pattern = np.asarray(pattern)
    image = ax.imshow(pattern, cmap=ATTENTION, vmin=0, vmax=1, aspect="auto")
    ax.set_xticks(range(pattern.shape[1]), columns if columns is not None else [""] * pattern.shape[1])
    ax.set_yticks(range(pattern.shape[0]), rows if rows is not None else [""] * pattern.shape[0])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    for (i, j), value in np.ndenumerate(pattern) if annotate else ():
        ax.text(
            j,
            i,
            f"{value:.{digits}f}",
            ha="center",
            va="center",
            fontsize=9,
            color="white" if value > 0.55 else "#333333",
        )
    return image


def words(ax, tokens, weights, y: float = 0.0, label: str | None = None, fontsize: float = 12) -> None:
    """Write a sentence on one line of an axes, each word on a tile shaded by its attention.

    The axes are used in units of characters: set nothing on them before; several calls with different `y` stack rows.

    Args:
        ax: axes; ticks and frame are removed.
        tokens: [word] strings.
        weights: [word] attention in [0, 1]; the colour scale is that of `attention_map`.
        y: height of the row; rows one unit apart do not touch.
        label: written above the row.
        fontsize: of the words.
    """
    x, gap = 0.0, 1.0
    for token, weight in zip(tokens, weights, strict=True):
        width = len(token) + gap
        ax.add_patch(mpl.patches.FancyBboxPatch(
            (x + 0.15, y - 0.32), width - 0.3, 0.64, boxstyle="round,pad=0,rounding_size=0.12", linewidth=0.6,
            edgecolor="#cccccc", facecolor=ATTENTION(float(weight)),
        ))  # fmt: skip
        ax.text(x + width / 2, y, token, ha="center", va="center", fontsize=fontsize, family="DejaVu Sans Mono",
                color="white" if weight > 0.55 else "#222222")  # fmt: skip
        x += width
    if label:
        ax.text(0.15, y + 0.42, label, ha="left", va="bottom", fontsize=fontsize - 1.5, color="#444444")
    ax.set_xlim(0, max(x, ax.get_xlim()[1] if ax.patches else x))
    ax.set_ylim(min(y - 0.6, ax.get_ylim()[0]), max(y + 1.0, ax.get_ylim()[1]))
    ax.axis("off")

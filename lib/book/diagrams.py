"""Drawings that explain rather than measure."""

import matplotlib as mpl

from lib.book.figures import COLOR

#: Colours of the four parametrisations: blue where only attention is factorised, orange where only the output is.
CODE_COLOR = {"CACO": COLOR["base"], "FACO": COLOR["qk"], "CAFO": COLOR["ov"], "FAFO": "#7B3F98"}


def _matrix(ax, x: float, y: float, width: float, height: float, label: str, color: str, fontsize: float) -> None:
    """A matrix as a tinted rectangle with its lower left corner at x, y."""
    ax.add_patch(mpl.patches.FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.08", facecolor=mpl.colors.to_rgba(color, 0.16),
        edgecolor=color, linewidth=1.8,
    ))  # fmt: skip
    ax.text(x + width / 2, y + height / 2, label, ha="center", va="center", fontsize=fontsize, color=color)


def _pair(ax, x: float, y: float, names: tuple[str, str], size: tuple[float, float], color: str, fontsize: float) -> None:
    """Two thin matrices whose product has the given width and height."""
    width, height = size
    thin = 0.62
    _matrix(ax, x, y, thin, height, names[0], color, fontsize)
    _matrix(ax, x + thin + 0.1, y + (height - thin) / 2, width, thin, names[1], color, fontsize)


def four_codes(ax, fontsize: float = 13.0) -> None:
    """The four parametrisations as a two-by-two table: each circuit as one matrix or as a product of two.

    Args:
        ax: axes; ticks and frame are removed.
        fontsize: of the matrices' names.
    """
    cell_width, cell_height, square = 6.3, 2.75, 1.6
    for column, attention in enumerate("FC"):
        for row, output in enumerate("FC"):
            x, y = column * cell_width, (1 - row) * cell_height
            ax.add_patch(mpl.patches.FancyBboxPatch(
                (x + 0.1, y + 0.1), cell_width - 0.2, cell_height - 0.2, boxstyle="round,pad=0,rounding_size=0.14",
                facecolor="#fafafa", edgecolor="#d5d5d5", linewidth=1,
            ))  # fmt: skip
            name = {"x": x + cell_width / 2, "y": y + cell_height - 0.25, "va": "top", "fontsize": fontsize + 2, "weight": "bold"}
            ax.text(s=f"{attention}A", ha="right", color=COLOR["qk"], **name)
            ax.text(s=f"{output}O", ha="left", color=COLOR["ov"], **name)
            base = y + 0.32
            if attention == "F":
                _pair(ax, x + 0.4, base, ("$W_Q$", "$W_K^{\\top}$"), (square, square), COLOR["qk"], fontsize)
            else:
                _matrix(ax, x + 0.75, base, square, square, "$W_{QK}$", COLOR["qk"], fontsize + 1)
            if output == "F":
                _pair(ax, x + 4.15, base, ("$W_V$", "$W_O$"), (1.0, square), COLOR["ov"], fontsize)
            else:
                _matrix(ax, x + 4.5, base, 1.0, square, "$W_{OV}$", COLOR["ov"], fontsize + 1)
            middle = base + square / 2
            ax.annotate("", (x + 4.0, middle), (x + 2.85, middle), arrowprops={"arrowstyle": "-|>", "color": "#888888", "lw": 1.4})
            ax.text(x + 3.4, middle - 0.12, "softmax", ha="center", va="top", fontsize=fontsize - 3.5, color="#777777")
    top = 2 * cell_height
    for column, words in enumerate(("where to look: two factors", "where to look: one matrix")):
        ax.text((column + 0.5) * cell_width, top + 0.1, words, ha="center", va="bottom", fontsize=fontsize - 1.5, color=COLOR["qk"])
    for row, words in enumerate(("what to say:\ntwo factors", "what to say:\none matrix")):
        ax.text(-0.08, (1.5 - row) * cell_height, words, ha="right", va="center", rotation=90, fontsize=fontsize - 1.5, color=COLOR["ov"],
                multialignment="center")  # fmt: skip
    ax.set_xlim(-1.1, 2 * cell_width)
    ax.set_ylim(0, top + 0.6)
    ax.set_aspect("equal")
    ax.axis("off")


def trace(axes, words, scores, pattern, classes, probabilities, distinct) -> None:
    """One sequence on its way through the layer: scores, pattern, prediction.

    Args:
        axes: three axes, left to right.
        words: [key] strings.
        scores: [key], before the softmax.
        pattern: [key], after it.
        classes: [output] strings.
        probabilities: [output], after the last softmax.
        distinct: [key] bool; common words are drawn pale.
    """
    order = range(len(words))
    for ax, values in ((axes[0], scores), (axes[1], pattern)):
        tints = [mpl.colors.to_rgba(COLOR["qk"], 1.0 if d else 0.35) for d in distinct]
        ax.barh(order, values, color=tints, height=0.68)
        ax.invert_yaxis()
    axes[0].set_yticks(order, words)
    axes[1].set_yticks(order, [""] * len(words))
    axes[1].axvline(1 / len(words), color=COLOR["uniform"], linestyle=(0, (5, 3)), linewidth=1.2)
    axes[1].text(1 / len(words), -0.55, "uniform", color=COLOR["uniform"], fontsize=9.5, ha="center", va="bottom")
    axes[2].barh(range(len(classes)), probabilities, color=COLOR["ov"], height=0.6)
    axes[2].set_yticks(range(len(classes)), classes)
    axes[2].invert_yaxis()
    for ax, values, form in ((axes[0], scores, "{:.2f}"), (axes[1], pattern, "{:.2f}"), (axes[2], probabilities, "{:.2f}")):
        for i, value in enumerate(values):
            ax.text(value + 0.02 * max(values), i, form.format(value), va="center", fontsize=10, color="#333333")
        ax.set_xlim(0, 1.3 * max(values))
        ax.set_xticks([])
        ax.spines[["bottom", "left"]].set_visible(False)
        ax.tick_params(length=0)


def arrows(ax, vectors, colors, names="") -> None:
    """Vectors of a plane as arrows from one point, enlarged until the longest fits; what counts is where they point.

    Args:
        ax: axes; ticks are removed, a light frame stays.
        vectors: [vector, 2].
        colors: one a vector.
        names: a letter for each vector, written at its tip where it is long enough to have one.
    """
    lengths = [float(x * x + y * y) ** 0.5 for x, y in vectors]
    longest = max(lengths)
    ax.axhline(0, color="#dddddd", linewidth=0.8, zorder=0)
    ax.axvline(0, color="#dddddd", linewidth=0.8, zorder=0)
    for (x, y), length, color, name in zip(vectors, lengths, colors, names or [""] * len(lengths), strict=True):
        x, y = x / longest, y / longest
        ax.annotate("", (x, y), (0, 0), arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 2.0, "shrinkA": 0, "shrinkB": 0})
        if length > 0.08 * longest:
            beyond = 1 + 0.16 * longest / length  # a fixed distance past the tip
            ax.text(x * beyond, y * beyond, name, color=color, ha="center", va="center", weight="bold")
    ax.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal", xticks=[], yticks=[])
    ax.spines[:].set_visible(True)
    ax.spines[:].set(color="#cccccc", linewidth=0.8)

"""The second picture of the cover: one training run as a loss staircase over a strip of attention matrices."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch

from lib import checks
from lib.book.figures import COLOR, attention_map

INK = "#08306b"  # darkest colour of the attention maps: frames and their moments belong together
#: What a level of the loss means, in words beside its dotted line.
LEVEL_NAMES = {
    "uniform": r"guess blindly: $\log d$",
    "unigram": r"know the frequencies: $H(\pi)$",
    "rank one": "the best that one direction can do",
}


class Run(Protocol):
    """What the picture needs of a trajectory."""

    @property
    def times(self) -> np.ndarray:
        """[time], increasing."""

    @property
    def loss(self) -> np.ndarray:
        """[time], nats."""

    @property
    def patterns(self) -> np.ndarray:
        """[time, query, key], rows sum to 1."""

    @property
    def levels(self) -> Mapping[str, float]:
        """Loss levels in nats: "uniform", "unigram", "rank one", "floor"."""


def film_strip(figure: Figure, run: Run, moments: Mapping[str, float], *, tokens: Sequence[str] | None = None) -> None:
    """Draw a run: above, its loss falling in stairs from level to level; below, attention at chosen moments of the same time axis.

    The loss is drawn above its floor and on a logarithmic axis, so that late stairs are as visible as the first one.

    Args:
        figure: an empty figure, about 6.4 x 4.6 inches.
        run: a trajectory (see `Run`).
        moments: caption -> time of a frame, increasing, at least two. Frames stand evenly spaced; a line leads from each to its moment.
        tokens: names of the token types beside the first frame; None = a, b, c, ...

    Returns:
        Nothing; draws into `figure`.

    Raises:
        ValueError: fewer than two moments, a moment outside the run, moments out of order, or names that do not fit.

    Source: ours; the picture of paper 2's whole cycle.
    """
    times, patterns = np.asarray(run.times), np.asarray(run.patterns)
    at = np.array(list(moments.values()), dtype=float)
    checks.in_closed("film_strip", float(times[0]), float(times[-1]), moments=at)
    if at.size < 2 or np.any(np.diff(at) <= 0):
        raise ValueError(f"film_strip: moments = {at.tolist()}; expected at least two, increasing.")
    names = [chr(ord("a") + i) for i in range(patterns.shape[-1])] if tokens is None else list(tokens)
    checks.shape("film_strip", "tokens", np.array(names), (patterns.shape[-1],))
    index = [int(np.abs(times - t).argmin()) for t in at]
    figure.set_layout_engine("none")
    stairs = figure.add_axes((0.105, 0.525, 0.875, 0.455))
    _draw_stairs(stairs, run, times, index)
    width, height = figure.get_size_inches()
    side = min(0.285 * height, 0.78 * width / len(at))  # of a square frame, inches
    left = np.linspace(0.105, 0.98 - side / width, len(at))
    for frame, (x, caption, moment) in enumerate(zip(left, moments, index, strict=True)):
        pattern = patterns[moment]
        ax = figure.add_axes((x, 0.095, side / width, side / height))
        attention_map(ax, pattern, annotate=False)
        ax.set_xticks(np.arange(1, len(names)) - 0.5, [], minor=True)
        ax.set_yticks(np.arange(1, len(names)) - 0.5, [], minor=True)
        ax.grid(which="minor", color="white", linewidth=1.5)
        ax.tick_params(which="both", length=0, pad=3)
        ax.spines[:].set_visible(True)
        ax.spines[:].set(color="#9aa7b5", linewidth=0.8)
        ax.set_title(caption, loc="center", fontsize=11.5 if len(at) < 5 else 9.5, color=INK, pad=5)
        for (i, j), value in np.ndenumerate(pattern):
            if value > 0.295:  # what the eye should compare; the rest is pale enough to read as little
                shade = "white" if value > 0.55 else "#222222"
                number = f"{value:.2f}".lstrip("0").replace("1.00", "1")
                ax.text(j, i, number, ha="center", va="center", fontsize=9.5, color=shade)
        if frame == 0:
            ax.set_yticks(range(len(names)), names, fontsize=10)
            ax.set_xticks(range(len(names)), names, fontsize=10)
            label: dict[str, Any] = {
                "xycoords": "axes fraction",
                "textcoords": "offset points",
                "ha": "center",
                "va": "center",
                "fontsize": 10,
                "color": "#444444",
            }
            ax.annotate("query", (0, 0.5), xytext=(-21, 0), rotation=90, **label)
            ax.annotate("looks at", (0.5, 0), xytext=(0, -22), **label)
        figure.add_artist(
            ConnectionPatch(
                (times[moment], -0.15), (0.5, 1.19), stairs.get_xaxis_transform(), ax.transAxes, color=INK, linewidth=0.9, alpha=0.55
            )
        )


def _draw_stairs(ax, run: Run, times: np.ndarray, index: list[int]) -> None:
    """Loss above its floor, the levels it rests at, and the moments of the frames."""
    floor = run.levels["floor"]
    loss = np.asarray(run.loss) - floor
    ax.set_yscale("log")
    ax.set_xlim(times[0] - 0.015 * np.ptp(times), times[-1] + 0.015 * np.ptp(times))
    ax.set_ylim(loss.min() / 1.35, (run.levels["uniform"] - floor) * 1.6)
    for name, words in LEVEL_NAMES.items():
        level = run.levels[name] - floor
        ax.axhline(level, color=COLOR["theory"], linestyle=(0, (1, 1.6)), linewidth=1.6, zorder=1)
        ax.annotate(
            words, (1, level), xycoords=("axes fraction", "data"), xytext=(0, 3), textcoords="offset points", ha="right", fontsize=10.5
        )
    ax.plot(times, loss, color=COLOR["base"], linewidth=2.6, zorder=3)
    ax.vlines(times[index], ax.get_ylim()[0], loss[index], color=INK, linewidth=0.9, alpha=0.55, zorder=2)
    ax.plot(times[index], loss[index], "o", color=INK, markersize=7, markeredgecolor="white", markeredgewidth=1.2, zorder=4, clip_on=False)
    ax.set_xticks(times[index], [f"{t:.0f}" for t in times[index]], fontsize=10)
    ticks = [t for t in (1, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001) if ax.get_ylim()[0] <= t <= ax.get_ylim()[1]]
    ax.set_yticks(ticks, [f"{t:g}" for t in ticks], fontsize=10)
    ax.minorticks_off()
    ax.set_ylabel("loss above floor (nats)", fontsize=10.5)
    gap = int(np.diff(times[index]).argmax())  # the widest stretch without a tick label
    middle = (times[index[gap]] + times[index[gap + 1]]) / 2
    ax.text(middle, -0.09, "time", transform=ax.get_xaxis_transform(), ha="center", va="center", fontsize=10.5, color="#222222")

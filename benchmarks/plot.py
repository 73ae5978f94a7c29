"""The comparison as a picture: a panel for each head_dim and mask, rate over length, a line for each version."""

from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from benchmarks.comparison import TITLES, gemm_rate, side_by_side
from benchmarks.peers import PEERS
from fa import GENERATIONS

# Generations in one hue, the newer the darker; peers in grey, told apart by their markers.
STYLES = {
    **{
        version: {"color": color, "linewidth": 2.2, "marker": "o", "markersize": 4}
        for version, color in zip(GENERATIONS, ("#9ecae1", "#4292c6", "#08306b"), strict=True)
    },
    **{
        version: {"color": "#888888", "linewidth": 1.0, "linestyle": "--", "marker": marker, "markersize": 4}
        for version, marker in zip(PEERS, "s^vD*", strict=True)
    },
}


def draw(run: pd.DataFrame, path: Path) -> None:
    """Writes the picture of one run; the same rows give the same bytes."""
    wide = side_by_side(run)
    masks = wide.index.unique("causal")
    kinds = wide.index.droplevel(["causal", "seqlen_q"]).unique()
    figure = Figure(figsize=(4.6 * len(masks), 3.2 * len(kinds)), layout="constrained", facecolor="white")
    axes = figure.subplots(len(kinds), len(masks), squeeze=False, sharex=True, sharey=True)
    gemm = gemm_rate(run)
    for i, (dtype, head_dim) in enumerate(kinds):
        for j, causal in enumerate(masks):
            panel = axes[i][j]
            lines = wide.query("dtype == @dtype and head_dim == @head_dim and causal == @causal").droplevel([0, 1, 2])
            for version in lines:
                panel.plot(lines.index, lines[version], label=version, **STYLES[version])
            if gemm:
                panel.axhline(gemm, color="black", linewidth=0.8, linestyle=":", label="bf16 GEMM")
            panel.set_title(f"{dtype}, head_dim {head_dim}, {'causal' if causal else 'full'}", fontsize=10)
            panel.set_xscale("log", base=2)
            panel.set_xticks(lines.index, [str(seqlen) for seqlen in lines.index])
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
    figure.supxlabel("sequence length", fontsize=10)
    figure.supylabel(f"TFLOP/s, {TITLES[run.pass_.iloc[-1]].lower()}", fontsize=10)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=9, frameon=False)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Writes a figure; the same figure gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "fa-generations"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)

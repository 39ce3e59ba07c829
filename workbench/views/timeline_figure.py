"""The static drawing of a timeline model, as a plotly figure. Plotly reads texts as markup, so names are escaped."""

from __future__ import annotations

from html import escape
from typing import Any

import plotly.graph_objects as go

COLORS = {"host": "#56B4E9", "compute": "#009E73", "copy": "#E69F00"}
WAIT, INK, FAINT = "#D55E00", "#222222", "#8a8a8a"
PALE = {"#56B4E9": "#97D1F1", "#009E73": "#61C3A9", "#E69F00": "#F0C461", "#D55E00": "#E59C61"}
"""The colours of the steps before the cursor's: 62 % of each on white."""
ROW, GROUP = 1.0, 4.6
"""Heights in units of the y axis: of a lane, and of a runner's lanes with their heading."""


def draw(model: dict[str, Any]) -> go.Figure:
    """Takes what `timeline.view_model` returns."""
    runners = model["runners"]
    chart = go.Figure()
    for trace in _traces(model):
        chart.add_trace(trace)
    for index, runner in enumerate(runners):
        _frame(chart, runner, model["step"], index)
    places = [(_lane(index, lane), name) for index in range(len(runners)) for lane, name in enumerate(model["lanes"])]
    low, high = model["view"]
    chart.update_layout(
        title={"text": f"<b>timeline</b> <sup>{model['note']}</sup>", "font": {"size": 15}, "x": 0.01, "y": 0.98},
        template="plotly_white", barmode="overlay", bargap=0, height=70 + 125 * max(1, len(runners)),
        margin={"l": 62, "r": 12, "t": 52, "b": 34}, hoverlabel={"align": "left"},
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.0, "yanchor": "bottom", "font": {"size": 11}},
        uniformtext={"minsize": 9, "mode": "hide"},
        xaxis={"range": [low - (high - low) * 0.005, high * 1.005], "ticksuffix": " ms", "zeroline": False},
        yaxis={
            "range": [GROUP * len(runners), 0], "showgrid": False, "zeroline": False, "fixedrange": True,
            "tickvals": [y for y, _ in places], "ticktext": [name for _, name in places],
        },
    )  # fmt: skip
    return chart


def _lane(runner: int, lane: int) -> float:
    return runner * GROUP + 1.6 + lane * ROW


def _traces(model: dict[str, Any]) -> list[go.Bar]:
    """One trace a kind of bar, so that the legend names each once."""
    looks: list[tuple[str, str, tuple[str, ...], int]] = [
        (lane, COLORS[lane], ("span", "around"), i) for i, lane in enumerate(model["lanes"])
    ]
    looks.append(("host waits, inside the step", WAIT, ("wait",), 0))
    looks.append(("host fetches an output, outside the step", WAIT, ("fetch",), 0))
    traces = []
    for name, color, kinds, lane in looks:
        bars = [
            (i, bar)
            for i, runner in enumerate(model["runners"])
            for bar in runner["bars"]
            if bar[5] in kinds and bar[0] == lane
        ]
        if not bars:
            continue
        colors = [color if bar[4] == model["step"] else PALE[color] for _, bar in bars]
        hollow = {"color": "#ffffff", "line": {"color": colors, "width": 1.5}}
        traces.append(go.Bar(
            name=name, orientation="h", base=[bar[2] for _, bar in bars], x=[bar[3] for _, bar in bars],
            y=[_lane(i, bar[0]) for i, bar in bars], width=[0.82 - 0.24 * min(bar[6], 2) for _, bar in bars],
            marker=hollow if "fetch" in kinds else {"color": colors},
            text=["" if bar[5] == "around" else escape(bar[1]) for _, bar in bars],
            textposition="inside", insidetextanchor="middle", textangle=0, textfont={"size": 10, "color": INK},
            hoverinfo="text", hovertext=[_said(model["runners"][i]["title"], name, bar) for i, bar in bars],
        ))  # fmt: skip
    return [*traces, *_bubbles(model)]


def _bubbles(model: dict[str, Any]) -> list[go.Bar]:
    gaps = [(i, gap) for i, runner in enumerate(model["runners"]) for gap in runner["bubbles"]]
    if not gaps:
        return []
    return [go.Bar(
        name="bubble: the device idles", orientation="h", width=0.82, hoverinfo="text",
        base=[gap[0] for _, gap in gaps], x=[gap[1] for _, gap in gaps], y=[_lane(i, 1) for i, _ in gaps],
        marker={"color": "rgba(0,0,0,0)", "pattern": {"shape": "/", "fgcolor": WAIT, "size": 6, "solidity": 0.2}},
        hovertext=[f"{model['runners'][i]['title']}: the device idles {gap[1]:.2f} ms" for i, gap in gaps],
    )]  # fmt: skip


def _said(runner: str, kind: str, bar: list[Any]) -> str:
    _, name, begin, length, step, *_ = bar
    return f"{runner} step {step}: {escape(name)}<br>{kind}, {length:.3f} ms ({begin:.3f} to {begin + length:.3f})"


def _frame(chart: go.Figure, runner: dict[str, Any], cursor: int, index: int) -> None:
    """The heading of a runner, the begin of each of its steps, and the places of pauses."""
    top, bottom = index * GROUP + 1.0, _lane(index, 2) + 0.5
    chart.add_annotation(
        text=f"<b>{runner['title']}</b>  {runner['summary']}", x=0, xref="paper", xanchor="left",
        y=index * GROUP + 0.42, showarrow=False, font={"size": 12},
    )  # fmt: skip
    for step, begin, _ in runner["steps"]:
        strong = step == cursor
        chart.add_shape(
            type="line", x0=begin, x1=begin, y0=top - 0.15, y1=bottom, layer="below",
            line={"color": INK if strong else "#d0d0d0", "width": 1.2 if strong else 1},
        )  # fmt: skip
        chart.add_annotation(
            text=f"<b>{step}</b>" if strong else str(step), x=begin, y=top - 0.05, showarrow=False, xanchor="left",
            xshift=1, font={"size": 10, "color": INK if strong else FAINT},
        )  # fmt: skip
    for at, length in runner["pauses"]:
        if at >= 0:
            line = {"color": FAINT, "width": 2, "dash": "dot"}
            chart.add_shape(type="line", x0=at, x1=at, y0=top, y1=bottom, line=line)
            chart.add_annotation(
                text="paused", x=at, y=bottom + 0.2, showarrow=False, font={"size": 9, "color": FAINT},
                hovertext=f"{length:.1f} ms taken out: the session stood still",
            )  # fmt: skip

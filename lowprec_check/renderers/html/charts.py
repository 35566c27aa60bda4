"""The two charts as Bokeh figures without data: the page's script fills them with the run that is chosen.

Bokeh, for it brings its own JavaScript (1.3 MB, inlined), draws 20,000 points on a canvas, and needs no network.
"""

from __future__ import annotations

import json
import re
from typing import Any

from lowprec_check.errors import UsageError

try:
    from bokeh.embed import json_item
    from bokeh.models import (
        BoxAnnotation,
        ColumnDataSource,
        CrosshairTool,
        HoverTool,
        Label,
        Range1d,
        Span,
        WheelZoomTool,
    )
    from bokeh.plotting import figure
    from bokeh.resources import INLINE
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "bokeh":
        raise
    raise UsageError(
        "An HTML report needs Bokeh, which is not installed.", "pip install 'lowprec-check[report]'"
    ) from None

_PLOT: dict[str, Any] = {
    "sizing_mode": "stretch_width",
    "y_axis_type": "log",
    "tools": "xpan,xbox_zoom,reset",
    "toolbar_location": "above",
}

_SHADE = {"other": 0.07, "subnormals": 0.09}

_PLACE = [("module", "@module"), ("line", "@source"), ("dtypes", "@dtypes"), ("shape", "@shape")]

_TIP = (
    "margin:-5px;padding:6px 10px;max-width:min(34rem,80vw);overflow-wrap:anywhere;white-space:normal;"
    "background:var(--panel);color:var(--ink);border:1px solid var(--line);font:12.5px/1.5 system-ui,sans-serif"
)
"""Of a tooltip: it lives in a shadow tree, where the page's colours arrive as variables only."""


def bokeh_script() -> str:
    """Bokeh's own JavaScript, the part that draws plots."""
    return str(INLINE.js_raw[0])


def error_chart() -> dict[str, Any]:
    """Error along the network: x is the op call, y is rel_l2."""
    plot = _figure(360, "op call, in the order of the run", "relative error (rel_l2)")
    accumulated, local, marks = (_source("accumulated"), _source("local"), _source("marks"))
    plot.add_layout(BoxAnnotation(left=0, right=0, fill_alpha=0.22, line_width=2, line_alpha=0.9, name="born"))
    plot.add_layout(Span(location=1, dimension="width", line_dash="dashed", line_width=1.5, name="tolerance"))
    plot.add_layout(Span(location=1, dimension="height", line_width=1, visible=False, name="cursor"))
    plot.add_layout(_label("tolerance-label"))
    plot.add_layout(_label("born-label", text_font_style="bold"))
    dots: dict[str, Any] = {"x": "x", "y": "y", "line_color": None}
    near = plot.scatter(source=local, size=5, fill_alpha=0.55, name="local-dots", **dots)
    plot.line(x="x", y="y", source=accumulated, line_width=2, name="accumulated-line")
    far = plot.scatter(source=accumulated, size=5, name="accumulated-dots", **dots)
    cross = plot.scatter(
        x="x",
        y="y",
        source=marks,
        size=11,
        line_width=2,
        marker="marker",
        name="marks-dots",
    )
    tip = _tip("@index: @op", *_PLACE, ("local", "@local_text"), ("accumulated", "@accumulated_text"))
    plot.add_tools(HoverTool(renderers=[far, near, cross], tooltips=tip, limit=1, point_policy="snap_to_data"))
    return _item(plot)


def range_chart() -> dict[str, Any]:
    """Where values sit: x is the module, y the magnitude, between the limits of the dtype."""
    plot = _figure(380, "module, in the order of the run", "magnitude of values")
    ranges = _source("ranges")
    for name in ("other", "below", "subnormals", "above"):
        plot.add_layout(BoxAnnotation(fill_alpha=_SHADE.get(name, 0.16), line_width=0, name=name))
    for name in ("subnormal", "normal", "max"):
        plot.add_layout(Span(location=1, dimension="width", line_dash="dashed", line_width=1.5, name=name))
    for name in ("subnormal", "normal", "max", "other"):
        plot.add_layout(_label(f"{name}-label", **({"y_offset": -17} if name == "max" else {})))
    bars = plot.vbar(x="x", bottom="low", top="high", width=0.7, source=ranges, line_width=1, name="bars")
    plot.vbar(x="x", bottom="low", top="high", width=0.7, source=_source("overflows"), line_width=1, name="over")
    plot.scatter(x="x", y="high", size=6, source=ranges, name="tops")
    figures = [
        ("largest", "@high_text"),
        ("typical (rms), the smallest", "@low_text"),
        ("flushed to zero", "@flushed_text"),
    ]
    tip = _tip("@module", *figures, ("op calls", "@calls"))
    plot.add_tools(HoverTool(renderers=[bars], tooltips=tip, limit=1, mode="vline", point_policy="snap_to_data"))
    return _item(plot)


def _tip(title: str, *fields: tuple[str, str]) -> str:
    """A template; Bokeh puts the values in as text."""
    lines = "".join(f'<div><span style="color:var(--dim)">{name}</span> {value}</div>' for name, value in fields)
    return f'<div style="{_TIP}"><b>{title}</b>{lines}<div style="color:var(--bad)">@note</div></div>'


def _figure(height: int, x_label: str, y_label: str) -> Any:
    plot: Any = figure(
        height=height,
        x_axis_label=x_label,
        y_axis_label=y_label,
        x_range=Range1d(0, 1),
        y_range=Range1d(1e-9, 1),
        **_PLOT,
    )
    zoom = WheelZoomTool(dimensions="width", modifiers={"ctrl": True})  # a bare wheel scrolls the page
    plot.add_tools(zoom, CrosshairTool(dimensions="height", line_alpha=0.4))
    plot.toolbar.logo = None
    plot.background_fill_color = plot.border_fill_color = plot.outline_line_color = None
    plot.lod_threshold = 4000
    plot.xgrid.visible = False
    plot.axis.axis_label_text_font_style = "normal"
    plot.axis.minor_tick_line_color = None
    plot.axis.axis_label_text_font_size = plot.axis.major_label_text_font_size = "12px"
    plot.xaxis.ticker.name = "ticker"
    return plot


def _source(name: str) -> ColumnDataSource:
    columns = ("x", "y", "low", "high", "index", "op", "module", "source", "dtypes", "shape", "marker", "note", "calls")
    texts = ("local_text", "accumulated_text", "high_text", "low_text", "flushed_text")
    return ColumnDataSource({column: [] for column in (*columns, *texts)}, name=name)


def _label(name: str, **style: Any) -> Label:
    offsets = {"x_offset": 4, "y_offset": 3}
    return Label(x=0, y=1, text="", text_font_size="12px", name=name, **(offsets | style))


def _item(plot: Any) -> dict[str, Any]:
    """The figure as JSON; its ids count from 1, so that equal results make equal files."""
    numbers: dict[str, str] = {}
    text = re.sub(
        r'"p\d+"', lambda match: numbers.setdefault(match[0], f'"p{len(numbers) + 1}"'), json.dumps(json_item(plot))
    )
    return dict(json.loads(text))

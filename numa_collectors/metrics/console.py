"""What the run says while it goes: a live panel on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO

from numa_collectors.metrics.hub import LogPoint, WorkerView

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.console import RenderableType

__all__ = ["Console", "ConsolePanel", "PlainConsole", "QuietConsole", "duration_text", "make_console"]

ConsoleMode = Literal["auto", "panel", "plain", "quiet"]


class Console(Protocol):
    """Shows log points; ``close`` may be called twice and from a signal's way out."""

    def update(self, point: LogPoint) -> None:
        """Show ``point``."""

    def message(self, text: str) -> None:
        """Show one line that stays."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def make_console(mode: ConsoleMode = "auto", stream: TextIO | None = None, title: str = "numa_collectors") -> Console:
    """Return the console of ``mode``; ``auto`` is the panel where ``stream`` (None: standard output) is a terminal."""
    stream = sys.stdout if stream is None else stream
    if mode == "quiet":
        return QuietConsole()
    if mode == "panel" or (mode == "auto" and stream.isatty()):
        return ConsolePanel(stream, title)
    return PlainConsole(stream)


def duration_text(seconds: float | None) -> str:
    """Return ``1:02:03`` or ``2:03``; ``?`` where unknown."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _number(value: float | None, form: str = ",.0f", unit: str = "") -> str:
    return "-" if value is None else format(value, form) + unit


def progress_text(point: LogPoint) -> str:
    """Return steps done, of how many, and the time that is left."""
    if point.target_env_steps is None:
        return f"{point.step:,} steps, {duration_text(point.elapsed_s)}"
    share = 100 * min(1.0, point.step / point.target_env_steps)
    left = f"{duration_text(point.elapsed_s)} gone, {duration_text(point.eta_s)} left"
    return f"{share:3.0f} %  {point.step:,} of {point.target_env_steps:,} steps, {left}"


class QuietConsole:
    """Shows nothing."""

    def update(self, point: LogPoint) -> None:
        """Show nothing."""

    def message(self, text: str) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Nothing is held."""


class PlainConsole:
    """One line a log point, and one more when the bottleneck changes: fit for a log file."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._kind: str | None = None

    def update(self, point: LogPoint) -> None:
        """Write the line of ``point``."""
        scalars = point.scalars
        parts = [
            progress_text(point),
            f"{_number(scalars.get('perf/env_steps_per_s'))} steps/s",
            f"{_number(scalars.get('perf/updates_per_s'), ',.1f')} updates/s",
            f"learn {_number(scalars.get('perf/learn_pct'))} %",
            f"lag {_number(scalars.get('async/policy_lag'), '.1f')} max {_number(scalars.get('lag/max'))}",
            f"fill {_number(scalars.get('async/ring_fill'), '.0%')}",
        ]
        if "rollout/mean_return" in scalars:
            parts.append(f"return {scalars['rollout/mean_return']:.2f}")
        self.message(" | ".join(parts))
        if point.bottleneck.kind != self._kind:
            self._kind = point.bottleneck.kind
            self.message(f"bottleneck: {point.bottleneck.text}")

    def message(self, text: str) -> None:
        """Write one line."""
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        """The stream is the caller's."""


class ConsolePanel:
    """A live panel; it redraws only when updated, from the caller's thread."""

    def __init__(self, stream: TextIO | None = None, title: str = "numa_collectors") -> None:
        from rich.console import Console as RichConsole
        from rich.live import Live

        self._title = title
        self._rich: RichConsole = RichConsole(file=stream)
        self._live: Live | None = Live(
            console=self._rich, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()

    def update(self, point: LogPoint) -> None:
        """Redraw for ``point``."""
        if self._live is not None:
            self._live.update(render_panel(point, self._title), refresh=True)

    def message(self, text: str) -> None:
        """Print one line above the panel."""
        self._rich.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the last panel standing and give the cursor back."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()


def render_panel(point: LogPoint, title: str = "numa_collectors") -> RenderableType:
    """Return the panel of ``point``: progress, rates, a row for each collector, and the bottleneck."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = [Text(progress_text(point))]
    if point.target_env_steps is not None:
        bar = Table.grid(expand=True)  # a bar by itself ends no line
        bar.add_row(ProgressBar(total=point.target_env_steps, completed=min(point.step, point.target_env_steps)))
        parts.append(bar)
    parts += [_rates_table(point), _collectors_table(point.collectors)]
    parts.append(
        Text(point.bottleneck.text, style="bold yellow" if point.bottleneck.kind != "balanced" else "bold green")
    )
    return Panel(Group(*parts), title=Text(title), expand=True)


def _rates_table(point: LogPoint) -> Any:
    from rich.table import Table

    scalars = point.scalars
    rows = [
        (
            "env steps/s",
            _number(scalars.get("perf/env_steps_per_s")),
            "return",
            _number(scalars.get("rollout/mean_return"), ".2f"),
        ),
        (
            "updates/s",
            _number(scalars.get("perf/updates_per_s"), ",.1f"),
            "length",
            _number(scalars.get("rollout/mean_ep_len"), ".1f"),
        ),
        ("updating", _number(scalars.get("perf/learn_pct"), ".0f", " %"), "updates", f"{point.updates:,}"),
        (
            "waiting for data",
            _number(scalars.get("wait/data_pct"), ".0f", " %"),
            "version",
            _number(scalars.get("async/weight_version")),
        ),
        (
            "publish",
            _number(scalars.get("transport/publish_ms"), ".2f", " ms"),
            "updates/step",
            _number(scalars.get("async/utd"), ".4g"),
        ),
    ]
    table = Table.grid(padding=(0, 2), expand=False)
    for _ in range(4):
        table.add_column()
    for row in rows:
        table.add_row(*row)
    return table


def _collectors_table(collectors: tuple[WorkerView, ...]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(expand=True, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in ("collector", "steps/s", "lag", "max", "ring", "waits", "gen"):
        table.add_column(column, justify="left" if column == "collector" else "right", no_wrap=True)
    table.add_column("placement", overflow="fold")
    for view in collectors:
        lag = view.lag
        table.add_row(
            Text(view.name),
            _number(view.env_steps_per_s),
            _number(None if lag is None else lag.mean, ".1f"),
            _number(None if lag is None else lag.max),
            _number(view.ring_fill, ".0%"),
            _number(view.wait_space_pct, ".0f", "%"),
            str(view.generation),
            Text(view.placement),
        )
    return table

"""A picture of a machine: packages, nodes, L3 groups, cores and CPUs, memory, GPUs, and who sits where.

The text is a self-contained SVG document without scripts or fonts of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Protocol, cast

from numa_collectors._cpulist import format_cpulist
from numa_collectors.topo.model import Core, Device, Node, Topology
from numa_collectors.topo.text import format_size, summary

__all__ = ["render_svg"]

_FONT = "font-family='system-ui, Segoe UI, Helvetica, Arial, sans-serif'"
_INK, _MUTED, _LINE, _PAPER = "#1f2933", "#627284", "#c5ced8", "#f4f6f8"
_LEARNER = "#27348b"
# Light enough for dark text, told apart by hue first and by lightness where hues return.
_PALETTE = (
    "#8ecae6", "#ffd166", "#95d5b2", "#f4a6a0", "#cdb4db", "#f7b267", "#a0e0d8", "#d4d98c",
    "#b8c0ff", "#f5b5d0", "#c9ada7", "#9bf0a5", "#e0aaff", "#ffe5a0", "#7fb7be", "#e6b89c",
)  # fmt: skip
_CPU_WIDTH, _CPU_HEIGHT, _GAP = 27, 17, 3
_SMALL_WIDTH, _SMALL_HEIGHT = 9, 7
_MAX_LABELLED_CPUS = 1024
_CORES_A_ROW = 8
_PAD = 12
_TARGET_WIDTH = 1280
_SHOWN_KINDS = ("gpu", "accelerator", "nic")
_MAX_HEAT_MAP = 16
_MAX_LEGEND = 64
_DEVICE_HEIGHT = 24


class _Worker(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def cpus(self) -> tuple[int, ...] | None: ...
    @property
    def node(self) -> int | None: ...


class _Placement(Protocol):
    @property
    def workers(self) -> tuple[_Worker, ...]: ...


@dataclass(frozen=True, slots=True)
class _Box:
    """A drawn piece with its size; its elements are relative to its own corner."""

    width: float
    height: float
    body: str

    def at(self, x: float, y: float) -> str:
        return f"<g transform='translate({x:g} {y:g})'>{self.body}</g>\n"


@dataclass(frozen=True, slots=True)
class _Style:
    """How CPUs look: fill and text by CPU for those that have an owner, sizes, and which may be used at all."""

    owners: dict[int, list[str]]
    colours: dict[str, str]
    allowed: frozenset[int]
    cpu_width: int
    cpu_height: int
    labelled: bool


def render_svg(topology: Topology, placement: object = None) -> str:
    """Return the picture; ``placement`` is anything whose ``workers`` have a name, CPUs and a node."""
    workers = cast("_Placement", placement).workers if placement is not None else ()
    style = _style(topology, workers)
    shown = [node for node in topology.nodes if node.kind != "empty"]
    cards = [_node_card(topology, node, style) for node in shown]
    blocks = [_title(topology), *_packages(topology, shown, cards)]
    empty = format_cpulist(node.id for node in topology.nodes if node.kind == "empty")
    if empty:
        text = f"empty nodes {_short(empty, 100)}: no CPUs, no memory"
        blocks.append(_Box(_text_width(text), 16, _text(0, 12, text, 12, _MUTED)))
    unplaced = [device for device in topology.devices if device.node is None and device.kind in _SHOWN_KINDS]
    if unplaced:
        blocks.append(_device_row("node unknown to the kernel", unplaced))
    if topology.distances is not None and 1 < len(topology.distances.nodes) <= _MAX_HEAT_MAP:
        blocks.append(_heat_map(topology))
    blocks.append(_legend(workers, style))
    width = max(block.width for block in blocks) + 2 * _PAD
    y, body = float(_PAD), ""
    for block in blocks:
        body += block.at(_PAD, y)
        y += block.height + _PAD
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:g} {y:g}' width='{width:g}' height='{y:g}' {_FONT}>\n"
        f"<title>{escape(summary(topology))}</title>\n"
        "<defs><pattern id='off' width='5' height='5' patternUnits='userSpaceOnUse' patternTransform='rotate(45)'>"
        "<rect width='5' height='5' fill='#e9edf1'/><line x1='0' y1='0' x2='0' y2='5' stroke='#c9d1da' stroke-width='2'/>"
        f"</pattern></defs>\n<rect width='100%' height='100%' fill='#ffffff'/>\n{body}</svg>\n"
    )


def _style(topology: Topology, workers: Sequence[_Worker]) -> _Style:
    owners: dict[int, list[str]] = {}
    colours: dict[str, str] = {}
    for worker in workers:
        number = len([name for name in colours if name != "learner"])
        colours[worker.name] = _LEARNER if worker.name == "learner" else _PALETTE[number % len(_PALETTE)]
        for cpu in worker.cpus or ():
            owners.setdefault(cpu, []).append(worker.name)
    labelled = len(topology.online) <= _MAX_LABELLED_CPUS
    size = (_CPU_WIDTH, _CPU_HEIGHT) if labelled else (_SMALL_WIDTH, _SMALL_HEIGHT)
    return _Style(owners, colours, frozenset(topology.allowed), *size, labelled)


def _text(x: float, y: float, text: str, size: float = 12, fill: str = _INK, extra: str = "") -> str:
    return f"<text x='{x:g}' y='{y:g}' font-size='{size:g}' fill='{fill}' {extra}>{escape(text)}</text>"


def _rect(x: float, y: float, width: float, height: float, fill: str, stroke: str = "none", radius: float = 3) -> str:
    return f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='{radius:g}' fill='{fill}' stroke='{stroke}'/>"


def _text_width(text: str, size: float = 12) -> float:
    return len(text) * size * 0.58


def _title(topology: Topology) -> _Box:
    limits = [f"allowed CPUs {_short(format_cpulist(topology.allowed))}"]
    if topology.cpu_budget < len(topology.allowed):
        limits.append(f"budget {topology.cpu_budget} CPUs (quota)")
    if topology.offline:
        limits.append(f"offline CPUs {_short(format_cpulist(topology.offline))}")
    head, note = summary(topology), "  ·  ".join(limits)
    body = _text(0, 20, head, 19, extra="font-weight='600'") + _text(0, 40, note, 12, _MUTED)
    return _Box(max(_text_width(head, 19), _text_width(note)), 46, body)


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _core(core: Core, style: _Style) -> _Box:
    width, height = style.cpu_width, style.cpu_height
    body = ""
    for row, cpu in enumerate(core.cpus):
        names = style.owners.get(cpu, [])
        usable = cpu in style.allowed
        fill = style.colours[names[0]] if names else "#ffffff" if usable else "url(#off)"
        stroke = "#3d4b5a" if core.kind == "performance" else _LINE
        ink = "#ffffff" if names and names[0] == "learner" else _INK if usable else "#94a1ae"
        label = (
            _text(width / 2, row * height + height - 5, str(cpu), 10, ink, "text-anchor='middle'")
            if style.labelled
            else ""
        )
        hint = f"CPU {cpu}: {', '.join(names) if names else 'free' if usable else 'not allowed'}"
        cell = _rect(0, row * height, width, height, fill, stroke, 2)
        body += f"<g><title>{escape(hint)}</title>{cell}{label}</g>"
    return _Box(width, height * len(core.cpus), body)


def _grid(boxes: Sequence[_Box], columns: int, gap: float) -> _Box:
    """Lay boxes out row by row."""
    x = y = row_height = width = 0.0
    body = ""
    for index, box in enumerate(boxes):
        if index and index % columns == 0:
            x, y, row_height = 0.0, y + row_height + gap, 0.0
        body += box.at(x, y)
        x += box.width + gap
        width, row_height = max(width, x - gap), max(row_height, box.height)
    return _Box(width, y + row_height, body)


def _l3_box(cores: Sequence[Core], style: _Style, has_cache: bool) -> _Box:
    grid = _grid([_core(core, style) for core in cores], _CORES_A_ROW, _GAP)
    width, height = grid.width + 12, grid.height + (26 if has_cache else 12)
    dashes = "" if has_cache else " stroke-dasharray='3 3'"
    frame = f"<rect width='{width:g}' height='{height:g}' rx='5' fill='#eef3f8' stroke='{_LINE}'{dashes}/>"
    label = _text(7, height - 7, "L3", 10, _MUTED) if has_cache else ""
    return _Box(width, height, frame + grid.at(6, 6) + label)


def _node_card(topology: Topology, node: Node, style: _Style) -> _Box:
    own = set(node.cpus)
    cores = [core for core in topology.cores if own.intersection(core.cpus)]
    group_of = {cpu: index for index, group in enumerate(topology.l3) for cpu in group.cpus}
    groups: dict[int, list[Core]] = {}
    for core in cores:
        groups.setdefault(group_of.get(core.cpus[0], -1), []).append(core)
    boxes = [_l3_box(members, style, number >= 0) for number, members in groups.items()]
    columns = 1 if len(boxes) <= 2 else 2 if len(boxes) <= 8 else 4
    grid = _grid(boxes, columns, 8)
    devices = [device for device in topology.devices if device.node == node.id and device.kind in _SHOWN_KINDS]
    width = max(grid.width, 190.0)
    head = f"node {node.id}" + ("" if node.kind == "normal" else f" · {node.kind}")
    body, y = _text(_PAD, 24, head, 14, extra="font-weight='600'"), 34.0
    if node.memory_bytes:
        body += _memory_bar(_PAD, y, width, node)
        y += 26
    if boxes:
        body += grid.at(_PAD, y)
        y += grid.height + 8
    for device in devices:
        body += _device_chip(device, width).at(_PAD, y)
        y += _DEVICE_HEIGHT + 4
    fill = "#ffffff" if node.kind == "normal" else "#fffaf0" if node.kind in ("memory-only", "device") else _PAPER
    total, height = width + 2 * _PAD, y + 6
    return _Box(total, height, _rect(0.5, 0.5, total - 1, height - 1, fill, "#9fb0c0", 8) + body)


def _memory_bar(x: float, y: float, width: float, node: Node) -> str:
    used = 1 - (node.free_bytes + node.reclaimable_bytes) / node.memory_bytes
    text = f"{format_size(node.memory_bytes)}, {format_size(node.free_bytes + node.reclaimable_bytes)} available"
    bar = _rect(x, y, width, 18, "#e4f0ea", "#b9d3c6")
    share = max(0.0, min(1.0, used)) * width
    return bar + _rect(x, y, share, 18, "#b5d6c5") + _text(x + 6, y + 13, text, 11)


def _device_chip(device: Device, width: float) -> _Box:
    fill, stroke = ("#e6f4d7", "#76b900") if device.kind == "gpu" else ("#eceff3", _LINE)
    label = f"{device.kind.upper()} {device.pci}" + (f"  {device.model}" if device.model else "")
    label = _short(label, max(20, int(width / 6.2)))
    return _Box(
        width, _DEVICE_HEIGHT, _rect(0.5, 0.5, width - 1, _DEVICE_HEIGHT - 1, fill, stroke, 5) + _text(8, 16, label, 11)
    )


def _device_row(title: str, devices: Sequence[Device]) -> _Box:
    chips = _grid([_device_chip(device, 240) for device in devices], 5, 6)
    return _Box(max(chips.width, 200), chips.height + 22, _text(0, 12, title, 12, _MUTED) + chips.at(0, 20))


def _packages(topology: Topology, nodes: Sequence[Node], cards: Sequence[_Box]) -> list[_Box]:
    """Put the cards of each package's nodes into a frame; nodes that belong to no single package stand below."""
    members: dict[int | None, list[_Box]] = {index: [] for index in range(len(topology.packages))}
    members[None] = []
    for node, card in zip(nodes, cards, strict=True):
        home = next((i for i, package in enumerate(topology.packages) if set(node.cpus) & set(package.cpus)), None)
        members[home].append(card)
    blocks = []
    for index, own in members.items():
        if not own:
            continue
        columns = max(1, int((_TARGET_WIDTH - 2 * _PAD) // (max(card.width for card in own) + _PAD)))
        grid = _grid(own, columns, _PAD)
        if index is None:
            blocks.append(grid)
            continue
        number = topology.packages[index].id
        title = _text(_PAD, 22, "package" if number is None else f"package {number}", 13, _MUTED)
        width, height = grid.width + 2 * _PAD, grid.height + 32 + _PAD
        blocks.append(
            _Box(width, height, _rect(0, 0, width, height, _PAPER, "#dde3e9", 10) + title + grid.at(_PAD, 32))
        )
    return _side_by_side(blocks)


def _side_by_side(blocks: Sequence[_Box]) -> list[_Box]:
    """Put small blocks on one line as long as they fit."""
    lines: list[list[_Box]] = []
    for block in blocks:
        if lines and sum(box.width + _PAD for box in lines[-1]) + block.width <= _TARGET_WIDTH:
            lines[-1].append(block)
        else:
            lines.append([block])
    return [_grid(line, len(line), _PAD) for line in lines]


def _heat_map(topology: Topology) -> _Box:
    assert topology.distances is not None
    nodes, matrix = topology.distances.nodes, topology.distances.matrix
    largest = max(value for row in matrix for value in row)
    cell_width, cell_height = 34, 20
    body = _text(0, 12, "distance from node (row) to node (column)", 12, _MUTED)
    for column, node in enumerate(nodes):
        body += _text(34 + column * cell_width + cell_width / 2, 32, str(node), 11, _MUTED, "text-anchor='middle'")
    for index, node in enumerate(nodes):
        y = 38 + index * cell_height
        body += _text(26, y + 14, str(node), 11, _MUTED, "text-anchor='end'")
        for column, value in enumerate(matrix[index]):
            heat = (value - 10) / max(1, largest - 10)
            x = 34 + column * cell_width
            body += _rect(
                x, y, cell_width - 2, cell_height - 2, f"hsl({205 - 185 * heat:.0f} 65% {92 - 18 * heat:.0f}%)"
            )
            body += _text(x + cell_width / 2 - 1, y + 14, str(value), 11, _INK, "text-anchor='middle'")
    return _Box(max(300, 34 + len(nodes) * cell_width), 40 + len(nodes) * cell_height, body)


def _legend(workers: Sequence[_Worker], style: _Style) -> _Box:
    entries = []
    for worker in workers[:_MAX_LEGEND]:
        where = "unbound" if worker.cpus is None else f"node {worker.node}, CPUs: {len(worker.cpus)}"
        entries.append((style.colours[worker.name] if worker.cpus else "#ffffff", f"{worker.name} · {where}"))
    if len(workers) > _MAX_LEGEND:
        entries.append(("#ffffff", f"and {len(workers) - _MAX_LEGEND} more"))
    entries += [("#ffffff", "free CPU" if workers else "CPU"), ("url(#off)", "not allowed")]
    boxes = [
        _Box(215, 18, _rect(0.5, 1.5, 22, 15, fill, "#9fb0c0", 3) + _text(30, 13, text, 11.5)) for fill, text in entries
    ]
    return _grid(boxes, 5, 6)

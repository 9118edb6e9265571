"""``python -m numa_collectors.topo``: see a machine, what a plan would do on it, and where a process really is."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from numa_collectors._cpulist import parse_cpulist
from numa_collectors.errors import NumaCollectorsError
from numa_collectors.topo.advice import Advice, advise
from numa_collectors.topo.model import Topology

EXIT_OK, EXIT_USAGE, EXIT_ADVICE = 0, 2, 3
# As a shell says that there is no such command.
EXIT_NO_COMMAND = 127


class _UsageError(Exception):
    """One line for the user; exit code 2."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m numa_collectors.topo",
        description="Show this machine's NUMA topology, plan a run on it, or verify where a process is.",
        epilog="exit codes: 0 nothing to advise, 3 advice was given (or --verify found drift), 2 wrong usage",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--root", metavar="DIR", help="read the machine below DIR instead of / (a sysfs snapshot)")
    source.add_argument(
        "--load", metavar="FILE", help="show a machine that was dumped with --dump ('-' is standard input)"
    )
    parser.add_argument("--dump", metavar="FILE", help="write the machine as JSON to FILE, for --load elsewhere")
    parser.add_argument("--json", action="store_true", help="print JSON: the machine, the plan and the advice")
    parser.add_argument("--svg", metavar="FILE", help="draw the machine, and the plan if there is one, to FILE")
    parser.add_argument("--verify", metavar="PID", help="show a process's threads, masks, policies and pages by node")
    plan = parser.add_argument_group("plan")
    plan.add_argument("--plan", metavar="N", help="show where N collectors and the learner would go, and why")
    plan.add_argument("--near", metavar="gpu:K", help="put the learner near GPU K, as CUDA counts the visible ones")
    plan.add_argument("--nodes", metavar="LIST", help="nodes for collectors, such as 0-1 (collector i gets the i-th)")
    plan.add_argument("--cpus-per-collector", metavar="C", help="logical CPUs for each collector")
    plan.add_argument("--learner-cpus", metavar="C", help="logical CPUs for the learner")
    plan.add_argument("--oversubscribe", action="store_true", help="let collectors share CPUs where there are too few")
    act = parser.add_argument_group("act")
    act.add_argument(
        "--exec",
        action="store_true",
        help="become the command after --, bound: topo --exec [--near gpu:K | --node N | --cpus LIST] -- command ...",
    )
    act.add_argument("--node", metavar="N", help="with --exec: CPUs and memory of node N")
    act.add_argument(
        "--cpus", metavar="LIST", help="with --exec: these CPUs, such as 0-3,8, and the memory of their nodes"
    )
    act.add_argument(
        "--policy",
        choices=("preferred", "bind", "interleave", "local", "none"),
        help="with --exec: the memory policy (default preferred)",
    )
    act.add_argument("--require", action="store_true", help="with --exec: fail where the binding cannot be had in full")
    act.add_argument(
        "--bench", action="store_true", help="measure local and remote memory, and say what binding can win"
    )
    parser.add_argument("command", nargs="*", metavar="-- command ...", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.command and not arguments.exec:
        parser.error(f"unrecognized arguments: {' '.join(arguments.command)}")
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has seen enough.  What is still buffered goes nowhere, so that exit does not fail
        # too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except (_UsageError, NumaCollectorsError) as error:
        print(f"{build_parser().prog}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:
        print(f"{build_parser().prog}: {error.filename}: {error.strerror}", file=sys.stderr)
        return EXIT_NO_COMMAND if arguments.exec else EXIT_USAGE
    return code


def _run(arguments: argparse.Namespace) -> int:
    is_live = arguments.load is None and arguments.root is None
    topology = _topology(arguments)
    # Another machine's GPUs are numbered without regard to this shell's CUDA_VISIBLE_DEVICES.
    env: Mapping[str, str] = os.environ if is_live else {}
    if arguments.dump:
        with open(arguments.dump, "w", encoding="utf-8") as file:
            file.write(topology.to_json())
    if arguments.verify is not None:
        return _verify(arguments, topology)
    if arguments.exec or arguments.bench:
        return _act(arguments, topology, is_live)
    if arguments.node or arguments.cpus or arguments.policy or arguments.require:
        raise _UsageError("--node, --cpus, --policy and --require need --exec")
    placement = _placement(arguments, topology, env)
    if arguments.svg:
        with open(arguments.svg, "w", encoding="utf-8") as file:
            file.write(topology.to_svg(placement))
    advice = (*advise(topology, env), *(_live_advice(topology) if is_live else ()))
    if arguments.json:
        print(_json(topology, placement, advice))
    else:
        _print_text(topology, env, placement, advice)
    return EXIT_OK if all(item.is_note for item in advice) else EXIT_ADVICE


def _topology(arguments: argparse.Namespace) -> Topology:
    if arguments.load is None:
        return Topology.discover("/" if arguments.root is None else arguments.root)
    if arguments.load == "-":
        return Topology.from_json(sys.stdin.read())
    with open(arguments.load, encoding="utf-8", errors="replace") as file:
        return Topology.from_json(file.read())


def _number(name: str, text: str | None, least: int) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise _UsageError(f"{name}: expected a number of at least {least}, got {text!r}")
    return int(text)


def _cpulist(name: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return parse_cpulist(text)
    except ValueError as error:
        raise _UsageError(f"{name}: {error}") from None


def _gpu(text: str | None) -> int | None:
    if text is None:
        return None
    prefix, _, ordinal = text.partition(":")
    if prefix != "gpu":
        raise _UsageError(f"--near: expected gpu:K, got {text!r}")
    return _number("--near gpu:", ordinal, 0)


def _act(arguments: argparse.Namespace, topology: Topology, is_live: bool) -> int:
    """Run the benchmark, or become the command."""
    if not is_live:
        raise _UsageError("--exec and --bench act on this machine: leave out --root and --load")
    from numa_collectors import binding

    if arguments.bench:
        if arguments.exec:
            raise _UsageError("--exec and --bench: expected one of them")
        report = binding.bench(topology)
        print(json.dumps(report.to_dict()) if arguments.json else report)
        return EXIT_OK
    targets = {"--near": arguments.near, "--node": arguments.node, "--cpus": arguments.cpus}
    if sum(target is not None for target in targets.values()) != 1:
        raise _UsageError("--exec: expected one of --near gpu:K, --node N and --cpus LIST")
    if not arguments.command:
        raise _UsageError("--exec: expected a command after --")
    request = binding.request_for(
        topology,
        node=_number("--node", arguments.node, 0),
        cpus=_cpulist("--cpus", arguments.cpus),
        gpu=_gpu(arguments.near),
        policy=arguments.policy or "preferred",
        mode="require" if arguments.require else "auto",
    )
    binding.exec_bound(arguments.command, request)


def _placement(arguments: argparse.Namespace, topology: Topology, env: Mapping[str, str]) -> Any:
    number = _number("--plan", arguments.plan, 1)
    if number is None:
        if arguments.near or arguments.nodes or arguments.cpus_per_collector or arguments.learner_cpus:
            raise _UsageError("--near, --nodes, --cpus-per-collector and --learner-cpus need --plan N")
        return None
    from numa_collectors.placement import PlacementRequest, plan

    nodes = _cpulist("--nodes", arguments.nodes)
    request = PlacementRequest(
        num_collectors=number,
        numa_nodes="auto" if nodes is None else nodes,
        cpus_per_collector=_number("--cpus-per-collector", arguments.cpus_per_collector, 1),
        learner_gpu=_gpu(arguments.near),
        learner_cpus=_number("--learner-cpus", arguments.learner_cpus, 0),
        oversubscribe=arguments.oversubscribe,
    )
    return plan(topology, request, env)


def _live_advice(topology: Topology) -> tuple[Advice, ...]:
    from numa_collectors.topo.live import live_advice

    # The probe starts a thread and makes system calls; on one node its answer would change nothing.
    if not topology.is_numa:
        return live_advice(topology, "policy+cpu", None)
    from numa_collectors.binding import probe_ladder

    return live_advice(topology, probe_ladder(), None)


def _verify(arguments: argparse.Namespace, topology: Topology) -> int:
    from dataclasses import asdict

    from numa_collectors.topo.verify import verify_process

    pid = _number("--verify", arguments.verify, 1)
    assert pid is not None
    report = verify_process(topology, pid, "/" if arguments.root is None else arguments.root)
    print(json.dumps(asdict(report)) if arguments.json else report.render())
    return EXIT_ADVICE if report.findings else EXIT_OK


def _json(topology: Topology, placement: Any, advice: Sequence[Advice]) -> str:
    from dataclasses import asdict

    from numa_collectors.topo.serial import topology_to_dict

    data = topology_to_dict(topology)
    data["advice"] = [asdict(item) for item in advice]
    if placement is not None:
        data["plan"] = asdict(placement)
    return json.dumps(data)


def _print_text(topology: Topology, env: Mapping[str, str], placement: Any, advice: Sequence[Advice]) -> None:
    from numa_collectors.topo.text import render_advice, render_tree

    print(render_tree(topology, env))
    if placement is not None:
        print(f"\n{placement.explain()}")
    if advice:
        print(f"\n{render_advice(advice)}")


if __name__ == "__main__":
    sys.exit(main())

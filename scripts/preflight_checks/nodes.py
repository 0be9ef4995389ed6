"""Preflight over all nodes: each node checks itself, then all connect. The first node decides and reports."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from mimo.config.trainer import RunConfig
from preflight_checks.host import (
    Findings,
    check_gpus,
    check_mamba_kernels,
    check_open_files,
    check_read,
    check_space,
    check_transformer_engine,
    check_written,
)
from preflight_checks.reach import ENDED, MessageBoard, pairs_of, run_check
from preflight_checks.run_plan import checkpoints, has_mamba_layers, read_paths, written_paths

CONTINUE, PAIRS, READY, NOT_READY = "continue", "pairs", "ready", "not ready"
# Most problems that the report lists. The rest is counted.
MAX_LINES = 40


def check_nodes(board: MessageBoard, config: RunConfig, timeout_s: float) -> int:
    """Run all checks on this node, in step with the others.

    Returns:
        The exit code, which is the same on every node.

    Raises:
        ValueError: the first node is gone.
    """
    place, device = board.place, _device(config)
    nodes = list(range(len(place.hosts)))
    findings = check_host(config, device, place.gpus_per_node, len(nodes), timeout_s)
    board.post("host", asdict(findings))
    report = Report(board, device) if place.is_first else None
    # A check ends within twice its time limit, and one node may start it that much later than another. The other nodes
    # wait for as long as the first node may wait for all of them. If the first node is gone, they notice at once.
    patience_s, told_s = 4 * timeout_s, 16 * timeout_s
    verdict = report.hosts(timeout_s) if report else board.ask_first("after host", told_s)
    for topic, group in (("node", [place.node]), ("all", nodes)):
        if verdict == CONTINUE:
            run_check(board, topic, group, device, timeout_s)
            verdict = report.check(topic, patience_s) if report else board.ask_first(f"after {topic}", told_s)
    if verdict == PAIRS:
        for turn in (0, 1):
            mine = [pair for pair in pairs_of(place, turn) if place.node in pair]
            for pair in mine:
                run_check(board, f"pairs {turn}", pair, device, timeout_s)
        verdict = report.pairs(patience_s) if report else board.ask_first("after pairs", told_s)
    if report:
        report.show(verdict)
    board.post("done", verdict)
    if place.is_first:
        # The store of the first node must live until the others have read the verdict.
        board.collect("done", [node for node in nodes if node not in report.silent] if report else nodes, timeout_s)
    return 0 if verdict == READY else 1


def check_host(config: RunConfig, device: str, gpus_per_node: int, num_nodes: int, timeout_s: float) -> Findings:
    findings = Findings()
    check_open_files(num_nodes * gpus_per_node, findings)
    if device == "cuda":
        check_gpus(gpus_per_node, findings)
        if config.model.transformer_impl == "transformer_engine":
            # The first node waits for `timeout_s`. Half of that leaves time for the other checks.
            check_transformer_engine(timeout_s / 2, findings)
        if has_mamba_layers(config):
            check_mamba_kernels(findings)
    check_read(read_paths(config), findings)
    check_written(written_paths(config), findings)
    wanted = checkpoints(config)
    if wanted is not None:
        check_space(Path(str(config.checkpoint.save)), wanted, findings)
    return findings


def _device(config: RunConfig) -> str:
    """Return the device of the checks. With `auto`, a run on nodes without working GPUs would go on without them."""
    return "cpu" if config.train.device == "cpu" else "cuda"


class Report:
    """Results and decisions of the first node.

    Attributes:
        silent: nodes that have not answered.
    """

    def __init__(self, board: MessageBoard, device: str) -> None:
        self.board, self._backend = board, "NCCL" if device == "cuda" else "gloo"
        self.hosts_of_job = board.place.hosts
        self.silent: set[int] = set()
        self.facts: list[str] = []
        self.problems: list[str] = []
        self.warnings: list[str] = []

    def hosts(self, timeout_s: float) -> str:
        """Collect what each node found on itself, and decide whether to continue."""
        count = len(self.hosts_of_job)
        found = self.board.collect("host", range(count), timeout_s)
        self.silent = set(range(count)) - found.keys()
        self.problems += [f"{self.hosts_of_job[node]}: has not answered in {timeout_s:g} s"
                          for node in sorted(self.silent)]
        self.facts.append(f"{count} nodes, {self.board.place.gpus_per_node} processes each"
                          if count > 1 else f"1 node, {self.board.place.gpus_per_node} processes")
        for kind, lines in (("facts", self.facts), ("problems", self.problems), ("warnings", self.warnings)):
            said: dict[str, list[str]] = {}
            for node, findings in sorted(found.items()):
                for line in findings[kind]:
                    said.setdefault(line, []).append(self.hosts_of_job[node])
            # A line that all nodes have, about a shared file system for example, appears once.
            lines += [line if len(names) == count else f"{_shortened(names)}: {line}" for line, names in said.items()]
        return self._decide("host", NOT_READY if self.problems else CONTINUE)

    def check(self, topic: str, timeout_s: float) -> str:
        """Collect the results of a check's all-reduces, and decide whether to continue."""
        count = len(self.hosts_of_job)
        found = self.board.collect(topic, range(count), timeout_s)
        where = f"{self._backend} in each node" if topic == "node" else f"{self._backend} over all nodes"
        reasons: dict[str, list[str]] = {}
        for node in range(count):
            said = found[node]["failed"].values() if node in found else [f"no result in {timeout_s:g} s"]
            for reason in dict.fromkeys(said):
                reasons.setdefault(reason, []).append(self.hosts_of_job[node])
        # A process that failed because another one did adds nothing.
        own = {reason: names for reason, names in reasons.items() if reason != ENDED} or reasons
        problems = [f"{_shortened(names)}: {where}: {reason}" for reason, names in own.items()]
        # A single process has no other to reach.
        if not problems and (topic == "all" or self.board.place.gpus_per_node > 1):
            slowest = min(found, key=lambda node: found[node]["bytes_per_s"])
            self.facts.append(f"{where}: {found[slowest]['bytes_per_s'] / 1e9:.1f} GB/s bus bandwidth"
                              + (f", slowest {self.hosts_of_job[slowest]}" if topic == "node" and count > 1 else ""))
        self.problems += problems
        if topic == "node" or count == 1:
            last = count == 1 and topic == "all"
            return self._decide(topic, NOT_READY if problems else READY if last else CONTINUE)
        return self._decide(topic, PAIRS if problems else READY)

    def pairs(self, timeout_s: float) -> str:
        """Collect which neighbours reach each other, and name nodes that no neighbour reaches."""
        works: dict[int, list[bool]] = {}
        for turn in (0, 1):
            groups = pairs_of(self.board.place, turn)
            found = self.board.collect(f"pairs {turn}", sorted({node for pair in groups for node in pair}), timeout_s)
            for pair in groups:
                well = all(node in found and not found[node]["failed"] for node in pair)
                for node in pair:
                    works.setdefault(node, []).append(well)
        cut_off = [self.hosts_of_job[node] for node in sorted(works) if not any(works[node])]
        if len(cut_off) == len(self.hosts_of_job):
            verdict = "no node reaches a neighbour: the network between nodes, or its settings"
        elif cut_off:
            verdict = f"suspected: {', '.join(cut_off)} (neither neighbour reaches it); the others reach a neighbour"
        else:
            verdict = "every node reaches a neighbour; more than two at a time fail"
        self.problems.insert(0, verdict)
        return self._decide("pairs", NOT_READY)

    def show(self, verdict: str) -> None:
        lines = [*(f"  {fact}" for fact in self.facts), *(f"  warning: {warning}" for warning in self.warnings),
                 *(f"  PROBLEM {problem}" for problem in self.problems[:MAX_LINES])]
        if len(self.problems) > MAX_LINES:
            lines.append(f"  ... and {len(self.problems) - MAX_LINES} more problems")
        print("\n".join(["preflight", *lines, f"preflight: {verdict}"]))
        sys.stdout.flush()

    def _decide(self, topic: str, verdict: str) -> str:
        self.board.post(f"after {topic}", verdict)
        return verdict


def _shortened(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:7])} and {len(names) - 7} more"

"""Check a job before it starts: GPUs, packages, NCCL, paths, disk space; or, without Slurm, the layout of a script.

    python scripts/preflight.py --dry-run scripts/sbatch/prod_33n_gbs768_ep8.sh
    srun python scripts/preflight.py --gpus-per-node 8 -- FLAGS OF train_hetero.py

The first form runs the script up to its launch command, on any machine. The trainer checks its flags for as many ranks
as the script has GPUs. The topology is printed.

The second form runs one process per node. On every node, it checks the GPUs, Transformer Engine and the kernels of
Mamba-2 layers if the trainer's flags need them, the paths in these flags and the space for checkpoints. Then it sums
over the GPUs of each node and over those of all nodes. It names nodes that do not answer, and nodes behind a network
that fails. Outside of Slurm, it checks this host alone. The first node prints one report.

Exit code: 0 if nothing is wrong, 1 if a check failed, 2 for flags or a script that cannot work.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from preflight_checks.job_script import read_job
from preflight_checks.run_plan import checkpoints, plan

from mimo.config.cli import parse


def read_flags(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return this program's flags, and those of the trainer after `--`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="%(prog)s --dry-run SCRIPT | [options] -- FLAGS OF train_hetero.py",
                                     allow_abbrev=False)
    parser.add_argument("--dry-run", type=Path, metavar="SCRIPT", help="sbatch script whose layout is checked")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="GPUs that the run uses on each node (default: 8)")
    parser.add_argument("--timeout-s", type=float, default=120.0,
                        help="seconds for a node to appear and for a check to end (default: 120)")
    place = argv.index("--") if "--" in argv else len(argv)
    flags, trainer = parser.parse_args(argv[:place]), argv[place + 1 :]
    if flags.dry_run is None and not trainer:
        parser.error("give the trainer's flags after --, or --dry-run SCRIPT")
    if flags.gpus_per_node < 1 or flags.timeout_s <= 0:
        parser.error(f"--gpus-per-node {flags.gpus_per_node} and --timeout-s {flags.timeout_s:g} must be above 0")
    return flags, trainer


def dry_run(script: Path) -> int:
    """Print the output of a script and the topology of its run. Raises ValueError for a job that cannot work."""
    from preflight_checks.host import format_size

    job = read_job(script)
    config = parse(job.flags)
    topology = plan(config, job.world_size)
    print(f"{job.printed}\n{topology}")
    if saved := checkpoints(config):
        print(f"checkpoints: about {format_size(saved.bytes_each)} each, up to {saved.kept} of them at a time")
    for path in job.unedited:
        print(f"to be edited: {path}")
    print(f"{script}: {job.nodes} nodes x {job.gpus_per_node} GPUs fit the layout")
    return 0


def main(argv: list[str] | None = None) -> int:
    flags, trainer = read_flags(sys.argv[1:] if argv is None else argv)
    # As in train_hetero.py: a provider pkg.module:attr may lie in the current folder.
    sys.path.append(os.getcwd())
    try:
        if flags.dry_run is not None:
            return dry_run(flags.dry_run)
        config = parse(trainer)
        # Imported here because torch takes seconds, and a dry run does not need it.
        from preflight_checks.nodes import check_nodes
        from preflight_checks.reach import JobNode, MessageBoard

        # The script of a job sets JOB_HOSTS and MASTER_PORT. Slurm sets the rest.
        hosts = tuple(os.environ.get("JOB_HOSTS", socket.gethostname()).split())
        place = JobNode(int(os.environ.get("SLURM_NODEID", "0")), hosts, os.environ.get("MASTER_ADDR", "127.0.0.1"),
                      int(os.environ.get("MASTER_PORT", "0")), flags.gpus_per_node)
        return check_nodes(MessageBoard(place, flags.timeout_s), config, flags.timeout_s)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

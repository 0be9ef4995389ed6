r"""Show a run as one HTML page: did it learn, how fast was it, which grid waited for which.

    python scripts/report.py runs/quickstart
    python scripts/report.py runs/disjoint runs/colocated --output compared.html
    python scripts/report.py runs/colocated --plan plan.json

RUN is the --run-dir of train_hetero.py or train_rl.py. The run may be in progress, or have failed. Two runs are shown
side by side, with the difference of their losses. With --plan, the step time and the memory that `mimo plan` predicted
for the layout are shown beside those of the run. The page needs no other file and no network.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mimo.report.page import page
from mimo.report.run_reader import read_run, with_prediction


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", type=Path, help="run folder, with metrics.jsonl")
    parser.add_argument("other", metavar="RUN2", type=Path, nargs="?", help="another run to compare with")
    parser.add_argument("--output", type=Path, help="HTML file to write (default: RUN/report.html)")
    parser.add_argument("--plan", metavar="FILE", type=Path, help="predictions that `mimo plan --out FILE` wrote")
    chosen = parser.parse_args(arguments)
    output = chosen.output or chosen.run / "report.html"
    try:
        runs = [read_run(path) for path in (chosen.run, chosen.other) if path is not None]
        if chosen.plan is not None:
            runs = [with_prediction(run, chosen.plan) for run in runs]
        for run in runs:
            for problem in run.problems:
                print(f"{run.path}: {problem}", file=sys.stderr)
        output.write_text(page(runs), encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"report: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

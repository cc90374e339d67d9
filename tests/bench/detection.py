"""How many labelled events of real training curves does the detector find, and how often does it cry wolf?

The curves (public training runs, labelled by hand) are read where they lie and never copied:
SUREFOOT_CURVES, else ../shared/curves beside the repository. An event counts as found when a critical alarm is raised
between its first point and a few points after its last one. FA: critical alarms that touch no label. benign: critical
alarms on single-batch outliers, which are the data. Both per 10,000 points.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from bench.report import Target, publish
from surefoot.events.anomaly import Severity
from surefoot_detector.detector import Detector
from surefoot_detector.findings import Place, Raised
from surefoot_detector.rules.signals import Numbers

CURVES = Path(os.environ.get("SUREFOOT_CURVES", Path(__file__).parents[3] / "shared/curves"))
LATE_POINTS = 5
"""So much later than the end of an event an alarm may come and still count for it."""


@dataclass
class Outcome:
    """What the detector made of some curves, at one severity and above."""

    num_points: int = 0
    num_must: int = 0
    found: int = 0
    false_alarms: int = 0
    benign: int = 0
    delays: list[int] = field(default_factory=list)
    seconds: float = 0.0
    details: list[str] = field(default_factory=list)

    def row(self, name: str) -> dict[str, Any]:
        wrong = self.false_alarms + self.benign
        return {
            "alarms": name,
            "points": self.num_points,
            "events": self.num_must,
            "found": self.found,
            "FA per 10k": 1e4 * self.false_alarms / self.num_points,
            "benign per 10k": 1e4 * self.benign / self.num_points,
            "precision": self.found / max(1, self.found + wrong),
            "median delay, points": sorted(self.delays)[len(self.delays) // 2] if self.delays else float("nan"),
            "us per point": 1e6 * self.seconds / self.num_points,
        }


def read_curve(path: Path) -> Iterator[tuple[int, Numbers]]:
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            norm, rate = row.get("grad_norm"), row.get("lr")
            yield (
                int(float(row["step"])),
                Numbers(float(row["loss"]), float(norm) if norm else None, float(rate) if rate else None),
            )


def raised_on(path: Path, max_points: int | None) -> tuple[list[tuple[int, int, Raised]], int, float]:
    """Return (index of decision, index of onset, finding) of every alarm, the number of points, and the seconds."""
    points = list(islice(read_curve(path), max_points))
    detector = Detector()
    raised: list[tuple[int, int, Raised]] = []
    begin = time.process_time()
    for index, (_, numbers) in enumerate(points):
        for finding in detector.feed(Place(1, index, index), numbers):
            if isinstance(finding, Raised):
                raised.append((index, finding.onset.step, finding))
    return raised, len(points), time.process_time() - begin


def score(run: dict[str, Any], outcomes: dict[str, Outcome], folder: Path, max_points: int | None) -> None:
    raised, num_points, seconds = raised_on(folder / run["file"], max_points)
    events = [event for event in run["events"] if event["i0"] < num_points]
    for name, outcome in outcomes.items():
        alarms = [a for a in raised if name == "warning or critical" or a[2].severity is Severity.CRITICAL]
        outcome.num_points += num_points
        outcome.seconds += seconds
        outcome.num_must += sum(event["tier"] == "must" for event in events)
        explained: set[int] = set()
        for event in sorted(events, key=lambda event: event["tier"] == "benign"):
            hits = [a for a in alarms if event["i0"] - 1 <= a[0] <= event["i1"] + LATE_POINTS]
            new = [a for a in hits if id(a) not in explained]
            explained |= {id(a) for a in hits}
            if event["tier"] == "must" and hits:
                outcome.found += 1
                outcome.delays.append(hits[0][0] - event["i0"])
            elif event["tier"] == "must":
                where = f"{event['i0']}-{event['i1']}"
                outcome.details.append(f"missed {run['id']} {event['type']} {where} {event.get('log_ratio')}")
            elif event["tier"] == "benign" and new:
                outcome.benign += len(new)
                outcome.details.append(f"benign {run['id']} at {new[0][0]} {new[0][2].rule}")
        wrong = [a for a in alarms if id(a) not in explained]
        outcome.false_alarms += len(wrong)
        outcome.details += [f"false {run['id']} at {a[0]} from {a[1]} {a[2].rule} {a[2].score:.1f}" for a in wrong]


def measure(folder: Path, keep: str = "", max_points: int | None = None) -> dict[str, Outcome]:
    """Run over every curve of the manifest whose id contains `keep`, up to so many points of each."""
    outcomes = {"critical": Outcome(), "warning or critical": Outcome()}
    for run in json.loads((folder / "manifest.json").read_text()):
        if keep in run["id"]:
            score(run, outcomes, folder, max_points)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--curves", type=Path, default=CURVES)
    parser.add_argument("--keep", default="", help="only curves whose id contains this")
    parser.add_argument("--details", action="store_true", help="name what critical alarms missed and where they erred")
    options = parser.parse_args()
    outcomes = measure(options.curves, options.keep)
    critical = outcomes["critical"]
    if options.details:
        print(*critical.details, sep="\n")
    rows = [outcome.row(name) for name, outcome in outcomes.items()]
    publish(
        "detection",
        rows,
        [
            Target("share of events found", critical.found / max(1, critical.num_must), 0.9, "higher"),
            Target("false alarms per 10,000 points", rows[0]["FA per 10k"], 0.21, "lower"),
            Target("alarms on single-batch outliers per 10,000 points", rows[0]["benign per 10k"], 0.0, "lower"),
            Target("precision", rows[0]["precision"], 0.92, "higher"),
            Target("microseconds per point", rows[0]["us per point"], 20.0, "lower"),
        ],
    )


if __name__ == "__main__":
    main()

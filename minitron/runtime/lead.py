"""The lead of a run: who takes part in the next start of the ranks, what ended the last one, and when to give up.

The files of `supervisor` are all that the leading node knows, so another can take over between any two of them.

    none --nodes have come--> run 1 --all ended with 0--> end 0
                                |  ^
      a rank failed, a node died|  |enough nodes are left, after a backoff
                                v  |
                              stop 1 --no ranks are left--> cause, verdict --> end

A round ends the run when it is the third in a row after the same step, or the first and failed by itself: its user's
mistake. A node whose ranks were the cause twice in a row is left out if there is a spare.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import time
import uuid
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path
from time import monotonic

from minitron.runtime.sinks import File
from minitron.runtime.status import BROKEN, HUNG, LOST, REQUEUE, TAKEN

STUCK = "has ranks that SIGKILL does not end"  # why a node leaves that is of no use any more
SETTLE_SECONDS = 6.0  # ranks notice a hang up to five seconds apart; one that never does is the one that hangs
SAME_STEP = 3  # failures after the same step that end a run


class Leader:
    """What the files say, and what the leading node makes of it."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args, self.folder = args, folder
        self.seen: dict[int, tuple[str, float]] = {}  # the last text of each beat, and when it was new
        self.looked = monotonic()
        self.since: tuple[str, float] = "", self.looked  # what the leader waits for, and since when
        self.reported: tuple | None = None  # the last round that was reported, and its status

    # ---- the files --------------------------------------------------------------------------------------------------

    def round(self) -> dict:
        try:
            return json.loads((self.folder / "round.json").read_text())
        except FileNotFoundError:
            return {"number": 0, "state": "none", "nodes": [], "parts": {}, "failures": [], "excluded": [], "left": ""}

    def alive(self, node: int) -> dict | None:
        """Read the beat of a node; None if it is dead or never was."""
        text = words(self.folder / f"node-{node}.json")
        if text is None:
            return None
        now = monotonic()
        if now - self.looked > self.args.dead_seconds / 2:  # this node stood still, or the disk did
            self.seen = {node: (text, now) for node, (text, _) in self.seen.items()}
        self.looked = now
        known, since = self.seen.get(node, ("", 0.0))
        if text not in ("", known):
            known, since = self.seen[node] = text, now
        return json.loads(known) if known and now - since < self.args.dead_seconds else None

    def leads(self, node: int) -> bool:
        return all(self.alive(lower) is None for lower in range(node))

    def step(self) -> int | None:
        """Read the last step that the run has recorded in metrics.jsonl."""
        with suppress(OSError), open(self.args.dir / "metrics.jsonl", "rb") as file:
            size, end = file.seek(0, os.SEEK_END), 1 << 16
            while True:  # other rows have a number of each rank, and so may be longer than any end of the file
                file.seek(max(0, size - end))
                for row in reversed(file.read().splitlines()):
                    with suppress(ValueError):  # torn, as on a full disk
                        if row.startswith(b'{"kind": "step"'):
                            return json.loads(row)["step"]
                if end >= size:
                    break
                end *= 4
        return None

    # ---- decisions --------------------------------------------------------------------------------------------------

    def lead(self) -> dict:
        """Write the next state of the round, if it is time for one; return the round."""
        round_, total = self.round(), self.args.nodes + self.args.spares
        alive = {node: beat for node in range(total) if (beat := self.alive(node)) is not None}
        usable = [b for b in alive.values() if not b["leaving"] and b["host"] not in round_["excluded"]]
        decide = {"none": self.gather, "run": self.train, "stop": self.restart}.get(round_["state"])
        after = None if decide is None else decide(round_, alive, usable)
        if after is not None:
            if more := [host for host in after["excluded"] if host not in round_["excluded"]]:
                with suppress(OSError), open(self.args.dir / "excluded_nodes", "a") as file:
                    file.writelines(f"{host}\n" for host in more)
            replace(self.folder / "round.json", after, durable=True)
            if after["state"] == "run":
                self.say(f"round {after['number']} on {', '.join(node['host'] for node in after['nodes'])}")
        return after or round_

    def waited(self, round_: dict, what: str) -> float:
        """Return for how many seconds the leader has been waiting for this."""
        if self.since[0] != (key := f"{round_['number']} {what}"):
            self.since = key, monotonic()
        return monotonic() - self.since[1]

    def gather(self, round_: dict, alive: dict, usable: list) -> dict | None:
        enough = len(usable) >= self.args.nodes
        if told := [beat["host"] for beat in alive.values() if beat["stopping"]]:
            return self.end(round_, REQUEUE, f"{told[0]} was told to stop")
        if enough and (len(usable) == self.args.nodes + self.args.spares or self.waited(round_, "spares") > 10):
            return self.next(round_, usable)
        if not enough and self.waited(round_, "nodes") > self.args.gather_seconds:
            return self.end(round_, REQUEUE, f"only {len(usable)} of {self.args.nodes} nodes have come")
        return None

    def train(self, round_: dict, alive: dict, usable: list) -> dict | None:
        members = [self.member(round_, node, alive) for node in round_["nodes"]]
        states = {beat["state"] if beat is not None else "lost" for beat in members}
        statuses = {status for beat in members if beat is not None for status in beat["ended"].values()}
        if states == {"done"}:
            left = "; ".join(f"{beat['host']} {beat['leaving']}" for beat in members if beat["leaving"])
            go_on = len(usable) >= self.args.nodes or self.args.rejoin_seconds
            if left and go_on and not any(beat["stopping"] for beat in members):
                return round_ | {"state": "stop", "stopped": time.time(), "parts": {}, "left": left}
            return self.end(round_, 0, left)
        if not states & {"failed", "lost"} or HUNG in statuses and self.waited(round_, "hung") < SETTLE_SECONDS:
            return None
        row = self.args.dir / "metrics.jsonl"
        detect = max(0.0, time.time() - row.stat().st_mtime) if row.exists() else 0.0
        return round_ | {"state": "stop", "stopped": time.time(), "parts": {"detect_seconds": round(detect, 2)}}

    def restart(self, round_: dict, alive: dict, usable: list) -> dict | None:
        members = [self.member(round_, node, alive) for node in round_["nodes"]]
        if any(beat is not None and beat["state"] in ("running", "failed") for beat in members):
            return None
        status, node, cause = (0, None, round_["left"]) if round_["left"] else self.cause(round_, members)
        failures = [*round_["failures"], [self.step(), node]] if status != 0 else round_["failures"]
        known = round_ | {"failures": failures}
        if status == BROKEN or node is not None and [n for _, n in failures[-2:]] == [node] * 2:
            others = [beat for beat in usable if beat["host"] != node]
            if status == BROKEN or len(others) >= self.args.nodes:
                usable, known = others, known | {"excluded": [*round_["excluded"], node]}
        if any(beat["stopping"] for beat in alive.values()):
            return self.end(known, REQUEUE, cause)
        if status != 0 and (over := self.verdict(status, failures)):
            return self.end(known, 1, f"{cause}; {over}")
        if len(usable) < self.args.nodes:
            if self.waited(round_, "nodes") < self.args.rejoin_seconds:
                leaves = status in (0, BROKEN) and not round_["left"]
                return known | {"left": cause} if leaves else None  # a node that leaves may go
            pairs = zip(round_["nodes"], members)
            lost = [node["host"] for node, beat in pairs if beat is None or beat["leaving"].startswith(STUCK)]
            known["excluded"] = list(dict.fromkeys([*known["excluded"], *lost]))
            return self.end(known, REQUEUE, f"{cause}; {len(usable)} nodes are left of {self.args.nodes}")
        if status != 0 and self.waited(round_, "backoff") < self.args.backoff_seconds * (repeated(failures) - 1):
            return None
        self.report(known, cause)
        return self.next(known, usable)

    def verdict(self, status: int | None, failures: list) -> str:
        """Say why the run is not started again; empty if it is.

        A first start that fails by itself has found a mistake of its user's. A step that has failed three times will
        fail again. Of two runs in one checkpoint.dir, which would take it from each other for ever, the later goes on.
        """
        same = repeated(failures)
        if status == TAKEN:
            return "to start again would take it back, and end the other run"
        if len(failures) > self.args.max_restarts:
            return f"that was restart {self.args.max_restarts} of {self.args.max_restarts} (--max-restarts)"
        if len(failures) == 1 and failures[0][0] is None and status == 1:
            return "the first start failed before its first step"
        return f"the run has failed {same} times after step {failures[-1][0] or 0}" if same >= SAME_STEP else ""

    @staticmethod
    def member(round_: dict, node: dict, alive: dict) -> dict | None:
        """Return the beat of a round's node, None if it is dead or was started anew."""
        beat = alive.get(node["node"])
        if beat is None or beat["life"] != node["life"]:
            return None
        known = beat["round"] == round_["key"]
        return beat if known else beat | {"state": "idle", "ended": {}, "said": {}}  # has not begun with this round

    def cause(self, round_: dict, members: list) -> tuple[int | None, str | None, str]:
        """Tell the cause from its consequences: (status of its rank, its host, one line)."""
        found, standing = [], []
        for i, (node, beat) in enumerate(zip(round_["nodes"], members)):
            host = node["host"]
            if beat is None:
                found.append((1, None, host, f"node {node['node']} ({host}) is lost"))
                continue
            if beat["leaving"] and BROKEN not in beat["ended"].values():
                found.append((0, 0, host, f"{host} {beat['leaving']}"))
            for local, status in beat["ended"].items():
                name = f"rank {i * self.args.ranks + int(local)}" if local != "agent" else "the agent"
                how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
                how = {HUNG: "hung", LOST: "lost its partners", BROKEN: "has a broken device"}.get(status, how)
                order = 2 if status < 0 else {BROKEN: 3, HUNG: 6, LOST: 7}.get(status, 4)
                said = f": {beat['said'][local]}" if local in beat["said"] else ""
                if status:
                    found.append((order, status, host, f"{name} on {host} {how}{said}"))
            gone = {int(local) for local in beat["ended"] if local != "agent"}
            standing += [(i * self.args.ranks + k, host) for k in range(self.args.ranks) if k not in gone]
        first = min(found, key=lambda f: f[0], default=(8, None, None, "a node was late with its beats"))
        if first[0] >= 6 and standing and any(status == HUNG for _, status, _, _ in found):  # the others said: "hung"
            ranks = ", ".join(f"{rank} on {host}" for rank, host in standing[:4])
            return HUNG, standing[0][1], f"rank {ranks} stood still"
        return first[1:]

    def next(self, round_: dict, usable: list) -> dict:
        number = round_["number"] + 1
        nodes = [
            {key: b[key] for key in ("node", "life", "host", "address", "port")} for b in usable[: self.args.nodes]
        ]
        passed = max(0.0, time.time() - round_["stopped"]) if round_["state"] == "stop" else None
        ended = {} if passed is None else {"end_seconds": round(passed, 2)}
        start = {"number": number, "key": uuid.uuid4().hex, "parts": round_["parts"] | ended}
        return round_ | start | {"state": "run", "nodes": nodes, "left": ""}

    def end(self, round_: dict, status: int, why: str) -> dict:
        if why:
            self.report(round_, why, status)
        return round_ | {"state": "end", "status": status}

    def report(self, round_: dict, cause: str, status: int | None = None) -> None:
        """Append to restarts.jsonl, and say on stderr, what ended a round; once, if that cannot be written."""
        before, self.reported = self.reported, (round_["number"], status)
        if self.reported == before:
            return
        record = {"time": f"{datetime.now():%Y-%m-%d %H:%M:%S}", "round": round_["number"], "step": self.step()}
        over = {} if status is None else {"status": status}
        with suppress(OSError), closing(File(self.args.dir / "restarts.jsonl")) as file:
            file.write(json.dumps(record | {"cause": cause} | over) + "\n")
        when = "before its first step" if record["step"] is None else f"after step {record['step']}"
        self.say(f"{'error: ' * (status == 1)}round {round_['number']} ended {when}: {cause}")

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def repeated(failures: list) -> int:
    """Count the last failures that came after the same step."""
    return [*(step == failures[-1][0] for step, _ in reversed(failures)), False].index(False)


def words(path: Path) -> str | None:
    """Read JSON that `replace` wrote; None if there is no file, "" if it is not whole: its machine died meanwhile."""
    try:
        json.loads(text := path.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        return ""
    return text


def replace(path: Path, value: dict, durable: bool = False) -> None:
    """Write JSON that others see whole, or as it was before; durable: also if this machine dies now."""
    temporary = path.with_suffix(f".{socket.gethostname()}-{os.getpid()}")  # pods have the same process ids
    with open(temporary, "w") as file:
        file.write(json.dumps(value))
        if durable:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)

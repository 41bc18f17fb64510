"""The leader of a run: which nodes take part in the next round, what ended the last one, and when the run ends.

A round is one start of all ranks. The leading node keeps its state in the files of supervisor.py alone, so another
node can take over after any write.

    none --enough nodes--> run --a rank failed, a node is lost--> stop --no ranks are left--> run ... --> end

    state   what has happened                                               next   status
    none    a node got a signal to stop                                     end    REQUEUE
            enough nodes have come, and all spares or SPARES_SECONDS        run
            too few have come after --gather-seconds                        end    REQUEUE
    run     all ranks ended with 0, and a node leaves; none was told to
            stop, and enough remain or --rejoin-seconds is set              stop
            all ranks ended with 0 otherwise: the job is done, or stopped
            with its saves complete                                         end    0
            a rank or an agent failed, a node is lost                       stop
    stop    a node got a signal to stop                                     end    REQUEUE
            a reason in `verdict`: to start again would not help            end    1
            too few nodes are left after --rejoin-seconds                   end    REQUEUE
            otherwise, after a backoff                                      run

A node whose ranks were the cause twice in a row is left out if there is a spare. A node with a broken device or unfit
GPUs (health.py) is left out for good. A node with a poor log.dir or clock is left out of a round only if there are
enough others, since a full disk may affect all nodes.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import socket
import sys
import time
import uuid
from collections import Counter
from contextlib import closing, suppress
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from time import monotonic

from minitron.config.files import parse_json, read_json, size_of
from minitron.config.text import printable
from minitron.runtime.sinks import File
from minitron.runtime.status import BROKEN, HUNG, LOST, REQUEUE, TAKEN

STUCK = "has ranks that SIGKILL does not end"  # a node that leaves for this reason is excluded
SPARES_SECONDS = 10.0  # the first round waits this long for spares
SETTLE_SECONDS = 6.0  # ranks report a hang up to five seconds apart; the rank that never reports is the one that hangs
# The ends of ranks by status, with their order: the cause of a round is the end of the lowest order. A node that leaves
# has the order 0, a lost node 1, a signal 2, any other status 4.
ENDS = {BROKEN: (3, "has a broken device"), HUNG: (6, "hung"), LOST: (7, "lost its partners")}
SIGNALS = {number.value: number.name for number in signal.Signals}
SAME_STEP = 3  # failures after the same step that end a run
CLOCK_SECONDS = 60.0  # clocks of nodes may differ by this
TAIL_BYTES = 16 << 20  # the end of metrics.jsonl that has the last step: rows with a number of each rank may follow it

# A heartbeat and a round before the first start. supervisor.py describes their fields.
IDLE = {"round": "", "state": "idle", "ended": {}, "said": {}, "leaving": "", "stopping": False}
IDLE |= {"time": 0.0, "looked": "", "unfit": "", "poor": ""}
GONE = IDLE | {"state": "lost"}  # stands for the heartbeat of a node that is dead
START = {"number": 0, "key": "", "state": "none", "nodes": [], "parts": {}, "failures": [], "excluded": [], "left": ""}
START |= {"stopped": 0.0, "status": 0}
# The forms of the files, see `matches`. A file of another form is skipped.
NODE = {"node": int, "life": str, "host": str, "address": str, "port": int}
HEARTBEAT = NODE | {name: type(value) for name, value in IDLE.items()} | {"ended": {str: int}, "said": {str: str}}
ROUND = {name: type(value) for name, value in START.items()} | {"state": {"none", "run", "stop", "end"}}
ROUND |= {"status": {0, 1, REQUEUE}}
ROUND |= {"nodes": [NODE], "parts": {str: float}, "failures": [(int | None, str | None)], "excluded": [str]}


class Leader:
    """Reads the files of all nodes. On the leading node it also writes the rounds."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args, self.folder = args, folder
        self.seen: dict[int, tuple[dict, float]] = {}  # the last heartbeat of each node, and when it was new
        self.known: dict[str, dict] = {}  # the last good value of each file
        self.skipped: Counter[str] = Counter()  # how often each file had another form
        self.looked = monotonic()
        self.since: tuple[str, float] = "", self.looked  # the event that the leader waits for, and since when
        self.reported: tuple | None = None  # the last round that was reported, and its status

    # ---- the files --------------------------------------------------------------------------------------------------

    def read(self, name: str, form: dict) -> dict | None:
        """Read a file of `write_json_atomically`; None if there is none.

        A machine that loses its power can leave an empty or torn file. Then the last good value is returned.
        """
        value = None
        try:
            value = read_json(self.folder / name)
        except FileNotFoundError:
            return None
        except ValueError:
            pass
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.EINVAL):  # a folder or a pipe, not a disk that comes back
                raise
        if matches(value, form):
            self.known[name] = value
        else:
            self.skip(name)
        return self.known.get(name)

    def skip(self, name: str) -> None:
        """Count something of another form in a file, and print a line the first time."""
        self.skipped[name] += 1
        if self.skipped[name] == 1:
            self.say(f"{name} has content that is not minitron's: skipped")

    def round(self) -> dict:
        return self.read("round.json", ROUND) or START

    def alive(self, node: int) -> dict | None:
        """Read the heartbeat of a node; None if the node is dead or has not come yet."""
        beat = self.read(f"node-{node}.json", HEARTBEAT)
        if beat is None:
            return None
        now = monotonic()
        if now - self.looked > self.args.dead_seconds / 2:  # this node or the disk was suspended
            self.seen = {}
        self.looked = now
        known, since = self.seen.get(node, (None, now))
        if beat != known:
            since = now
            self.seen[node] = beat, now
        return beat if now - since < self.args.dead_seconds else None

    def leads(self, node: int) -> bool:
        return all(self.alive(lower) is None for lower in range(node))

    def step(self) -> int | None:
        """Read the last step that the run has recorded in metrics.jsonl."""
        path, rows = self.args.dir / "metrics.jsonl", []
        with suppress(OSError):
            size = size_of(path)  # to open a pipe would block
            with open(path, "rb") as file:
                file.seek(max(0, size - TAIL_BYTES))
                rows = file.read(TAIL_BYTES).splitlines()
        for row in (row for row in reversed(rows) if row.startswith(b'{"kind": "step"')):
            with suppress(ValueError):  # torn, as on a full disk
                if matches(found := parse_json(row), {"step": int}):
                    return found["step"]
                self.skip("metrics.jsonl")
        return None

    # ---- decisions --------------------------------------------------------------------------------------------------

    def lead(self) -> dict:
        """Write the next state of the round if its time has come; return the round."""
        round_, total = self.round(), self.args.nodes + self.args.spares
        alive = {node: beat for node in range(total) if (beat := self.alive(node)) is not None}
        usable = [b for b in alive.values() if not b["leaving"] and b["host"] not in round_["excluded"]]
        decide = {"none": self.wait_for_nodes, "run": self.during_run, "stop": self.after_stop}.get(round_["state"])
        after = None if decide is None else decide(round_, alive, usable)
        if after is not None:
            if more := [host for host in after["excluded"] if host not in round_["excluded"]]:
                with suppress(OSError), closing(File(self.args.dir / "excluded_nodes")) as file:
                    file.write("".join(f"{host}\n" for host in more))
            write_json_atomically(self.folder / "round.json", after, durable=True)
            if after["state"] == "run":
                self.say(f"round {after['number']} on {', '.join(node['host'] for node in after['nodes'])}")
        return after or round_

    def waited(self, round_: dict, what: str) -> float:
        """Return the seconds that the leader has been waiting for this event."""
        if self.since[0] != (key := f"{round_['number']} {what}"):
            self.since = key, monotonic()
        return monotonic() - self.since[1]

    # These three are the table above. They return the next round, or None if the state does not change. alive: the
    # heartbeat of each live node. usable: heartbeats of the nodes that can take part in the next round.

    def wait_for_nodes(self, round_: dict, alive: dict, usable: list) -> dict | None:
        if stopping := [beat["host"] for beat in alive.values() if beat["stopping"]]:
            return self.end(round_, REQUEUE, f"{stopping[0]} got a signal to stop")
        if len(usable) < self.args.nodes:
            late = self.waited(round_, "nodes") > self.args.gather_seconds
            why = f"only {len(usable)} of {self.args.nodes} nodes have come"
            return self.end(round_, REQUEUE, why) if late else None
        complete = len(usable) == self.args.nodes + self.args.spares
        return self.next(round_, usable) if complete or self.waited(round_, "spares") > SPARES_SECONDS else None

    def during_run(self, round_: dict, alive: dict, usable: list) -> dict | None:
        members = [self.member(round_, node, alive) for node in round_["nodes"]]
        states = {beat["state"] for beat in members}
        statuses = {status for beat in members for status in beat["ended"].values()}
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

    def after_stop(self, round_: dict, alive: dict, usable: list) -> dict | None:
        members = [self.member(round_, node, alive) for node in round_["nodes"]]
        busy = any(beat["state"] in ("running", "failed") for beat in members)
        if busy or any(beat["looked"] != round_["key"] for beat in usable):
            return None
        status, host, cause = (0, None, round_["left"]) if round_["left"] else self.cause(round_, members)
        failures = [*round_["failures"], [self.step(), host]] if status != 0 else round_["failures"]
        out = {beat["host"]: beat["unfit"] for beat in usable if beat["unfit"]}  # excluded for good, with the reason
        cause += "".join(f"; {unfit} is left out: {why}" for unfit, why in out.items())
        others = [beat for beat in usable if beat["host"] != host]
        twice = host is not None and [one for _, one in failures[-2:]] == [host, host]
        if status == BROKEN or twice and len(others) >= self.args.nodes:
            out[host] = cause
        usable = [beat for beat in usable if beat["host"] not in out]
        known = round_ | {"failures": failures, "excluded": [*round_["excluded"], *out]}
        if any(beat["stopping"] for beat in alive.values()):
            return self.end(known, REQUEUE, cause)
        if status != 0 and (over := self.verdict(status, failures)):
            return self.end(known, 1, f"{cause}; {over}")
        if len(usable) < self.args.nodes:
            if self.waited(round_, "nodes") < self.args.rejoin_seconds:
                leaves = any(beat["leaving"] or beat["unfit"] for beat in alive.values()) and not round_["left"]
                return known | {"left": cause} if leaves else None  # so the leaving node may end
            pairs = zip(round_["nodes"], members)
            lost = [node["host"] for node, beat in pairs if beat is GONE or beat["leaving"].startswith(STUCK)]
            known["excluded"] = list(dict.fromkeys([*known["excluded"], *lost]))
            return self.end(known, REQUEUE, f"{cause}; {len(usable)} nodes are left of {self.args.nodes}")
        if status != 0 and self.waited(round_, "backoff") < self.args.backoff_seconds * (repeated(failures) - 1):
            return None
        self.report(known, cause)
        return self.next(known, usable)

    def verdict(self, status: int | None, failures: list) -> str:
        """Return why the run is not started again; empty if it is.

        If the first start fails before a step, the cause is a user error. A step that has failed three times will fail
        again. If two runs save in one checkpoint.dir, only the later one continues: else each would take it back.
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
    def member(round_: dict, node: dict, alive: dict) -> dict:
        """Return the heartbeat of a round's node; GONE if the node is dead or its supervisor was started again."""
        beat = alive.get(node["node"])
        if beat is None or beat["life"] != node["life"]:
            return GONE
        begun = beat["round"] == round_["key"]
        return beat if begun else beat | {"state": "idle", "ended": {}, "said": {}}

    def cause(self, round_: dict, members: list) -> tuple[int | None, str | None, str]:
        """Find the first cause among the ends of ranks: (status of the rank, its host, one line), by ENDS."""
        found, standing, ranks = [], [], self.args.ranks
        for i, (node, beat) in enumerate(zip(round_["nodes"], members)):
            host = node["host"]
            if beat is GONE:
                found.append((1, None, host, f"node {node['node']} ({host}) is lost"))
                continue
            if beat["leaving"] and BROKEN not in beat["ended"].values():
                found.append((0, 0, host, f"{host} {beat['leaving']}"))
            for local, status in beat["ended"].items():
                name = f"rank {i * ranks + int(local)}" if local.isdecimal() else f"the {local}"
                order, how = ENDS.get(status, (4, f"ended with status {status}"))
                if status < 0:
                    order, how = 2, f"was killed by {SIGNALS.get(-status, -status)}"
                said = f": {beat['said'][local]}" if local in beat["said"] else ""
                if status:
                    found.append((order, status, host, f"{name} on {host} {how}{said}"))
            standing += [(i * ranks + k, host) for k in range(ranks) if str(k) not in beat["ended"]]
        first = min(found, key=lambda end: end[0], default=(8, None, None, "a node was late with its heartbeats"))
        if first[0] >= ENDS[HUNG][0] and standing and any(status == HUNG for _, status, _, _ in found):
            waited_for = ", ".join(f"{rank} on {host}" for rank, host in standing[:4])
            return HUNG, standing[0][1], f"rank {waited_for} made no progress"
        return first[1:]

    def next(self, round_: dict, usable: list) -> dict:
        """Return the next round, on the first usable nodes; a poor one takes part only if there are no others."""
        poor = {beat["host"]: why for beat in usable if (why := self.poor(beat))}
        chosen = sorted(usable, key=lambda beat: beat["host"] in poor)[: self.args.nodes]
        nodes = [{key: beat[key] for key in NODE} for beat in usable if beat in chosen]
        for host, why in poor.items():
            taken = any(node["host"] == host for node in nodes)
            self.say(f"{host} {'takes part, since no other node is left' if taken else 'is left out'}: {why}")
        start = {"number": round_["number"] + 1, "key": uuid.uuid4().hex, "state": "run", "nodes": nodes, "left": ""}
        if round_["stopped"]:
            passed = max(0.0, time.time() - round_["stopped"])
            start["parts"] = round_["parts"] | {"end_seconds": round(passed, 2)}
        return round_ | start

    def poor(self, beat: dict) -> str:
        """Describe why another node is preferred to this one; empty if none is."""
        ahead = beat["time"] - time.time()
        clock = f"its clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the leader's"
        return clock if abs(ahead) > CLOCK_SECONDS + self.args.dead_seconds else beat["poor"]  # no heartbeat is older

    def end(self, round_: dict, status: int, why: str) -> dict:
        if why:
            self.report(round_, why, status)
        return round_ | {"state": "end", "status": status}

    def report(self, round_: dict, cause: str, status: int | None = None) -> None:
        """Append the cause that ended a round to restarts.jsonl, and print it; once, even if the next write fails."""
        before, self.reported = self.reported, (round_["number"], status)
        if self.reported == before:
            return
        record = {"time": f"{datetime.now():%Y-%m-%d %H:%M:%S}", "round": round_["number"], "step": self.step()}
        over = ({} if status is None else {"status": status}) | ({"skipped": self.skipped} if self.skipped else {})
        with suppress(OSError), closing(File(self.args.dir / "restarts.jsonl")) as file:
            file.write(json.dumps(record | {"cause": cause} | over) + "\n")
        when = "before its first step" if record["step"] is None else f"after step {record['step']}"
        self.say(f"{'error: ' * (status == 1)}round {round_['number']} ended {when}: {cause}")

    def say(self, text: str) -> None:
        """Print a line, which may contain texts of other nodes and ranks."""
        print(printable(text), file=sys.stderr, flush=True)


def repeated(failures: list) -> int:
    """Count the last failures that came after the same step."""
    last = failures[-1][0]
    return len(list(takewhile(lambda failure: failure[0] == last, reversed(failures))))


def matches(value: object, form: object) -> bool:
    """Return whether a value of JSON has a form.

    A form is a type, a set of values, {name: form}, {str: form of all}, [form of all], or (form, form): a list of two.
    """
    if isinstance(form, dict):
        fields = dict.fromkeys(value, form[str]) if str in form and isinstance(value, dict) else form
        return isinstance(value, dict) and all(k in value and matches(value[k], kind) for k, kind in fields.items())
    if isinstance(form, list | tuple):
        forms = form * len(value) if isinstance(form, list) and isinstance(value, list) else form
        return isinstance(value, list) and len(forms) == len(value) and all(map(matches, value, forms))
    return any(value == item for item in form) if isinstance(form, set) else isinstance(value, form)


def write_json_atomically(path: Path, value: dict, durable: bool = False) -> None:
    """Write JSON that readers find whole, either old or new; durable: also if this machine dies now."""
    temporary = path.with_suffix(f".{socket.gethostname()}-{os.getpid()}")  # pods have the same process ids
    with open(temporary, "w") as file:
        file.write(json.dumps(value))
        if durable:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)

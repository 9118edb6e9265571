"""Program of the guardian: a tiny process that outlives its parent by a moment and clears up after it.

Run as ``python -I -S -E -c <this file> <parent's pid> <token>``; commands come in lines on standard input:

    +PID    this process leads a process group that must not outlive the parent
    -PID    it is gone
    SMARK   kill every process that carries MARK in its environment
    Q       orderly end: nothing more to guard

End-of-file, or the parent's death seen through its pidfd (a descendant that holds a copy of the pipe's other end
hides the end-of-file), kills all that is still registered and every process that carries a mark of the token.
Standard library only, and little of it: starting takes about 15 ms of CPU, idle nothing.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

MARK_VARIABLE = b"NUMA_COLLECTORS_MARK="
PATIENCE_S = 10.0


def marks_of(pid: int) -> list[bytes]:
    """Return the marks in the environment with which a process was started; none where it may not be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environ = file.read()
    except OSError:
        return []
    for entry in environ.split(b"\0"):
        if entry.startswith(MARK_VARIABLE):
            return entry[len(MARK_VARIABLE) :].split(b":")
    return []


def kill(pid: int, group: bool) -> None:
    """Kill a process or a group that may be gone already."""
    try:
        (os.killpg if group else os.kill)(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    except PermissionError as error:
        print(f"numa_collectors: cannot kill process {pid}: {error}", file=sys.stderr)


def sweep(prefixes: set[bytes]) -> int:
    """Kill every process with a mark that is one of ``prefixes`` or continues one after a dot; return how many."""
    if not os.path.isdir("/proc/self"):
        return 0
    found = 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        marks = marks_of(int(name))
        if any(mark in prefixes or mark.partition(b".")[0] in prefixes for mark in marks):
            kill(int(name), group=False)
            found += 1
    return found


def sweep_until_clear(prefixes: set[bytes]) -> None:
    """Sweep until two looks in a row find nobody: a process may fork between the listing and its end."""
    deadline = time.monotonic() + PATIENCE_S
    clear = 0
    while clear < 2 and time.monotonic() < deadline:
        clear = 0 if sweep(prefixes) else clear + 1
        if clear < 2:
            time.sleep(0.01)


class Guardian:
    """State of the program."""

    def __init__(self, parent_pid: int, token: bytes) -> None:
        self.parent_pid = parent_pid
        self.token = token
        self.groups: set[int] = set()
        self.rest = b""
        self.ending = "more"

    def obey(self, data: bytes) -> bool:
        """Carry out whole lines; True when the end was ordered."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        sweeps = {line[1:] for line in lines if line.startswith(b"S")}
        for line in lines:
            if line.startswith(b"+"):
                self.groups.add(int(line[1:]))
            elif line.startswith(b"-"):
                self.groups.discard(int(line[1:]))
        if sweeps:
            sweep_until_clear(sweeps)
        return b"Q" in lines

    def avenge(self) -> None:
        """The parent is dead: kill what it left."""
        for pid in self.groups:
            kill(pid, group=True)
            kill(pid, group=False)  # one that died before it could lead a group of its own
        sweep_until_clear({self.token})

    def watch(self) -> None:
        """Wait for commands and for the parent's end."""
        poller = select.poll()
        poller.register(0, select.POLLIN)
        parent_fd = -1
        if hasattr(os, "pidfd_open"):
            try:
                parent_fd = os.pidfd_open(self.parent_pid)
            except OSError as error:  # kernels before 5.3, or gone already: end-of-file tells then
                print(f"numa_collectors: no pidfd of {self.parent_pid}: {error}", file=sys.stderr)
            else:
                poller.register(parent_fd, select.POLLIN)
        parent_lives = os.getppid() == self.parent_pid
        while parent_lives:
            ready = {fd for fd, _ in poller.poll()}
            parent_lives = parent_fd not in ready
            if 0 in ready and self.read_commands() != "more":
                break
        # Registrations that the parent wrote just before its death are still in the pipe.
        os.set_blocking(0, False)
        while self.ending == "more":
            self.read_commands()
        if self.ending != "ordered":
            self.avenge()

    def read_commands(self) -> str:
        """Read and obey once; return "more", or how it ended: "ordered", "end-of-file" or "drained"."""
        try:
            data = os.read(0, 65536)
        except BlockingIOError:
            self.ending = "drained"
            return self.ending
        if not data:
            self.ending = "end-of-file"
        elif self.obey(data):
            self.ending = "ordered"
        return self.ending


def main() -> None:
    """Set signals aside and watch."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    if os.path.exists("/proc/self/comm"):
        with open("/proc/self/comm", "w") as file:
            file.write("numa-guardian")
    Guardian(int(sys.argv[1]), sys.argv[2].encode()).watch()


if __name__ == "__main__":
    main()

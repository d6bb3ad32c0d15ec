"""
The supervisor inside of a sandbox: runs programs that are not trusted, one after the other, each in a fork with
limits, and reports what they wrote and how they ended.

It runs in an interpreter of its own, gets its modules and orders from the trainer through a pipe, and knows no
expected result, so there is nothing in it that a program could find or forge. Frames in both directions are a kind
(one byte), a length (4 bytes) and that many bytes: `J` with a JSON object, `C` with bytes from and to a program's
server, and `K` to end a server.
"""

import atexit
import errno
import fcntl
import gc
import io
import json
import os
import select
import signal
import site
import sys
import time
import types
from collections.abc import Callable

from . import plain_data, sandbox_callee, sandbox_evaluator, sandbox_jail


# Descriptors of a program: its standard ones, its server's channel, and from here on folders to import from.
REQUESTS, REPLIES, STATUS, IMPORTS = 3, 4, 5, 6
# Where copies of descriptors wait for their place.
HIGH_DESCRIPTOR = 128

CHUNK_BYTES = 2**16
MAX_ERROR_BYTES = 4096
# How long a server that is told to end may take, and processes that were killed.
ENDING_SECONDS = 1.0
# How long processes may be about to end when the program has ended, as of a command whose output was read.
LEAVING_SECONDS = 0.25
KILL_SECONDS = 5.0
# How often that is tried again before this process ends, after which nobody could.
LAST_TRIES = 10

SERVERS = {"callee": sandbox_callee.main, "evaluator": sandbox_evaluator.main}


# Pipes


def receive() -> tuple[bytes, bytes] | None:
    """Kind and content of the trainer's next frame, or `None` when the trainer has gone."""
    head = plain_data.read_exactly(0, 5)
    if head is None:
        return None
    body = plain_data.read_exactly(0, int.from_bytes(head[1:], "big"))
    return None if body is None else (head[:1], body)


def send(kind: bytes, body: bytes) -> None:
    """Send the trainer a frame, of a `kind` (`bytes`) with a `body` (`bytes`)."""
    plain_data.write_all(1, kind + len(body).to_bytes(4, "big") + body)


# Programs


def open_standard_streams() -> None:
    """Give a program text streams of its own on the descriptors 0 to 2."""
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(2, "w", closefd=False)), "utf-8", "backslashreplace", line_buffering=True
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr


def run_script(code: str) -> int:
    """
    Run a program as the main module.

    Args:
        code (`str`): The program.

    Returns:
        `int`: its exit status.
    """
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.argv = ["program.py"]
    try:
        exec(compile(code, "program.py", "exec", dont_inherit=True), main.__dict__)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)  # noqa: T201
        return 1
    except BaseException as error:
        trace = error.__traceback__ and error.__traceback__.tb_next  # without the frame of this function
        sys.__excepthook__(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def finish(status: int) -> None:
    """End as the interpreter does, with a `status` (`int`): wait for threads, call what is registered, and flush."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # of a program's own making
        status = status or 1
    os._exit(status)


# Processes


def processes() -> dict[int, tuple[int, int]]:
    """Parent and resident bytes of every process in sight, by its id."""
    found = {}
    page = os.sysconf("SC_PAGE_SIZE")
    try:
        names = os.listdir("/proc")
    except OSError:
        return found
    for name in names:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()  # the name before may hold anything
            except OSError:
                continue
            if fields[0] != b"Z":
                found[int(name)] = (int(fields[1]), int(fields[21]) * page)
    return found


def descendants() -> dict[int, int]:
    """Resident bytes of the processes below this one, by their id."""
    found = processes()
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in found.items():
        children.setdefault(parent, []).append(pid)
    below: dict[int, int] = {}
    waiting = [os.getpid()]
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            below[pid] = found[pid][1]
            waiting.append(pid)
    return below


def has_children() -> bool:
    """Whether processes are left; those whose parent ended are this one's, as the first of them or their reaper."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    except ChildProcessError:
        return False


class Supervisor:
    """
    Runs the programs of one sandbox.

    Args:
        settings (`dict`): The trainer's settings, see `sandbox.Sandbox`.
    """

    def __init__(self, settings: dict):
        self.settings = settings
        self.uid = settings["uid"]
        self.folder = settings["folder"]
        if settings["level"] == "namespaces":
            sandbox_jail.enter_namespaces(
                settings["readable"], settings["links"], settings["folder_bytes"], settings["own_user"]
            )
        self.is_first = os.getpid() == 1
        if settings["level"] != "rlimits" and not self.is_first:
            raise OSError(f"this is process {os.getpid()}, not the first one of a process namespace")
        if not self.is_first:
            sandbox_jail.set_process_option(sandbox_jail.PR_SET_CHILD_SUBREAPER, 1)
        # Neither its memory nor its environment is for programs of the same user.
        sandbox_jail.set_process_option(sandbox_jail.PR_SET_DUMPABLE, 0)
        self.landlocked = settings["level"] == "rlimits" and sandbox_jail.landlock_version() > 0
        self.scoped = self.landlocked and sandbox_jail.landlock_version() >= 6
        # Nothing but Landlock's scope keeps a program from signalling the trainer when both are of one user.
        signals = self.scoped or self.uid is not None or settings["level"] != "rlimits"
        self.filter = sandbox_jail.seccomp_filter(os.uname().machine, signals)
        # Opened now, while this process may still reach what the program's user may not.
        self.readable = self._open(settings["readable"]) if self.landlocked else []
        self.imports = self._open(settings["import_paths"]) if settings["level"] == "rlimits" else []
        self.packages = [
            (module, path, module.__path__[0][len(path) :])
            for module in sys.modules.values()
            for path in settings["import_paths"]
            if getattr(module, "__path__", None) and module.__path__[0].startswith(f"{path}/")
        ]
        try:
            with open("/proc/self/statm") as file:
                self.own_bytes = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:  # no /proc in a container that does not allow one
            self.own_bytes = 64 * 2**20
        self.woken, wake = os.pipe()
        os.set_blocking(self.woken, False)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    @staticmethod
    def _open(paths: list[str]) -> list[int]:
        return [os.open(path, os.O_PATH | os.O_CLOEXEC) for path in paths if os.path.exists(path)]

    def serve(self) -> Callable[[], int] | None:
        """
        Run what the trainer sends until it goes.

        Returns:
            `Callable`: in the fork that is to be a program, the program, else `None`.
        """
        while (frame := receive()) is not None:
            kind, body = frame
            if kind != b"J":  # for a program that has ended
                continue
            program = self._run(json.loads(body))
            if program is not None:
                return program
        return None

    # In the fork

    def _become_program(self, request: dict, pipes: dict[int, int]) -> Callable[[], int]:
        status = pipes[STATUS]
        try:
            self._enter_jail(pipes)
            status = STATUS
            open_standard_streams()
            code, server = request["code"], SERVERS.get(request["server"])
            os.write(STATUS, b"ok")
            os.close(STATUS)
        except BaseException as error:
            os.write(status, f"{type(error).__name__}: {error}".encode()[:MAX_ERROR_BYTES])
            os._exit(1)
        return (lambda: run_script(code)) if server is None else (lambda: server(code, REQUESTS, REPLIES))

    def _enter_jail(self, pipes: dict[int, int]) -> None:
        settings = self.settings
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        places = {**pipes, **{IMPORTS + number: fd for number, fd in enumerate(self.imports)}}
        copies = {place: fcntl.fcntl(fd, fcntl.F_DUPFD, HIGH_DESCRIPTOR) for place, fd in places.items()}
        readable = [fcntl.fcntl(fd, fcntl.F_DUPFD, HIGH_DESCRIPTOR) for fd in self.readable]
        os.closerange(0, HIGH_DESCRIPTOR)
        for place, copy in copies.items():
            os.dup2(copy, place)
        try:
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")  # when memory runs out, this goes and not the trainer
        except OSError:
            pass
        os.umask(0o077)
        os.chdir(self.folder)
        folder = os.open(".", os.O_PATH)
        limits = settings["limits"]
        sandbox_jail.set_limits({**limits, "AS": limits["AS"] + self.own_bytes})
        if self.uid is not None:
            sandbox_jail.become_user(self.uid)
        sandbox_jail.drop_capabilities()
        sandbox_jail.set_process_option(sandbox_jail.PR_SET_NO_NEW_PRIVS, 1)
        sandbox_jail.set_process_option(sandbox_jail.PR_SET_PDEATHSIG, signal.SIGKILL)
        if self.landlocked:
            devices = [os.open(f"/dev/{name}", os.O_PATH) for name in sandbox_jail.DEVICES]
            sandbox_jail.restrict_files(readable, devices, [folder])
        sys.path[:] = settings["import_paths"]
        if self.imports and not os.access(os.path.join(sys.path[0], "os.py"), os.R_OK):
            # The interpreter lies in a folder that only the trainer's user may enter; from inside it is readable.
            inside = {path: f"/proc/self/fd/{IMPORTS + number}" for number, path in enumerate(sys.path)}
            sys.path[:] = inside.values()
            for package, path, rest in self.packages:  # which find their modules without sys.path
                package.__path__ = [inside[path] + rest]
            os.closerange(IMPORTS + len(self.imports), 4 * HIGH_DESCRIPTOR)
        else:
            os.closerange(IMPORTS, 4 * HIGH_DESCRIPTOR)
        sys.path_importer_cache.clear()
        sandbox_jail.restrict_calls(self.filter)
        os.environ.clear()

    # In the supervisor

    def _run(self, request: dict) -> Callable[[], int] | None:
        ends = {0: os.pipe(), 1: os.pipe(), 2: os.pipe(), STATUS: os.pipe()}
        if request["server"]:
            ends |= {REQUESTS: os.pipe(), REPLIES: os.pipe()}
        # A program reads its standard input and its server's requests, and writes the rest.
        reads = (0, REQUESTS)
        inner = {place: pair[0] if place in reads else pair[1] for place, pair in ends.items()}
        outer = {place: pair[1] if place in reads else pair[0] for place, pair in ends.items()}
        started = time.monotonic()
        pid = os.fork()
        if not pid:
            return self._become_program(request, inner)
        for descriptor in inner.values():
            os.close(descriptor)
        for descriptor in outer.values():
            os.set_blocking(descriptor, False)
        run = _Run(self, pid, outer, request, started)
        try:
            report = run.watch()
        finally:
            for descriptor in outer.values():
                if descriptor not in run.closed:
                    os.close(descriptor)
        if report is None:  # the trainer has gone
            self.end()
            os._exit(0)
        send(b"J", json.dumps(report).encode())
        self._clear_folder()
        return None

    def end(self) -> None:
        """End all that is left, however long that takes on a machine that is overloaded."""
        for _ in range(LAST_TRIES):
            if self.kill_all():
                return

    def kill_all(self) -> bool:
        """
        End all processes that programs have started, however they try to go on.

        Returns:
            `bool`: whether none is left.
        """
        deadline = time.monotonic() + KILL_SECONDS
        pause = 0.0005
        while has_children():
            if time.monotonic() > deadline:
                return False
            if self.is_first:
                self._kill_visible()
            elif self.uid is not None:
                self._as_program_user(self._kill_visible)
            else:
                self._hunt()
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return True

    @staticmethod
    def _kill_visible() -> None:
        try:
            os.kill(-1, signal.SIGKILL)  # all at once, which no fork outruns
        except ProcessLookupError:
            pass

    def _hunt(self) -> None:
        """Stop the processes below this one until no new ones appear, so that none forks while they are killed."""
        stopped: set[int] = set()
        while found := descendants().keys() - stopped:
            for pid in found:
                self._signal(pid, signal.SIGSTOP)
            stopped |= found
        for pid in stopped:
            self._signal(pid, signal.SIGKILL)

    @staticmethod
    def _signal(pid: int, number: int) -> None:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            pass

    def _as_program_user(self, action: Callable[[], None]) -> None:
        helper = os.fork()
        if not helper:
            try:
                signal.set_wakeup_fd(-1)
                os.chdir(self.folder)  # by a path that the program's user may not be let in
                if self.uid is not None:
                    sandbox_jail.become_user(self.uid)
                action()
            finally:
                os._exit(0)
        os.waitpid(helper, 0)

    def _clear_folder(self) -> None:
        def clear():
            try:
                os.chmod(".", 0o700 if self.settings["level"] == "rlimits" else 0o1777)
            except PermissionError:
                pass  # the folder itself is not the program's, who so could not change it either
            sandbox_jail.clear_folder(".")

        if self._is_empty():
            return
        self._as_program_user(clear)
        if not self._is_empty():
            os._exit(1)  # the next program, which must find nothing of this one's, gets another sandbox

    def _is_empty(self) -> bool:
        try:
            return not os.listdir(self.folder)
        except OSError:
            return False

    def exceeded(self) -> str | None:
        """Which limit on all processes together is exceeded: `"memory"`, `"files"` or, mostly, none."""
        settings = self.settings
        if sum(descendants().values()) > settings["limits"]["AS"]:
            return "memory"
        if settings["level"] == "rlimits":
            if sandbox_jail.folder_size(self.folder, settings["folder_bytes"]) > settings["folder_bytes"]:
                return "files"
        else:
            status = os.statvfs(self.folder)
            if status.f_files - status.f_ffree > sandbox_jail.MAX_FILES:
                return "files"
        return None


class _Run:
    """One run of a program, watched from outside."""

    def __init__(self, supervisor: Supervisor, pid: int, outer: dict[int, int], request: dict, started: float):
        self.supervisor, self.pid, self.outer, self.started = supervisor, pid, outer, started
        self.deadline = started + request["wall_seconds"]
        self.output_bytes = supervisor.settings["output_bytes"]
        self.waiting = {0: request["stdin"].encode("utf-8", "surrogatepass"), REQUESTS: b""}  # to be written
        self.outputs = {1: bytearray(), 2: bytearray(), STATUS: bytearray(), REPLIES: bytearray()}
        self.num_bytes = 0
        self.asked = self.ending = self.gone = False
        self.status: int | None = None
        self.closed: set[int] = set()
        if not self.waiting[0]:
            self._close(0)

    def _close(self, place: int) -> None:
        descriptor = self.outer[place]
        if descriptor not in self.closed:
            os.close(descriptor)
            self.closed.add(descriptor)

    def _is_open(self, place: int) -> bool:
        return place in self.outer and self.outer[place] not in self.closed

    def watch(self) -> dict | None:
        """The run's report, or `None` when the trainer has gone."""
        supervisor = self.supervisor
        tick = 0.25 if supervisor.settings["level"] == "rlimits" else 0.1
        next_check = self.started + tick
        reason = None
        while self.status is None and not reason and not self.gone:
            now = time.monotonic()
            if now >= self.deadline:
                reason = None if self.ending else "wall"
                break
            if now >= next_check:
                reason = supervisor.exceeded()
                next_check = now + tick
                continue
            self._wait(min(self.deadline, next_check) - now)
            if self.num_bytes > self.output_bytes:
                reason = "output"
            self._reap()
        seconds = time.monotonic() - self.started
        if self.status is None and self.ending:
            supervisor._signal(self.pid, signal.SIGKILL)
            until = time.monotonic() + ENDING_SECONDS
            while self.status is None and time.monotonic() < until:
                self._wait(until - time.monotonic())
                self._reap()
        until = time.monotonic() + LEAVING_SECONDS
        while (leftover := not reason and not self.gone and has_children()) and time.monotonic() < until:
            time.sleep(0.005)
        all_dead = supervisor.kill_all()
        if self.gone:
            return None
        # Also an answer that a server gave before it ended.
        for place in (1, 2, STATUS, *([REPLIES] if self.asked else [])):
            while self._is_open(place) and self.num_bytes <= self.output_bytes and self._read(place):
                pass
        setup = bytes(self.outputs[STATUS])
        if not reason and self.num_bytes > self.output_bytes:
            reason = "output"
        return {
            "stdout": bytes(self.outputs[1][: self.output_bytes]).decode("utf-8", "backslashreplace"),
            "stderr": bytes(self.outputs[2]).decode("utf-8", "backslashreplace"),
            "exit": os.waitstatus_to_exitcode(self.status) if self.status is not None else None,
            "reason": reason,
            "leftover": leftover,
            "all_dead": all_dead,
            "seconds": seconds,
            "failure": None if setup == b"ok" or reason else setup.decode("utf-8", "replace") or "it ended at once",
        }

    def _wait(self, seconds: float) -> None:
        poll = select.poll()
        places = {0: None, self.supervisor.woken: None}
        poll.register(0, select.POLLIN)
        poll.register(self.supervisor.woken, select.POLLIN)
        wanted = [(place, select.POLLIN) for place in (1, 2, STATUS)]
        wanted += [(place, select.POLLOUT) for place in (0, REQUESTS) if self.waiting[place]]
        # At most one reply is read for a request, so that a program cannot fill this process with them.
        wanted += [(REPLIES, select.POLLIN)] if self.asked else []
        for place, event in wanted:
            if self._is_open(place):
                places[self.outer[place]] = place
                poll.register(self.outer[place], event)
        for descriptor, _ in poll.poll(max(seconds, 0) * 1000 + 1):
            place = places[descriptor]
            if descriptor == self.supervisor.woken:
                try:
                    os.read(descriptor, CHUNK_BYTES)
                except BlockingIOError:
                    pass
            elif place is None:
                self._obey()
            elif place in self.waiting:
                self._write(place)
            else:
                self._read(place)

    def _reap(self) -> None:
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid == self.pid:
                    self.status = status
                    return
        except ChildProcessError:
            return

    def _obey(self) -> None:
        frame = receive()
        if frame is None:
            self.gone = True
        elif frame[0] == b"C" and self._is_open(REQUESTS):
            self.waiting[REQUESTS] += len(frame[1]).to_bytes(4, "big") + frame[1]
            self.asked = True
        elif frame[0] == b"K" and not self.ending:
            self.ending = True
            self.deadline = min(self.deadline, time.monotonic() + ENDING_SECONDS)
            self.waiting[REQUESTS] = b""
            if self._is_open(REQUESTS):
                self._close(REQUESTS)

    def _write(self, place: int) -> None:
        try:
            self.waiting[place] = self.waiting[place][os.write(self.outer[place], self.waiting[place][:CHUNK_BYTES]) :]
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise
            self.waiting[place] = b""
        if not self.waiting[place] and place == 0:
            self._close(0)

    def _read(self, place: int) -> bool:
        try:
            part = os.read(self.outer[place], CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not part:
            self._close(place)
            return False
        kept = self.outputs[place]
        kept += part
        if place == REPLIES:
            size = 4 + int.from_bytes(kept[:4], "big") if len(kept) >= 4 else None
            if size is not None and size > self.output_bytes:
                self.num_bytes = self.output_bytes + 1
            elif size is not None and len(kept) >= size:
                reply = bytes(kept[4:size])
                kept.clear()  # of what nobody asked for
                self.asked = False
                send(b"C", reply)
        elif place != STATUS:
            self.num_bytes += len(part)
            if place == 2:
                del kept[:-MAX_ERROR_BYTES]
        else:
            del kept[MAX_ERROR_BYTES:]
        return True


def main() -> None:
    """Be the supervisor, and in its forks the programs."""
    frame = receive()
    if frame is None:
        return
    try:
        supervisor = Supervisor(json.loads(frame[1]))
    except Exception as error:
        send(b"J", json.dumps({"failure": f"{type(error).__name__}: {error}"}).encode())
        return
    send(b"J", json.dumps({"landlock": supervisor.landlocked, "scoped": supervisor.scoped}).encode())
    site.setquit()  # programs call `exit`, which an interpreter without site-packages lacks
    gc.freeze()  # forks share what is there now
    status = 0
    try:
        program = supervisor.serve()
    except Exception:  # such as of a pipe that the trainer has closed
        program, status = None, 1
    if program is None:
        supervisor.end()
        os._exit(status)
    del supervisor
    finish(program())

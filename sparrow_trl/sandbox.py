"""
Sandboxes for programs that are not trusted: which isolation this machine offers, and the trainer's side of the pipe to
the supervisor in each (`sandbox_launcher`).

A sandbox is one interpreter, started without `fork` in the trainer, in which every run of a program is a fork with
limits. What a program may do besides depends on the isolation; what counts as passed never does, since the supervisor
reports only what a program wrote and how it ended.
"""

import contextlib
import json
import logging
import marshal
import os
import platform
import random
import select
import shutil
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from math import inf
from numbers import Integral, Real
from pathlib import Path

from . import sandbox_jail
from .number_checks import check_numbers


logger = logging.getLogger(__name__)

LEVELS = ("bubblewrap", "nsjail", "namespaces", "rlimits")
TOOLS = {"bubblewrap": "bwrap", "nsjail": "nsjail"}

# In the order of their imports.
MODULES = ("plain_data", "sandbox_jail", "sandbox_callee", "sandbox_evaluator", "sandbox_launcher")
BOOT = """
import marshal, os, sys, types
def read(size):
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            os._exit(1)
        data += part
    return data
package = sys.modules["sparrow_trl"] = types.ModuleType("sparrow_trl")
package.__path__ = []
for name, code in marshal.loads(read(int.from_bytes(read(4), "big"))):
    module = sys.modules["sparrow_trl." + name] = types.ModuleType("sparrow_trl." + name)
    module.__package__ = "sparrow_trl"
    setattr(package, name, module)
    exec(code, module.__dict__)
module.main()
"""

# How long a sandbox may take to start, and how much longer than its limit a run, in which processes are ended.
START_SECONDS = 30.0
GRACE_SECONDS = 10.0
# How long the caller waits for a sandbox to end. What is left of it then is ended by a thread, which gives the
# supervisor long to do it, since the machine may be overloaded.
END_SECONDS = 2.0
LAST_SECONDS = 60.0

# Users that programs run as when the trainer is root: nobody's, and one for each sandbox, so that limits on the number
# of processes are of one program and signals reach no other.
FIRST_UID, NUM_UIDS = 2_000_000_000, 100_000_000


class SandboxError(RuntimeError):
    """A sandbox that cannot be started or that fails, which says nothing about the program."""


@dataclass(frozen=True)
class SandboxConfig:
    """
    Limits of programs that are not trusted, and their isolation.

    Args:
        cpu_seconds (`int`, *optional*, defaults to `5`):
            CPU time of each process of a test, in seconds.
        wall_seconds (`float`, *optional*, defaults to `10.0`):
            Time that a test may take, in seconds.
        total_seconds (`float`, *optional*, defaults to `600.0`):
            Time that one call may take, in seconds, for all programs and tests. Tests that are not done by then have
            not passed.
        memory_bytes (`int`, *optional*, defaults to `1073741824`):
            Memory of each process of a test, and of all of them together.
        file_bytes (`int`, *optional*, defaults to `67108864`):
            Size of the throw-away folder, and of each file.
        max_processes (`int`, *optional*, defaults to `32`):
            Processes and threads of a test at a time.
        output_bytes (`int`, *optional*, defaults to `8388608`):
            What a test may write to its standard output and error together, or return.
        max_workers (`int`, *optional*):
            Programs that run at a time. By default as many as this process may use CPU cores, divided by the
            processes of a distributed training on this machine.
        isolation (`str`, *optional*, defaults to `"auto"`):
            `"bubblewrap"`, `"nsjail"`, `"namespaces"` or `"rlimits"`; `"auto"` is the first of them that works here.
        allow_site_packages (`bool`, *optional*, defaults to `False`):
            Whether programs and tests may import the packages that are installed beside this one, such as NumPy.
            Starting takes longer then, and larger packages need more memory and threads.
    """

    cpu_seconds: int = 5
    wall_seconds: float = 10.0
    total_seconds: float = 600.0
    memory_bytes: int = 1073741824
    file_bytes: int = 67108864
    max_processes: int = 32
    output_bytes: int = 8388608
    max_workers: int | None = None
    isolation: str = "auto"
    allow_site_packages: bool = False

    def __post_init__(self):
        check_numbers(
            self,
            (
                ("cpu_seconds", Integral, 1, inf),
                ("wall_seconds", Real, 0.1, 86_400),
                ("total_seconds", Real, 0.1, 864_000),
                ("memory_bytes", Integral, 2**24, 2**50),
                ("file_bytes", Integral, 2**12, 2**50),
                ("max_processes", Integral, 1, 10_000),
                ("output_bytes", Integral, 1, 2**30),
                ("max_workers", Integral, 1, 10_000),
            ),
            optional=("max_workers",),
        )
        if self.isolation not in ("auto", *LEVELS):
            raise ValueError(f'isolation must be "auto" or one of {", ".join(LEVELS)}, but it is {self.isolation!r}.')
        if not isinstance(self.allow_site_packages, bool):
            raise ValueError(f"allow_site_packages must be True or False, but it is {self.allow_site_packages!r}.")

    @property
    def num_workers(self) -> int:
        """Programs that run at a time."""
        if self.max_workers is not None:
            return self.max_workers
        local_processes = os.environ.get("LOCAL_WORLD_SIZE", "")
        return max(1, len(os.sched_getaffinity(0)) // max(1, int(local_processes) if local_processes.isdigit() else 1))


@dataclass(frozen=True)
class Isolation:
    """
    The isolation in use.

    Args:
        level (`str`):
            `"bubblewrap"`, `"nsjail"`, `"namespaces"` or `"rlimits"`.
        gaps (`tuple[str, ...]`, *optional*, defaults to `()`):
            What programs are not kept from.
        unavailable (`dict[str, str]`, *optional*, defaults to `{}`):
            Stronger levels, and why they are not used.
    """

    level: str
    gaps: tuple[str, ...] = ()
    unavailable: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """
    How a run of a program ended.

    Args:
        stdout (`str`):
            What it wrote.
        stderr (`str`):
            The end of what it wrote to its standard error.
        exit (`int` or `None`):
            Its exit status, negative for a signal, `None` when it was ended.
        reason (`str` or `None`):
            Limit for which it was ended: `"wall"`, `"output"`, `"memory"`, `"files"`, or `"stuck"` when its sandbox
            was ended as a whole.
        leftover (`bool`):
            Whether it left processes running, which were ended.
        seconds (`float`):
            How long it ran.
    """

    stdout: str
    stderr: str
    exit: int | None
    reason: str | None
    leftover: bool
    seconds: float


# What programs may see


@cache
def _interpreter() -> str:
    """The interpreter behind a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@cache
def _import_paths(allow_site_packages: bool) -> list[str]:
    # A virtual environment's own folders hold none of the standard library.
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    paths = [sysconfig.get_path("stdlib", vars=base), sysconfig.get_path("platstdlib", vars=base)]
    paths += [sysconfig.get_config_var("DESTSHARED") or "", os.path.join(paths[0], "lib-dynload")]
    if allow_site_packages:
        paths += [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    return [path for path in dict.fromkeys(paths) if os.path.isdir(path)]


@cache
def _readable(allow_site_packages: bool) -> list[str]:
    """Folders and files that programs need, none inside of another."""
    paths = ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/libx32", "/nix/store", "/etc/ld.so.cache"]
    paths = [path for path in paths if not os.path.islink(path)]
    paths += [os.path.join(sys.base_prefix, "lib"), os.path.join(sys.base_exec_prefix, "lib"), _interpreter()]
    paths += _import_paths(allow_site_packages)
    paths = [path for path in dict.fromkeys(paths) if os.path.exists(path)]
    return [path for path in paths if not any(path.startswith(f"{other}/") for other in paths)]


@cache
def _links() -> list[tuple[str, str]]:
    """Links that programs need, as of `/bin` to `usr/bin`."""
    names = ("/bin", "/sbin", "/lib", "/lib64", "/lib32", "/libx32")
    links = [(os.readlink(name), name) for name in names if os.path.islink(name)]
    return [*links, ("/tmp", "/dev/shm")]


# Commands


def sandbox_command(level: str, config: SandboxConfig, root: bool) -> list[str]:
    """
    The command that starts a sandbox.

    Args:
        level (`str`): Isolation.
        config ([`SandboxConfig`]): Limits.
        root (`bool`): Whether root runs it. If so, the supervisor keeps what it takes to become another user.
    """
    python = [_interpreter(), "-I", "-S", "-B", "-c", BOOT]
    readable, links = _readable(config.allow_site_packages), _links()
    devices = [f"/dev/{name}" for name in sandbox_jail.DEVICES]
    capabilities = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL")
    if level == "bubblewrap":
        command = [shutil.which(TOOLS[level]) or TOOLS[level], "--die-with-parent", "--as-pid-1"]
        command += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        if root:
            command += ["--cap-drop", "ALL", *(word for name in capabilities for word in ("--cap-add", name))]
        else:
            command += ["--unshare-user"]
        command += ["--perms", "1777", "--size", str(config.file_bytes), "--tmpfs", "/tmp"]
        # Made here, since bubblewrap makes the folders above private if what is bound is.
        above = dict.fromkeys(str(folder) for path in readable for folder in reversed(Path(path).parents[:-1]))
        command += [word for path in above for word in ("--perms", "0755", "--dir", path)]
        command += [word for path in readable for word in ("--ro-bind", path, path)]
        command += [word for path in devices for word in ("--dev-bind", path, path)]
        command += [word for held, path in links for word in ("--symlink", held, path)]
        return [*command, "--proc", "/proc", "--remount-ro", "/", "--", *python]
    if level == "nsjail":
        user, group = os.geteuid(), os.getegid()
        command = [shutil.which(TOOLS[level]) or TOOLS[level], "--mode", "o", "--quiet", "--time_limit", "0"]
        command += ["--disable_rlimits", "--nice_level", "0", "--cwd", "/", "--user", str(user), "--group", str(group)]
        if root:
            command += ["--disable_clone_newuser", *(word for name in capabilities for word in ("--cap", name))]
        command += ["--mount", f"none:/tmp:tmpfs:size={config.file_bytes},mode=1777"]
        command += [word for path in (*readable, *devices) for word in ("--bindmount_ro", path)]
        command += [word for held, path in links for word in ("--symlink", f"{held}:{path}")]
        return [*command, "--", *python]
    return python


# Users


def _uid_range() -> range:
    """Users that programs may run as: far from all others, or the highest ones of a container that has few."""
    try:
        lines = [[int(word) for word in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except OSError:
        lines = [[0, 0, 2**32 - 1]]
    first, size = max(((line[0], line[2]) for line in lines), key=lambda pair: pair[1])
    if first <= FIRST_UID and FIRST_UID + NUM_UIDS <= first + size:
        return range(FIRST_UID, FIRST_UID + NUM_UIDS)
    # The last two of 65536 are nobody's by convention.
    return range(max(first, first + size - 5000), first + size - 2)


def _claim_uid() -> tuple[int, socket.socket]:
    """A user that no other sandbox of this machine has, and what to close when it is no longer needed."""
    users = _uid_range()
    for _ in range(1000):
        uid = random.Random(os.urandom(8)).choice(users)
        # An abstract socket is a lock that goes with the process.
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0sparrow-trl-sandbox-{uid}")
            return uid, lock
        except OSError:
            lock.close()
    raise SandboxError(f"No user between {users.start} and {users.stop} is free for another sandbox.")


def _process_allowance(level: str, config: SandboxConfig, uid: int | None) -> int:
    """The RLIMIT_NPROC that leaves a program `max_processes`: it counts all processes of one user."""
    if uid is not None:
        return config.max_processes
    kernel = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2] if part.isdigit())
    if level != "rlimits" and kernel >= (5, 14):
        return config.max_processes + 3  # a user namespace counts its own: the supervisor and what starts it
    threads = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if entry.stat().st_uid == os.geteuid():
                    threads += len(os.listdir(f"/proc/{entry.name}/task"))
    # The other programs at work are of this user too.
    return threads + config.max_processes * config.num_workers


# Sandboxes


@cache
def _boot_data() -> bytes:
    modules = []
    for name in MODULES:
        spec = find_spec(f"{__package__}.{name}")
        modules.append((name, spec.loader.get_code(spec.name)))
    data = marshal.dumps(modules)
    return len(data).to_bytes(4, "big") + data


class Sandbox:
    """
    One supervisor and the programs that it runs, one after the other. A context manager; whatever happens inside,
    nothing is running or left behind after it.

    Args:
        config ([`SandboxConfig`]):
            Limits.
        level (`str`):
            Isolation, one that works here.
    """

    def __init__(self, config: SandboxConfig, level: str):
        self.config, self.level = config, level
        self.usable = False
        self._buffer = bytearray()
        self._closing = contextlib.ExitStack()
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        config, level = self.config, self.level
        self.uid, self._process, folder = None, None, "/tmp"
        root = os.geteuid() == 0
        if root:
            self.uid, lock = _claim_uid()
            self._closing.callback(lock.close)
        if level == "rlimits":
            folder = tempfile.mkdtemp(prefix="sparrow-sandbox-")
            self._closing.callback(_remove_folder, folder)
            if root:
                os.chown(folder, self.uid, self.uid)
        errors = self._closing.enter_context(tempfile.TemporaryFile())
        # No preexec_fn: it runs Python in a fork of a process with threads, and CUDA, and may hang there.
        self._process = subprocess.Popen(
            sandbox_command(level, config, root),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            env={},
            cwd="/",
            start_new_session=True,
        )
        self._closing.callback(self._end_process)
        for pipe in (self._process.stdin, self._process.stdout):
            os.set_blocking(pipe.fileno(), False)
        settings = {
            "level": level,
            "own_user": not root,
            "uid": self.uid,
            "folder": folder,
            "folder_bytes": config.file_bytes,
            "output_bytes": config.output_bytes,
            "readable": _readable(config.allow_site_packages),
            "links": _links(),
            "import_paths": _import_paths(config.allow_site_packages),
            "limits": {
                "CPU": config.cpu_seconds,
                "AS": config.memory_bytes,
                "FSIZE": config.file_bytes,
                "NPROC": _process_allowance(level, config, self.uid),
                "NOFILE": 128,
                "CORE": 0,
                "MEMLOCK": 0,
                "MSGQUEUE": 0,
                "STACK": min(config.memory_bytes, 100 * 2**20),
            },
        }
        deadline = time.monotonic() + START_SECONDS
        try:
            self._write(_boot_data(), deadline)
            self._send(b"J", json.dumps(settings).encode(), deadline)
            kind, body = self._receive(deadline)
        except (TimeoutError, EOFError, BrokenPipeError):
            errors.seek(0)
            text = errors.read(4096).decode(errors="replace").strip()
            raise SandboxError(f"The sandbox did not start. {text}".strip()) from None
        self.facts = json.loads(body)
        if failure := self.facts.get("failure"):
            raise SandboxError(f"The sandbox did not start: {failure}")
        self.usable = True

    # Programs

    def run(self, code: str, stdin: str = "", deadline: float = inf) -> Report:
        """
        Run a program as a script.

        Args:
            code (`str`): The program.
            stdin (`str`, *optional*, defaults to `""`): Its standard input.
            deadline (`float`, *optional*, defaults to `inf`): When, by `time.monotonic()`, it must have ended.

        Raises:
            SandboxError: when the sandbox fails.
        """
        self.start(code, None, stdin, deadline)
        return self._report()

    def start(self, code: str, server: str | None, stdin: str = "", deadline: float = inf) -> None:
        """
        Start a program that is going to be asked.

        Args:
            code (`str`): The program, or what its server makes of it.
            server (`str` or `None`): `"callee"` or `"evaluator"`, or `None` for a script.
            stdin (`str`, *optional*, defaults to `""`): Its standard input.
            deadline (`float`, *optional*, defaults to `inf`): When, by `time.monotonic()`, it must have ended.

        Raises:
            SandboxError: when the sandbox has failed before.
        """
        if not self.usable:
            raise SandboxError("This sandbox is no longer usable.")
        now = time.monotonic()
        wall = max(min(self.config.wall_seconds, deadline - now), 0.0)
        self._deadline = now + wall + GRACE_SECONDS if deadline == inf else min(now + wall + GRACE_SECONDS, deadline)
        self._started = now
        self._early: Report | None = None
        request = {"code": code, "server": server, "stdin": stdin, "wall_seconds": wall}
        self._try_send(b"J", json.dumps(request).encode())

    def ask(self, message: bytes) -> bytes | None:
        """
        Send a program's server a message and wait for the answer.

        Args:
            message (`bytes`): The message.

        Returns:
            `bytes`, or `None` when the program has ended.
        """
        self._try_send(b"C", message)
        if self._early is not None:
            return None
        answer = self._next()
        if isinstance(answer, Report):
            self._early = answer
            return None
        return answer

    def end(self) -> Report:
        """End a program that was started, and say how it ended."""
        if self._early is not None:
            return self._early
        self._try_send(b"K", b"")
        return self._report()

    def _report(self) -> Report:
        if self._early is not None:
            return self._early
        while not isinstance(answer := self._next(), Report):
            pass
        return answer

    def _next(self) -> Report | bytes:
        try:
            kind, body = self._receive(self._deadline)
        except (TimeoutError, EOFError):
            return self._stuck()
        if kind == b"C":
            return body
        values = json.loads(body)
        if values.pop("failure"):
            self.close()
            raise SandboxError(f"The sandbox could not start a program: {json.loads(body)['failure']}")
        if not values.pop("all_dead"):
            self.close()
        return Report(**values)

    def _stuck(self) -> Report:
        self.close()
        return Report("", "", None, "stuck", False, time.monotonic() - self._started)

    def _try_send(self, kind: bytes, body: bytes) -> None:
        try:
            self._send(kind, body, self._deadline)
        except (TimeoutError, BrokenPipeError):
            self._early = self._stuck()

    # Frames

    def _send(self, kind: bytes, body: bytes, deadline: float) -> None:
        self._write(kind + len(body).to_bytes(4, "big") + body, deadline)

    def _write(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            events = self._poll(deadline, writing=True)
            if events & select.POLLIN:
                self._fill()  # it may be writing as well, and would not read before that is done
            if events & (select.POLLERR | select.POLLOUT):
                try:
                    view = view[os.write(self._process.stdin.fileno(), view[: 2**16]) :]
                except BlockingIOError:
                    continue

    def _receive(self, deadline: float) -> tuple[bytes, bytes]:
        while len(self._buffer) < 5 or len(self._buffer) < 5 + int.from_bytes(self._buffer[1:5], "big"):
            self._poll(deadline, writing=False)
            if not self._fill():
                raise EOFError("the supervisor has ended")
        size = 5 + int.from_bytes(self._buffer[1:5], "big")
        kind, body = bytes(self._buffer[:1]), bytes(self._buffer[5:size])
        del self._buffer[:size]
        return kind, body

    def _fill(self) -> bool:
        try:
            part = os.read(self._process.stdout.fileno(), 2**20)
        except BlockingIOError:
            return True
        self._buffer += part
        return bool(part)

    def _poll(self, deadline: float, writing: bool) -> int:
        poll = select.poll()
        poll.register(self._process.stdout.fileno(), select.POLLIN)
        if writing:
            poll.register(self._process.stdin.fileno(), select.POLLOUT)
        remaining = deadline - time.monotonic()
        events = 0
        if remaining > 0:
            for _, event in poll.poll(min(remaining, 3600) * 1000):
                events |= event
        if not events:
            raise TimeoutError
        return events

    # The end

    def close(self) -> None:
        """End all that runs in the sandbox, and remove its folder."""
        self.usable = False
        self._closing.close()

    def _end_process(self) -> None:
        process = self._process
        process.stdin.close()  # upon which the supervisor ends its programs and itself
        process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process.wait(END_SECONDS) == 0:
                return
        thread = threading.Thread(target=self._end_for_sure, name="sparrow-sandbox-end", daemon=True)
        thread.start()
        thread.join(END_SECONDS)

    def _end_for_sure(self) -> None:
        process = self._process
        if self.level == "rlimits":
            # Without a supervisor its programs would go on: it is killed only if it does not do its work.
            with contextlib.suppress(subprocess.TimeoutExpired):
                if process.wait(LAST_SECONDS) == 0:
                    return
        if process.poll() is None:
            # A namespace ends with its first process, and that with the process started here.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, 9)
        if self.level == "rlimits" and self.uid is not None:
            _kill_user(self.uid)
        try:
            process.wait(LAST_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning(
                "The process %d of a sandbox was killed but does not end, as when a disk or a driver does not answer.",
                process.pid,
            )

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _remove_folder(folder: str) -> None:
    def remove():
        try:
            sandbox_jail.clear_folder(folder)
            os.rmdir(folder)
        except OSError as error:
            logger.warning("The folder %s of a sandbox could not be removed: %s", folder, error)

    # A disk may be slow, and a program may have made as many files as it could.
    thread = threading.Thread(target=remove, name="sparrow-sandbox-removal", daemon=True)
    thread.start()
    thread.join(END_SECONDS)


def _kill_user(uid: int) -> None:
    """End all processes of a user whose supervisor could not do it."""
    code = f"import os; os.setgroups([]); os.setresgid({uid}, {uid}, {uid}); os.setresuid({uid}, {uid}, {uid})"
    command = [_interpreter(), "-I", "-S", "-c", f"{code}; os.kill(-1, 9)"]
    for _ in range(3):
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                command, env={}, cwd="/", stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=LAST_SECONDS
            )


# The choice


_lock = threading.Lock()
_chosen: dict[tuple[str, bool], Isolation] = {}


@cache
def isolation_problem(level: str) -> str | None:
    """
    Why an isolation does not work here, found by running a program in it, or `None` when it works.

    Args:
        level (`str`): Isolation.
    """
    if not sys.platform.startswith("linux"):
        return "it needs Linux"
    if level in TOOLS and shutil.which(TOOLS[level]) is None:
        return f"there is no {TOOLS[level]} on the PATH"
    try:
        with Sandbox(SandboxConfig(), level) as sandbox:
            report = sandbox.run("import math\nprint(input(), math.floor(1.5))", "ready")
    except (SandboxError, OSError) as error:
        return str(error)
    if report.stdout != "ready 1\n" or report.exit != 0:
        return f"a program that should print did not: {report}"
    return None


def choose_isolation(config: SandboxConfig) -> Isolation:
    """
    The isolation that a configuration asks for, or for `"auto"` the first one that works. It is logged once.

    Args:
        config ([`SandboxConfig`]): The configuration.

    Raises:
        SandboxError: when it does not work here.
    """
    with _lock:
        if (known := _chosen.get(config.isolation)) is not None:
            return known
        unavailable = {}
        for level in LEVELS if config.isolation == "auto" else (config.isolation,):
            problem = isolation_problem(level)
            if problem is None:
                break
            unavailable[level] = problem
        else:
            reasons = " ".join(f"{level}: {problem.rstrip('.')}." for level, problem in unavailable.items())
            raise SandboxError(
                f"Programs cannot be isolated here. {reasons} Install bubblewrap, or choose another isolation "
                f"({', '.join(LEVELS)})."
            )
        gaps = _gaps(level)
        isolation = _chosen[config.isolation] = Isolation(level, gaps, unavailable)
    logger.info("Generated programs are isolated by %s.", level)
    if gaps:
        logger.warning(
            "Generated programs are isolated by %s alone, which does not keep them from %s. %s",
            level,
            ", from ".join(gaps),
            " ".join(f"{other}: {problem.rstrip('.')}." for other, problem in unavailable.items()),
        )
    return isolation


def _gaps(level: str) -> tuple[str, ...]:
    if level != "rlimits":
        return ()
    with Sandbox(SandboxConfig(), level) as sandbox:
        networked = "refused" not in sandbox.run(_SOCKET_PROBE).stdout
        facts, own_user = sandbox.facts, sandbox.uid is not None
    gaps = ["seeing which other processes run"] if not facts["landlock"] else []
    if not facts["landlock"]:
        gaps.append("reading files that everyone may read" if own_user else "reading and changing the trainer's files")
        gaps.append("leaving files in folders that everyone may write to")
    if not own_user and not facts["landlock"]:
        gaps.append("reading the trainer's environment")
    return tuple(gaps + (["the network"] if networked else []))


_SOCKET_PROBE = """
import socket
try:
    socket.socket()
except OSError:
    print("refused")
"""

"""Hostile programs at every isolation that this machine offers: they end, get nothing, and leave nothing."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import pytest
from sandbox_levels import (
    ALL_LEVELS,
    AVAILABLE,
    command_prefix,
    config_of,
    is_unprivileged,
    named_processes,
    run_all_at,
    run_at,
    wait_until,
)

from sparrow_trl import sandbox, sandbox_jail
from sparrow_trl.sandbox import LEVELS, Sandbox, SandboxConfig, SandboxError, choose_isolation, sandbox_command


pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sandboxes need Linux")

at_every_level = pytest.mark.parametrize("level", ALL_LEVELS)
# What wants an answer of the program's gets it only from a right one.
DOUBLE = ["assert double(21) == 42", "assert double(0) == 0"]
ECHO = {"inputs": ["21\n"], "outputs": ["42"]}


@pytest.fixture
def name() -> str:
    """A name for a program's processes, by which they are found."""
    return f"spw{uuid.uuid4().hex[:11]}"


def named(name: str, code: str) -> str:
    return f"import ctypes\nctypes.CDLL(None).prctl(15, b'{name}')\n{code}"


@pytest.fixture(autouse=True)
def folders(monkeypatch, tmp_path_factory):
    """Where the folders of sandboxes are made, of which none is left."""
    tmp_path_factory.getbasetemp()  # made now, elsewhere
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    left = list(folder.iterdir())
    monkeypatch.undo()
    shutil.rmtree(folder)
    assert left == []


@pytest.fixture
def public_folder(folders):
    """A folder that everyone may write to."""
    folder = folders.with_name(f"{folders.name}-public")
    folder.mkdir()
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def test_weakest_level_is_there_and_the_strongest_one_that_works_is_chosen():
    assert "rlimits" in AVAILABLE
    isolation = choose_isolation(SandboxConfig())
    assert isolation.level == AVAILABLE[0]
    assert set(isolation.unavailable) == set(LEVELS[: LEVELS.index(isolation.level)])


# Programs that do not want to end


FOREVER = {
    "busy": "while True: pass",
    "asleep": "import time\ntime.sleep(1000)",
    "closes its output": "import os, time\nos.close(1)\nos.close(2)\ntime.sleep(1000)",
    "ignores signals": "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    "    except OSError: pass\nwhile True: pass",
    "never lets its exit handlers end": "import atexit\natexit.register(lambda: [None for _ in iter(int, 1)])",
    "waits for a thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads": "import threading, time\nwhile True:\n"
    "    try: threading.Thread(target=time.sleep, args=(99,)).start()\n    except RuntimeError: pass",
}


@at_every_level
def test_programs_that_do_not_end_are_ended(level, name):
    started = time.monotonic()
    programs = [named(name, code) for code in FOREVER.values()]
    outcomes = run_all_at(level, programs, ECHO, wall_seconds=1, max_workers=4)
    status = {kind: results[0].status for kind, results in zip(FOREVER, outcomes, strict=True)}
    if status["fork bomb"] == "memory":  # of many processes, where the limit on them is a user's
        status["fork bomb"] = "timeout"
    assert status == dict.fromkeys(FOREVER, "timeout")
    assert time.monotonic() - started < 60
    assert named_processes(name) == []


@pytest.mark.parametrize("level", AVAILABLE)
def test_a_running_program_is_seen_by_the_search_for_those_left(level, name):
    with Sandbox(config_of(level), level) as box:
        thread = threading.Thread(target=box.run, args=(named(name, "import time\ntime.sleep(0.7)"),))
        thread.start()
        assert wait_until(lambda: named_processes(name))
        thread.join()
        assert named_processes(name) == []


@at_every_level
def test_number_of_processes_is_limited(level, name):
    code = """
import os
number = 0
waiting, release = os.pipe()
try:
    while number < 100:
        if os.fork() == 0:
            os.close(release)
            os.read(waiting, 1)
            os._exit(0)
        number += 1
except OSError:
    pass
os.close(release)
for _ in range(number): os.wait()
print(number)
"""
    # Where the limit is on all processes of a user, those of other sandboxes and of the test count as well.
    expected = "9" if os.geteuid() == 0 and not is_unprivileged(level) else None
    results = run_at(level, named(name, code), {"inputs": ["", ""], "outputs": ["9", "9"]}, max_processes=10)
    for result in results:
        assert result.passed if expected else re.search(r"wrote '\d\d?\\n'", result.message), result
    assert named_processes(name) == []


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for descriptor in range(256):
            try: os.close(descriptor)
            except OSError: pass
        time.sleep(1000)
    os._exit(0)
os.wait()
"""


@at_every_level
@pytest.mark.parametrize(
    ("ending", "tests"), [("print(42)", ECHO), ("def double(x): return 2 * x", DOUBLE)], ids=["script", "asserts"]
)
def test_a_daemon_is_ended_and_costs_the_reward(level, ending, tests, name):
    results = run_at(level, named(name, DAEMON + ending), tests)
    assert {result.status for result in results} == {"error"}
    assert "left processes running" in results[0].message
    assert named_processes(name) == []


@pytest.mark.parametrize("level", ALL_LEVELS)
def test_nothing_outlives_a_trainer_that_is_killed(level, name, folders):
    code = f"""
from sparrow_trl.code_runner import run_code_tests
from sparrow_trl.sandbox import SandboxConfig
program = {named(name, DAEMON + "time.sleep(1000)")!r}
run_code_tests(program, {ECHO!r}, SandboxConfig(isolation={level.split("-")[0]!r}, wall_seconds=100, cpu_seconds=99))
"""
    trainer = subprocess.Popen([*command_prefix(level), sys.executable, "-B", "-c", code], cwd="/")
    try:
        assert wait_until(lambda: len(named_processes(name)) >= 2)
    finally:
        trainer.kill()
        trainer.wait()
    assert wait_until(lambda: not named_processes(name))
    for folder in folders.iterdir():  # which nobody is left to remove
        shutil.rmtree(folder)


# Programs that want much


@at_every_level
def test_endless_output_is_cut_off(level):
    programs = [f"import os\nwhile True: os.write({descriptor}, b'42 ' * 10000)" for descriptor in (1, 2)]
    for [result] in run_all_at(level, programs, ECHO, output_bytes=10**6, wall_seconds=30, cpu_seconds=30):
        assert result.status == "output"


@at_every_level
def test_memory_is_limited_for_one_process_and_for_all(level):
    one = "data = bytearray(10**9)\nprint(42)"
    [result] = run_at(level, one, ECHO, memory_bytes=2**27)
    assert result.status == "memory", result
    several = "import os, time\nfor _ in range(3): os.fork()\ndata = b'x' * 10**8\ntime.sleep(4)\nprint(42)"
    [result] = run_at(level, several, ECHO, memory_bytes=2**28, wall_seconds=30)
    assert result.status == "memory", result


DISK = {
    "one file": "with open('a', 'wb') as f:\n    for _ in range(40): f.write(bytes(2**18)); f.flush()",
    "many files": "import time\nfor n in range(40):\n    open(f'a{n}', 'wb').write(bytes(2**18))\ntime.sleep(1)",
    "empty files": "import time\nfor n in range(30000): open(f'a{n}', 'wb').close()\ntime.sleep(1)",
    "in memory": "import os\nf = os.memfd_create('a')\nfor _ in range(40): os.write(f, bytes(2**18))",
}


@at_every_level
def test_disk_is_limited(level):
    programs = [f"{code}\nprint(42)" for code in DISK.values()]
    outcomes = run_all_at(level, programs, ECHO, file_bytes=2**20, wall_seconds=30, cpu_seconds=30, max_workers=4)
    status = {kind: results[0].status for kind, results in zip(DISK, outcomes, strict=True)}
    assert set(status.values()) <= {"error", "files"}, outcomes


@at_every_level
def test_cpu_time_is_limited_even_for_a_program_that_ignores_the_signal(level):
    code = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    [result] = run_at(level, code, ECHO, cpu_seconds=1, wall_seconds=20)
    assert result.status == "timeout" and "cpu_seconds" in result.message


# Programs that reach for what is not theirs


@pytest.fixture
def victim():
    """Factory of a process as of the trainer, with a secret in its environment."""
    processes = []

    def start(level):
        command = [*command_prefix(level), sys.executable, "-c", "print(flush=True)\nimport time\ntime.sleep(600)"]
        process = subprocess.Popen(command, env={"SECRET": "opensesame"}, stdout=subprocess.PIPE, cwd="/")
        process.stdout.readline()
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


@at_every_level
def test_other_processes_are_out_of_reach(level, victim):
    process = victim(level)
    code = f"""
import ctypes, os, resource
pids = [{process.pid}, {os.getpid()}, os.getppid(), 1]
libc = ctypes.CDLL(None, use_errno=True)
for pid in pids:
    for name in ("environ", "mem", "maps", "cwd", "root/etc/passwd", "fd/0"):
        try:
            with open(f"/proc/{{pid}}/{{name}}", "rb") as file:
                if file.read(100): print("read", pid, name)
        except OSError: pass
    if libc.ptrace(16, pid, 0, 0) == 0: print("traced", pid)
    if pid != 1 or {level.startswith("rlimits")}:
        try: resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1)); print("limited", pid)
        except (OSError, ValueError): pass
    for signal in (15, 9):
        try: os.kill(pid, signal); print("sent", pid) if pid in pids[:2] else None
        except OSError: pass
for target in (-1, 0):
    for signal in (15, 9):
        if target == 0: os.setsid() if os.getpgid(0) != os.getpid() else None
        try: os.kill(target, signal) if target else None
        except OSError: pass
print("secret" if os.environ or "SECRET" in str(os.environ) else "done")
"""
    [first, second] = run_at(level, code, {"inputs": ["", ""], "outputs": ["done", "done"]})
    # It reached nothing, and its supervisor lives on to run it again.
    assert (first.status, second.status) == ("passed", "passed"), (first, second)
    assert process.poll() is None


@at_every_level
def test_environment_is_empty(level, monkeypatch):
    monkeypatch.setenv("SECRET", "opensesame")
    code = """
import ctypes, os
print(dict(os.environ), os.popen("env").read().count("SECRET"))
# What the interpreter was started with, which lies behind its six arguments.
place = ctypes.c_void_p.in_dll(ctypes.CDLL(None), "program_invocation_name").value
for _ in range(6): place += len(ctypes.string_at(place)) + 1
while b"=" in (text := ctypes.string_at(place)):
    if not text.startswith(b"PWD=/"): print(text)
    place += len(text) + 1
"""
    [result] = run_at(level, code, {"inputs": [""], "outputs": ["{} 0"]})
    assert result.passed, result


@at_every_level
def test_files_of_others_stay_as_they_are(level, public_folder):
    target, kept = public_folder / "file", public_folder / "kept"
    kept.mkdir()
    for path in (target, kept / "inner"):
        path.write_text("mine")
        path.chmod(0o666)
    kept.chmod(0o777)
    code = f"""
import os
reached = []
def attempt(what, action):
    try:
        action()
        reached.append(what)
    except OSError:
        pass
os.symlink({str(target)!r}, "link")
os.symlink({str(public_folder)!r}, "folder")
attempt("write", lambda: open({str(target)!r}, "w").write("yours"))
attempt("write by a link", lambda: open("link", "w").write("yours"))
attempt("read", lambda: open("folder/file").read())
attempt("create", lambda: open("folder/new", "w").close())
attempt("remove", lambda: os.remove({str(target)!r}))
attempt("hard link", lambda: os.link({str(target)!r}, "hard"))
attempt("list", lambda: os.listdir({str(public_folder)!r}))
attempt("shared memory", lambda: open("/dev/shm/../../var/tmp/sparrow-left", "w").close())
os.makedirs("a/b")
os.symlink({str(kept)!r}, "a/b/link")
os.chmod("a", 0)
print(reached)
"""
    [result] = run_at(level, code, {"inputs": [""], "outputs": ["[]"]})
    assert result.passed, result
    assert target.read_text() == "mine" and (kept / "inner").read_text() == "mine"
    assert sorted(path.name for path in public_folder.iterdir()) == ["file", "kept"]


@at_every_level
def test_there_is_no_network(level):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(type=socket.SOCK_DGRAM) as inbox:
        inbox.bind(("127.0.0.1", 0))
        server.settimeout(0.2)
        inbox.settimeout(0.2)
        code = f"""
import socket
try:
    socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), timeout=2)
    print("connected")
except OSError:
    print("refused")
try:
    socket.socket(type=socket.SOCK_DGRAM).sendto(b"secret", ("127.0.0.1", {inbox.getsockname()[1]}))
except OSError:
    pass
"""
        [result] = run_at(level, code, {"inputs": [""], "outputs": ["refused"]})
        assert result.passed, result
        with pytest.raises(TimeoutError):
            server.accept()
        with pytest.raises(TimeoutError):
            inbox.recv(100)


@at_every_level
def test_privileges_are_gone_for_good(level):
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
done = []
for what in ("os.setuid(0)", "os.setgid(0)", "os.setgroups([0])", "os.chroot('.')", "os.nice(-5)",
             "os.mknod('disk', 0o60600, os.makedev(254, 0))", "os.chown('.', 0, 0)"):
    try: exec(what)
    except OSError: continue
    done.append(what) if "(0)" not in what or os.geteuid() == 0 or "gid" in what else None
for what, call in {"unshare": lambda: libc.unshare(0x10000000),
                   "mount": lambda: libc.mount(b"x", b".", b"tmpfs", 0, 0),
                   "clone": lambda: libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)}.items():
    result = call()
    if what == "clone" and result == 0 and os.getpid() != 1: os._exit(0)
    if result != -1: done.append(what)
print(done)
"""
    [result] = run_at(level, code, {"inputs": [""], "outputs": ["[]"]})
    assert result.passed, result


# The throw-away folder


def test_a_folder_is_cleared_without_recursion_or_links(tmp_path):
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("mine")
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=descriptor)
        inner = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.symlink(outside, "link", dir_fd=descriptor)
    os.close(descriptor)
    (folder / "link").symlink_to(outside)
    (folder / ".moved-1").mkdir()
    (folder / "closed").mkdir()
    (folder / "closed" / "inner").mkdir()
    (folder / "closed" / "file").write_text("x")
    (folder / "closed" / "inner").chmod(0)
    (folder / "closed").chmod(0)
    os.mkfifo(folder / "pipe")
    sandbox_jail.clear_folder(str(folder))
    assert list(folder.iterdir()) == []
    assert (outside / "kept").read_text() == "mine"


@at_every_level
def test_every_program_starts_in_an_empty_folder(level):
    code = """
import os
print(os.listdir("."))
os.makedirs("a/b/c")
open("a/b/file", "w").write("for the next one")
open(".hidden", "w").close()
os.chmod("a/b", 0)
os.chmod("a", 0)
"""
    results = run_at(level, code, {"inputs": [""] * 3, "outputs": ["[]"] * 3})
    assert [result.status for result in results] == ["passed"] * 3, results


@at_every_level
def test_a_deep_folder_is_removed(level):
    code = """
import os
for _ in range(1100):
    os.mkdir("d")
    os.chdir("d")
open("file", "w").close()
os.chdir("/proc/self/cwd" if os.path.exists("/proc/self/cwd") else ".")
print(42)
"""
    results = run_at(level, code, {"inputs": ["", ""], "outputs": ["42", "42"]}, wall_seconds=30)
    # Folders on the disk are counted while the program runs, and so deep ones are refused.
    assert {result.status for result in results} <= {"passed", "files"}, results


# Commands and choices


def test_commands_of_the_tools(monkeypatch):
    config = SandboxConfig(file_bytes=12345678)
    monkeypatch.setattr(sandbox, "_readable", lambda _: ["/usr", "/opt/python/lib"])
    monkeypatch.setattr(sandbox, "_links", lambda: [("usr/lib", "/lib")])
    monkeypatch.setattr(shutil, "which", lambda name: f"/found/{name}")
    command = sandbox_command("bubblewrap", config, root=False)
    text = " ".join(command)
    assert text.startswith("/found/bwrap --die-with-parent --as-pid-1 --unshare-pid --unshare-net --unshare-ipc")
    assert "--unshare-user" in command and "--cap-add" not in command
    assert "--perms 1777 --size 12345678 --tmpfs /tmp" in text
    assert "--perms 0755 --dir /opt --perms 0755 --dir /opt/python --ro-bind /usr /usr" in text
    assert text.index("--remount-ro /") > text.index("--symlink usr/lib /lib")
    command = sandbox_command("bubblewrap", config, root=True)
    assert "--unshare-user" not in command
    assert command[command.index("--cap-drop") :][:2] == ["--cap-drop", "ALL"]
    command = sandbox_command("nsjail", config, root=False)
    text = " ".join(command)
    assert text.startswith("/found/nsjail --mode o --quiet --time_limit 0 --disable_rlimits")
    assert "--disable_clone_newuser" not in command
    assert "--mount none:/tmp:tmpfs:size=12345678,mode=1777 --bindmount_ro /usr --bindmount_ro /opt/python/lib" in text
    assert "--symlink usr/lib:/lib" in text
    assert "--disable_clone_newuser --cap CAP_SETUID" in " ".join(sandbox_command("nsjail", config, root=True))


@pytest.fixture
def forget_choices(monkeypatch):
    monkeypatch.setattr(sandbox, "_chosen", {})
    problem = sandbox.isolation_problem
    problem.cache_clear()
    yield
    problem.cache_clear()


def test_levels_that_do_not_work_are_passed_over_with_their_reasons(forget_choices, monkeypatch, tmp_path, caplog):
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho no permissions to make a namespace >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    real = sandbox.isolation_problem
    monkeypatch.setattr(sandbox, "isolation_problem", lambda level: "none" if level == "namespaces" else real(level))
    with caplog.at_level("INFO", logger="sparrow_trl.sandbox"):
        isolation = choose_isolation(SandboxConfig())
        choose_isolation(SandboxConfig())
    assert isolation.level == "rlimits"
    assert "no permissions to make a namespace" in isolation.unavailable["bubblewrap"]
    assert isolation.unavailable["nsjail"] == "there is no nsjail on the PATH"
    assert len([record for record in caplog.records if "isolated by rlimits" in record.message]) == 1 + bool(
        isolation.gaps
    )
    with pytest.raises(SandboxError, match="no permissions to make a namespace.*Install bubblewrap"):
        choose_isolation(SandboxConfig(isolation="bubblewrap"))


def test_gaps_of_the_weakest_level_are_told(forget_choices, monkeypatch, caplog):
    class Bare(Sandbox):
        facts = {"landlock": False, "scoped": False}

        def __init__(self, config, level):
            self.uid = None

        def run(self, code):
            return sandbox.Report("", "", 0, None, False, 0.0)

        def close(self):
            pass

    monkeypatch.setattr(sandbox, "isolation_problem", lambda level: None)
    monkeypatch.setattr(sandbox, "Sandbox", Bare)
    isolation = choose_isolation(SandboxConfig(isolation="rlimits"))
    assert "the network" in isolation.gaps and "reading and changing the trainer's files" in isolation.gaps
    [record] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "does not keep them from" in record.message and "the network" in record.message


def test_a_supervisor_that_dies_is_no_verdict_of_programs():
    level = AVAILABLE[-1]
    with Sandbox(config_of(level), level) as box:
        box._process.send_signal(signal.SIGKILL)
        report = box.run("print(42)")
        assert report.reason == "stuck" and not box.usable
        with pytest.raises(SandboxError, match="no longer usable"):
            box.run("print(42)")


def test_the_call_ends_when_a_supervisor_does_not_answer(monkeypatch):
    monkeypatch.setattr(sandbox, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(sandbox, "END_SECONDS", 0.5)
    monkeypatch.setattr(sandbox, "LAST_SECONDS", 1)
    level = AVAILABLE[-1]
    started = time.monotonic()
    with Sandbox(config_of(level, wall_seconds=0.5), level) as box:
        box._process.send_signal(signal.SIGSTOP)
        assert box.run("print(42)").reason == "stuck"
    assert wait_until(lambda: box._process.poll() == -signal.SIGKILL)
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filters_of_system_calls_are_whole_instructions(machine):
    program = sandbox_jail.seccomp_filter(machine, signals=False)
    assert len(program) % 8 == 0 and len(program) // 8 < 4096
    assert len(program) > len(sandbox_jail.seccomp_filter(machine, signals=True))
    assert sandbox_jail.seccomp_filter("riscv64", signals=True) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cpu_seconds": 0}, "cpu_seconds must be an integer of at least 1, but it is 0"),
        ({"wall_seconds": "9"}, "wall_seconds must be a number"),
        ({"memory_bytes": 1000}, "memory_bytes must be an integer between"),
        ({"max_workers": 0}, "max_workers"),
        ({"isolation": "docker"}, "isolation must be .* but it is 'docker'"),
        ({"allow_site_packages": 1}, "allow_site_packages must be True or False"),
    ],
)
def test_configurations_are_checked(values, message):
    with pytest.raises(ValueError, match=message):
        SandboxConfig(**values)


def test_workers_share_the_cores_of_the_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert SandboxConfig().num_workers == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert SandboxConfig().num_workers == 2
    assert SandboxConfig(max_workers=5).num_workers == 5

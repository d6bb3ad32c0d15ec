"""
What a process does to itself before it runs a program that is not trusted: namespaces, limits, another user, Landlock
and seccomp, all through the C library.

The standard library alone is used, since this runs in a process of its own that imports nothing else of the package.
"""

import ctypes
import os
import resource
import stat
import struct
from collections.abc import Iterable, Sequence


_libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_NEWTIME = 0x00000080

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_NOATIME, MS_NODIRATIME, MS_BIND = 32, 1024, 2048, 4096
MS_REC, MS_PRIVATE, MS_RELATIME = 16384, 1 << 18, 1 << 21
MNT_DETACH = 2

# Files in the jail's /dev, how many files its folder may hold, and how deep folders in it are counted.
DEVICES = ("null", "zero", "full", "random", "urandom")
MAX_FILES = 10_000
MAX_FOLDER_DEPTH = 50


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def set_process_option(option: int, value: int) -> None:
    """Call prctl(2) with an `option` (`int`) and its `value` (`int`)."""
    _checked(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl({option})")


# Limits and users


def set_limits(limits: dict[str, int]) -> None:
    """
    Lower resource limits, both the soft and the hard ones.

    Args:
        limits (`dict[str, int]`): Values by name without `RLIMIT_`, such as `AS`.
    """
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # The soft limit on CPU time ends a program by SIGXCPU, which it may ignore, the hard one by SIGKILL.
        resource.setrlimit(kind, (value, value + (name == "CPU" and value != hard)))


def become_user(uid: int) -> None:
    """Become a user, `uid` (`int`), and its group for good, without the capabilities of the present one."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def drop_capabilities() -> None:
    """Give up all capabilities, which a new user namespace gives even to ordinary users."""
    header = struct.pack("Ii", 0x20080522, 0)
    _checked(_libc.capset(header, bytes(24)), "capset")


# Files


_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def clear_folder(folder: str) -> None:
    """
    Remove all that is in a folder, however deep, without following links, also from folders without permissions.
    Nobody else may be writing to it.

    Args:
        folder (`str`): The folder, which stays.
    """
    here = _open_folder(folder)
    # Of each folder from the first one down to this one: its name, and the folders in it that are left.
    trail = [(None, _remove_files(here))]
    try:
        while True:
            name, folders = trail[-1]
            if folders:
                inner = folders.pop()
                below = _open_folder(inner, here)
                os.fchmod(below, 0o700)  # not of the folder itself, whose mode may be another user's to change
                os.close(here)
                here = below
                trail.append((inner, _remove_files(here)))
                continue
            trail.pop()
            if not trail:
                return
            # One descriptor at a time, so that no depth is too large.
            above = os.open("..", _FOLDER_FLAGS, dir_fd=here)
            os.close(here)
            here = above
            os.rmdir(name, dir_fd=here)
    finally:
        os.close(here)


def _open_folder(name: str, folder: int | None = None) -> int:
    """Open a folder to empty it. Root never changes what a name stands for, which may have become a link."""
    try:
        return os.open(name, _FOLDER_FLAGS, dir_fd=folder)
    except PermissionError:  # root is refused nothing
        os.chmod(name, 0o700, dir_fd=folder)
        return os.open(name, _FOLDER_FLAGS, dir_fd=folder)


def _remove_files(folder: int) -> list[str]:
    """Remove what is no folder, and return the names of those that are."""
    folders = []
    for name in os.listdir(folder):
        if stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
            folders.append(name)
        else:
            os.unlink(name, dir_fd=folder)
    return folders


def folder_size(folder: str, most: int) -> int:
    """
    Bytes on the disk that a folder takes, counted until they are too many; so are more than 10,000 files, and folders
    more than 50 deep, which would take long to count.

    Args:
        folder (`str`): The folder.
        most (`int`): How many bytes are not too many yet.
    """
    total = files = 0
    waiting = [(folder, 0)]
    while waiting and total <= most:
        path, depth = waiting.pop()
        try:
            entries = list(os.scandir(path))
        except OSError:  # removed meanwhile, or a path that is too long
            continue
        files += len(entries)
        if files > MAX_FILES or depth > MAX_FOLDER_DEPTH:
            return most + 1
        for entry in entries:
            try:
                total += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, depth + 1))
            except OSError:
                continue
    return total


# Landlock


_FILE_READ = 1 << 2 | 1 << 0  # read and execute
_FILE_WRITE = 1 << 1 | 1 << 14 | 1 << 15  # write, truncate, ioctl
_DIR_READ = 1 << 3
_DIR_WRITE = sum(1 << bit for bit in (4, 5, 7, 8, 9, 10, 12, 13))  # all but device files


def landlock_version() -> int:
    """Version of the kernel's Landlock, 0 without it."""
    return max(_libc.syscall(444, None, ctypes.c_size_t(0), 1), 0)


def restrict_files(readable: Iterable[int], devices: Iterable[int], writable: Iterable[int]) -> None:
    """
    Forbid this process and its descendants all files but some, TCP, and signals to processes outside (as far as the
    kernel's version of Landlock can).

    Args:
        readable (`Iterable[int]`): Descriptors of files and folders to read and execute.
        devices (`Iterable[int]`): Descriptors of files to read and write.
        writable (`Iterable[int]`): Descriptors of folders to do everything in.
    """
    version = landlock_version()
    known = (1 << (13 if version < 2 else 14 if version < 3 else 15 if version < 5 else 16)) - 1
    attributes = struct.pack("QQQ", known, 0b11, 0b11)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = _checked(_libc.syscall(444, attributes, ctypes.c_size_t(len(attributes)), 0), "landlock")
    read, write = _FILE_READ | _DIR_READ, _FILE_READ | _FILE_WRITE | _DIR_READ | _DIR_WRITE
    for descriptors, rights in ((readable, read), (devices, _FILE_READ | _FILE_WRITE), (writable, write)):
        for descriptor in descriptors:
            if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                rights_here = rights & (_FILE_READ | _FILE_WRITE)
            else:
                rights_here = rights
            rule = struct.pack("=Qi", rights_here & known, descriptor)
            _checked(_libc.syscall(445, rules, 1, rule, 0), "landlock_add_rule")
    _checked(_libc.syscall(446, rules, 0), "landlock_restrict_self")
    os.close(rules)


# Seccomp


# Numbers of system calls on x86_64 and aarch64. They are no part of what a program that solves a task does, and reach
# other processes, the network, the kernel, or memory that no limit counts.
_FORBIDDEN = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "io_uring_setup": (425, 425),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "request_key": (249, 218),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "semget": (64, 190),
    "setns": (308, 268),
    "setpriority": (141, 140),
    "shmget": (29, 194),
    "socket": (41, 198),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
# Those that send signals, forbidden where nothing else keeps them from the trainer.
_SIGNALS = {
    "kill": (62, 129),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "tgkill": (234, 131),
    "tkill": (200, 130),
}
_CLONE, _CLONE3, _PRLIMIT = (56, 220), (435, 435), (302, 261)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_ALLOW, _REFUSE, _ABSENT = 0x7FFF0000, 0x00050001, 0x00050026  # the latter as EPERM and as ENOSYS
_NAMESPACES = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06


def seccomp_filter(machine: str, signals: bool) -> bytes | None:
    """
    Filter that refuses, with EPERM, the system calls that no solution of a task needs.

    Args:
        machine (`str`): Name of the architecture, as `os.uname()` gives it.
        signals (`bool`): Whether signals may be sent.

    Returns:
        `bytes`: the filter, or `None` for an architecture whose numbers are not known here.
    """
    if machine not in _ARCHITECTURES:
        return None
    column, architecture = _ARCHITECTURES[machine]
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _REFUSE), (_LOAD, 0, 0, 0)]
    if machine == "x86_64":
        lines += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _REFUSE)]  # the x32 variants of all calls
    calls = _FORBIDDEN if signals else {**_FORBIDDEN, **_SIGNALS}
    for numbers in calls.values():
        lines += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _REFUSE)]
    # The flags of clone3 lie in memory, out of a filter's sight; without it the C library uses clone.
    lines += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ABSENT)]
    lines += [(_EQUAL, 0, 3, _CLONE[column]), (_LOAD, 0, 0, 16), (_ANY_BIT, 0, 1, _NAMESPACES)]
    lines += [(_RETURN, 0, 0, _REFUSE), (_LOAD, 0, 0, 0)]
    # Limits of oneself alone.
    lines += [(_EQUAL, 0, 3, _PRLIMIT[column]), (_LOAD, 0, 0, 16), (_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _REFUSE)]
    lines += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def restrict_calls(program: bytes | None) -> bool:
    """
    Refuse system calls to this process and its descendants.

    Args:
        program (`bytes`, *optional*): What [`seccomp_filter`] returned.

    Returns:
        `bool`: whether the kernel and the architecture allow that.
    """
    if program is None:
        return False
    buffer = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    return _libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), described, 0, 0) == 0


# Namespaces


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [text if text is None else os.fsencode(text) for text in (source, target, kind)]
    data = None if options is None else options.encode()
    _checked(_libc.mount(*texts, ctypes.c_ulong(flags), data), f"mount on {target}")


def _make_read_only(target: str) -> None:
    """Make a mount and those below it read-only."""
    attributes = struct.pack("QQQQ", MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    if _libc.syscall(442, -100, os.fsencode(target), 0x8000, attributes, ctypes.c_size_t(len(attributes))) == 0:
        return
    # Before Linux 5.12 one mount at a time, with the flags that it has already, which may not be taken away.
    flags = os.statvfs(target).f_flag
    kept = flags & (MS_NOEXEC | MS_NOATIME | MS_NODIRATIME) | (MS_RELATIME if flags & 4096 else 0)
    _mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | kept)


def enter_namespaces(
    readable: Sequence[str], links: Sequence[tuple[str, str]], folder_bytes: int, own_user: bool
) -> None:
    """
    Move to new namespaces, with a root folder of their own, in which this process goes on as the first one. The
    process that called waits for it and ends with it.

    Args:
        readable (`Sequence[str]`):
            Folders and files that are there, for reading only.
        links (`Sequence[tuple[str, str]]`):
            Symbolic links that are there: what they hold, and their path.
        folder_bytes (`int`):
            Size of `/tmp`, the one folder to write in.
        own_user (`bool`):
            Whether to make a user namespace too, without which the others need the capability to make them.
    """
    uid, gid = os.geteuid(), os.getegid()
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    _checked(_libc.unshare(flags | (CLONE_NEWUSER if own_user else 0)), "unshare")
    if own_user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    alive, alive_end = os.pipe()
    child = os.fork()
    if child:
        # Only the child holds the pipes to the trainer, which so sees when it ends, and the other way round.
        os.closerange(0, alive)
        os.close(alive)
        os.waitpid(child, 0)
        os._exit(0)
    set_process_option(PR_SET_PDEATHSIG, 9)
    os.close(alive_end)
    os.set_blocking(alive, False)
    try:
        if os.read(alive, 1) == b"":
            os._exit(1)  # the parent ended before the signal was asked for
    except BlockingIOError:
        pass
    os.close(alive)

    os.umask(0o022)
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    # Mounted by descriptor, since the new root may hide a path.
    sources = {path: os.open(path, os.O_PATH) for path in readable}
    devices = {name: os.open(f"/dev/{name}", os.O_PATH) for name in DEVICES}
    root = "/tmp"
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for name in ("proc", "dev", "tmp"):
        os.mkdir(f"{root}/{name}")
    options = f"size={folder_bytes},nr_inodes={MAX_FILES},mode=1777"
    _mount("tmpfs", f"{root}/tmp", "tmpfs", MS_NOSUID | MS_NODEV, options)
    for path, source in sources.items():
        target = root + path
        if stat.S_ISDIR(os.fstat(source).st_mode):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            open(target, "x").close()
        _mount(f"/proc/self/fd/{source}", target, None, MS_BIND | MS_REC)
        _make_read_only(target)
        os.close(source)
    for name, source in devices.items():
        open(f"{root}/dev/{name}", "x").close()
        _mount(f"/proc/self/fd/{source}", f"{root}/dev/{name}", None, MS_BIND)
        os.close(source)
    for held, path in links:
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(held, root + path)
    try:
        _mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    except OSError:
        pass  # a container that hides parts of its own /proc does not allow a whole one; programs can do without
    os.chdir(root)
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(f"the number of pivot_root on {machine} is not known")
    number = _FORBIDDEN["pivot_root"][_ARCHITECTURES[machine][0]]
    _checked(_libc.syscall(number, b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", MNT_DETACH), "umount")
    _mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir("/tmp")

"""The system calls that untrusted code may not make, as a seccomp filter for `bwrap --seccomp`.

A filter is a program in classic BPF, which the kernel runs at each system call; see
https://www.kernel.org/doc/html/latest/userspace-api/seccomp_filter.html.
"""

import errno
import platform
import socket
import struct
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""How the kernel names them, AUDIT_ARCH_*."""
_DENIED: Mapping[str, Sequence[int]] = tomllib.loads(
    Path(__file__).with_name("seccomp.toml").read_text(encoding="utf-8")
)
"""Their numbers on x86_64 and on aarch64."""
_CLONE, _CLONE3, _SOCKET, _SOCKETPAIR, _IOCTL = (56, 220), 435, (41, 198), (53, 199), (16, 29)
_NEW_NAMESPACES = 0x7E020000
"""Flags of clone."""
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, getattr(socket, "AF_NETLINK", 16))
"""Of sockets: those that a namespace of the network holds."""
_INJECTING = (0x5412, 0x541C)
"""Of ioctl, TIOCSTI and TIOCLINUX: they type into the caller's terminal."""
_X32 = 0x40000000
"""Bit of another set of numbers on x86_64."""
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in what the kernel shows a filter; each argument has eight bytes."""
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
Line = tuple[int, int, int, int]
"""Operation, lines to skip if it holds and if not, operand."""


def keyctl_number() -> int | None:
    """The number of the system call keyctl; None on an architecture that this module lacks."""
    column = _column()
    return None if column is None else _DENIED["keyctl"][column]


def program() -> bytes | None:
    """The filter; None on an architecture that this module lacks.

    A denied call fails with an error, as where the kernel lacks it or the process has no right to
    it: libraries that try one go on.
    """
    column = _column()
    if column is None:
        return None
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[platform.machine()]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if column == 0:
        lines += [(_AT_LEAST, 0, 1, _X32), _fail(errno.ENOSYS)]
    for numbers in _DENIED.values():
        lines += [(_EQUAL, 0, 1, numbers[column]), _fail(errno.EPERM)]
    # Its flags lie in memory, which a filter cannot read: libraries take clone instead.
    lines += [(_EQUAL, 0, 1, _CLONE3), _fail(errno.ENOSYS)]
    flags = [(_ANY_BIT, 0, 1, _NEW_NAMESPACES), _fail(errno.EPERM)]
    lines += _call(_CLONE[column], 0, flags)
    others = [(_EQUAL, len(_FAMILIES) - i, 0, int(f)) for i, f in enumerate(_FAMILIES)]
    for numbers in (_SOCKET, _SOCKETPAIR):
        lines += _call(numbers[column], 0, [*others, _fail(errno.EAFNOSUPPORT)])
    typed = [line for one in _INJECTING for line in ((_EQUAL, 0, 1, one), _fail(errno.EPERM))]
    lines += [*_call(_IOCTL[column], 1, typed), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _column() -> int | None:
    """Of `_DENIED`."""
    names = list(_ARCHITECTURES)
    known = platform.machine() in names and sys.maxsize > 2**32
    return names.index(platform.machine()) if known else None


def _call(number: int, argument: int, checks: Sequence[Line]) -> list[Line]:
    """Checks of one call by its argument's lower half; what they let pass is allowed."""
    load = (_LOAD, 0, 0, _ARGUMENTS + 8 * argument)
    return [(_EQUAL, 0, len(checks) + 2, number), load, *checks, (_RETURN, 0, 0, _ALLOW)]


def _fail(number: int) -> Line:
    return (_RETURN, 0, 0, _ERROR | number)

"""Forks processes from a server that has imported their framework, which takes longer than most tests.

``python -I -S tests/fork_server.py SOCKET MODULE ...`` does the same as ``python -m MODULE ...``, and with
a script instead of the module the same as ``python SCRIPT ...``, in a process forked from the server, with
the caller's environment, folder and standard streams. The caller passes signals on to that process and
ends with its status; if the caller is killed, the server kills the process. The process runs what is
registered with ``atexit``, and then leaves its objects to the system: to free them all takes a quarter of
a second, because it copies the server's memory.

This file imports little, because every call imports it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Sequence

_STREAMS = (0, 1, 2)
_WAKING = (signal.SIGCHLD, signal.SIGTERM)


def serve(path: str, modules: Sequence[str]) -> None:
    """Serves calls until standard input ends or SIGTERM comes; a forked process runs the call's program.

    Args:
        path: the socket's path; calls wait until the modules are imported.
        modules: the names of the modules to import.
    """
    end = _End()
    atexit.register(end)  # Before the modules register theirs: it runs after them.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}.new")
        listener.listen(64)
        os.rename(f"{path}.new", path)  # A caller that finds the path can connect.
        for module in modules:
            importlib.import_module(module)
        # Garbage collections in the processes need not traverse, and thereby copy, the modules' objects.
        gc.collect()
        gc.freeze()
        call = _Server(listener).run()
    if call is not None:
        with end:
            call.run()


class _End:
    """Remembers how a program ended, and ends its process so when called."""

    def __init__(self) -> None:
        self._status: int | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        code = error.code if isinstance(error, SystemExit) else None if kind is None else 1
        # Python ends by a signal itself.
        if kind is not KeyboardInterrupt:
            self._status = code if isinstance(code, int) else int(code is not None)

    def __call__(self) -> None:
        if self._status is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._status)


class _Call:
    """A caller's request: a line of JSON and the caller's standard streams.

    Args:
        connection: the connection to the caller.
    """

    def __init__(self, connection: socket.socket) -> None:
        text, self._streams, _, _ = socket.recv_fds(connection, 1 << 16, len(_STREAMS))
        while not text.endswith(b"\n"):
            text += connection.recv(1 << 16)
        self._asked = json.loads(text)

    def close(self) -> None:
        for stream in self._streams:
            os.close(stream)

    def run(self) -> None:
        """Runs the requested program in this process, in a session of its own."""
        os.setsid()
        for stream, number in zip(self._streams, _STREAMS, strict=True):
            os.dup2(stream, number)
        self.close()
        os.environ.clear()
        os.environ.update(self._asked["environment"])
        os.chdir(self._asked["folder"])
        program, *sys.argv[1:] = self._asked["command"]
        if program.endswith(".py"):
            sys.argv[0] = program
            paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
            sys.path[:1] = [os.path.dirname(os.path.abspath(program)), *filter(None, paths)]
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)


class _Server:
    """Forks a process for each call, and sends the caller its exit status.

    Args:
        listener: the socket that callers connect to.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._callers: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._ended, waking = socket.socketpair()
        self._ended.setblocking(False)
        waking.setblocking(False)
        self._waking = waking
        for number in _WAKING:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(waking.fileno())
        for source in (sys.stdin, listener, self._ended):
            self._selector.register(source, selectors.EVENT_READ)

    def run(self) -> _Call | None:
        """Serves calls; returns the call in a process forked for it, and None in the server at the end."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is sys.stdin:
                    return self._end()
                if key.fileobj is self._listener:
                    call = self._accept()
                    if call is not None:
                        return call
                elif key.fileobj is self._ended:
                    # The system sends SIGTERM when the process that started the server is killed.
                    if signal.SIGTERM in self._ended.recv(1 << 10):
                        return self._end()
                    self._reap()
                elif key.data in self._callers:
                    # The caller has been killed, and its process still runs: it is in the list.
                    _kill(key.data)
                    self._selector.unregister(key.fileobj)

    def _accept(self) -> _Call | None:
        connection, _ = self._listener.accept()
        call = _Call(connection)
        process = os.fork()
        if process == 0:
            signal.set_wakeup_fd(-1)
            for number in _WAKING:
                signal.signal(number, signal.SIG_DFL)
            self._selector.close()
            for one in (connection, self._ended, self._waking, *self._callers.values()):
                one.close()
            return call
        call.close()
        _tell(connection, process)
        self._callers[process] = connection
        self._selector.register(connection, selectors.EVENT_READ, process)
        return None

    def _end(self) -> None:
        """Kills the processes that still run: a killed test ends none of them itself."""
        for process in self._callers:
            _kill(process)

    def _reap(self) -> None:
        while self._callers:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            connection = self._callers.pop(process)
            if connection in self._selector.get_map():
                self._selector.unregister(connection)
                _tell(connection, os.waitstatus_to_exitcode(status))
            connection.close()


def _kill(process: int) -> None:
    """Kills a forked process and its session."""
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:  # The process has no session of its own yet.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _tell(connection: socket.socket, number: int) -> None:
    """Sends a number to a caller, unless the caller has been killed."""
    with contextlib.suppress(ConnectionError):
        connection.sendall(b"%d\n" % number)


def call(path: str, command: Sequence[str]) -> int:
    """Runs a program through a server and waits for its end.

    Args:
        path: the path of the server's socket.
        command: a module or a script, and its arguments.

    Returns:
        The exit status, or minus the number of the signal that ended the process.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        asked = {"command": command, "environment": dict(os.environ), "folder": os.getcwd()}
        text = json.dumps(asked).encode() + b"\n"
        sent = socket.send_fds(connection, [text], list(_STREAMS))
        connection.sendall(text[sent:])
        with connection.makefile() as answers:
            process = int(answers.readline())
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, lambda number, _: os.killpg(process, number))
            return int(answers.readline())


def _main(path: str, *command: str) -> int:
    status = call(path, command)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))

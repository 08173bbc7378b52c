"""The end of a command's process, and the effect of a signal on it; `docs/cli.md` has the rule.

The first request to end is an exception in the main thread, so that what is under way is ended and recorded. A thread
looks on: where the main thread is somewhere that no exception reaches, or asked again, it ends the process itself.
"""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

# The last line of a command that a signal ends.
WORDS = {
    getattr(signal, name): text
    for name, text in (("SIGINT", "interrupted"), ("SIGTERM", "terminated"), ("SIGHUP", "hung up"))
    if hasattr(signal, name)
}
INTERRUPTED, BROKEN_PIPE = 130, 141
# One request may be sent twice: to the process and to its group, by a shell and by the terminal that is closed.
AGAIN_S = 0.5
# The time to end running work after SIGTERM or SIGHUP; SIGKILL may soon follow from the sender.
GRACE_S = 5.0
# For a child that was killed, or has nothing left to do.
REAP_S = 1.0
# Until a signal is sent again whose exception was dropped; less than `AGAIN_S`.
RETRY_S = 0.05


class Listener:
    """The handler of the signals that end a command. `first` is the number of the first signal, or None."""

    def __init__(self) -> None:
        self.first: int | None = None
        self._asked_at = 0.0
        self._said = False
        self._raised = False
        self._done = False
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)

    def start(self, *, watched: bool) -> None:
        """Handle signals, but for signals that the process was started to ignore (nohup, a shell's background).

        watched: with the thread that ends the process where it is asked twice, or does not end.
        """
        for number in WORDS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._take)
        sys.unraisablehook = self._ask_again
        if watched:
            self._thread.start()
            signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)

    def stop(self) -> None:
        """Let the thread end."""
        if not self._thread.is_alive():
            return
        signal.set_wakeup_fd(-1)
        os.write(self._writes, b"\0")
        self._thread.join()

    def finish(self) -> None:
        """Ignore signals from now on, unless one comes twice."""
        self._done = True

    def say(self, number: int) -> None:
        """Say once that a signal ended the command."""
        if not self._said:
            self._said = True
            # Not through Python's buffer: another thread may be within it.
            os.write(2, f"{WORDS[number]}\n".encode())

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self._done or (self._raised and self._thread.is_alive()):
            return  # whoever asks again is answered by the thread
        self._raised = True
        self.first = self.first or number
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    def _ask_again(self, ignored: sys.UnraisableHookArgs) -> None:
        """Send a signal again whose exception came in a destructor or a callback, where Python drops it."""
        if self.first is None or not isinstance(ignored.exc_value, KeyboardInterrupt | SystemExit):
            sys.__unraisablehook__(ignored)
            return
        self._raised = False
        timer = threading.Timer(RETRY_S, os.kill, (os.getpid(), self.first))
        timer.daemon = True
        timer.start()

    def _watch(self) -> None:
        """Read every signal as it arrives, even while the main thread does not return to Python."""
        deadline: float | None = None
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._reads], [], [], left)[0]:
                self._end_now()
            for number in os.read(self._reads, 64):
                if number == 0:
                    return
                if number not in WORDS:
                    continue  # an alarm
                now = time.monotonic()
                if self._asked_at and now - self._asked_at > AGAIN_S:
                    self._end_now()
                self._asked_at = self._asked_at or now
                self.first = self.first or number
                if number != signal.SIGINT and deadline is None:
                    deadline = now + GRACE_S

    def _end_now(self) -> NoReturn:
        number = self.first or signal.SIGTERM
        with suppress(OSError):
            self.say(number)
        # Children end with this process; nobody waits for them.
        os._exit(128 + number)


_listener: Listener | None = None


@contextmanager
def listening() -> Iterator[Listener]:
    """Take signals from `hear` on while the context lasts; in a process of its own, since handlers stay.

    Not among the ranks that torchrun started: it sends more than one signal, and the team finds out what they mean.
    """
    global _listener
    # Signals that come while handlers are set up wait until `hear`.
    signal.pthread_sigmask(signal.SIG_BLOCK, WORDS)
    _listener = listener = Listener()
    listener.start(watched=not is_rank())
    try:
        yield listener
    finally:
        listener.stop()


def hear() -> None:
    """Unblock signals in this process; signals that came before are raised here."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WORDS)


def came() -> int | None:
    """Return the signal that asked this command to end, or None."""
    return None if _listener is None else _listener.first


def say(number: int) -> None:
    """Say in a line that a signal ended the command."""
    if _listener is None:
        sys.stderr.write(f"{WORDS[number]}\n")
    else:
        _listener.say(number)


def is_rank() -> bool:
    """Return whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


class OutputFailure(Exception):
    """Standard output cannot be written. No `OSError`: libraries would take a broken pipe for their own business."""

    def __init__(self, number: int) -> None:
        super().__init__(number)  # a process that it is sent to calls the class with this
        self.broken_pipe = number == errno.EPIPE
        self._reason = os.strerror(number).lower()

    def __str__(self) -> str:
        """Return the reason."""
        return self._reason


class _Output(io.FileIO):
    """Standard output below all buffers."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OutputFailure(error.errno or errno.EIO) from None


def open_standard_streams() -> None:
    """Let no file of ours take the place of a standard stream that is closed, and print whatever a name holds."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    watch_output()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def watch_output() -> None:
    """Let standard output raise `OutputFailure` where it cannot be written; in a forked process once more."""
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Output(1, "w", closefd=False)),
        encoding=getattr(sys.stdout, "encoding", None) or "utf-8",
        errors="backslashreplace",
        line_buffering=os.isatty(1),
    )


def end_children() -> None:
    """Kill all processes below this one, but for multiprocessing's tracker, and wait for their ends."""
    import psutil

    tracker = _tracker()
    children = [child for child in psutil.Process().children(recursive=True) if child.pid != tracker]
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, REAP_S)


def end_tracker() -> None:
    """End multiprocessing's resource tracker, and wait for it."""
    process = _tracker()
    if process is not None:
        import psutil

        tracker = sys.modules["multiprocessing.resource_tracker"]._resource_tracker
        os.close(tracker._fd)
        tracker._fd = tracker._pid = None
        with suppress(psutil.Error):
            psutil.Process(process).wait(REAP_S)


def _tracker() -> int | None:
    module = sys.modules.get("multiprocessing.resource_tracker")
    tracker = getattr(module, "_resource_tracker", None)
    return getattr(tracker, "_pid", None) if getattr(tracker, "_fd", None) is not None else None

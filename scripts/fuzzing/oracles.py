"""Oracles of a command's end and output: rules that hold for every command and all arguments."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.fuzzing.running import CommandOutcome

# One line of an error is to be read.
LONGEST_LINE = 1500
_CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_FRAME = re.compile(r'File "([^"]+)", line \d+,? in (\S+)')
_RAISED = re.compile(r"([\w.]+)(: |$)")
_WARNING = re.compile(r"^\S+:\d+: \w*Warning|^Exception ignored in|: resource_tracker:", re.MULTILINE)


@dataclass(frozen=True)
class Finding:
    """A violation of an oracle by a command."""

    oracle: str
    detail: str  # tells findings of one oracle apart, and says nothing of the case
    words: str

    @property
    def key(self) -> str:
        """The identity of a defect, which its findings share."""
        return f"{self.oracle}: {self.detail}"


def judge(outcome: CommandOutcome, stop: signal.Signals | None, *, damaged: bool) -> Iterator[Finding]:
    """Yield the findings in a command's end and output."""
    last = (outcome.errors.strip().splitlines() or [""])[-1]
    if outcome.timed_out:
        yield Finding("does not end", _frame(outcome.errors) or command_of(outcome), last)
        return
    sent = stop if outcome.stopped else None
    if sent == signal.SIGTERM and outcome.code == -sent and not outcome.output and not outcome.errors:
        return  # it came before the application has set what is done about it
    if "Traceback (most recent call last)" in outcome.errors:
        yield Finding("traceback", _frame(outcome.errors), last[:300])
    else:
        yield from _unexpected_code(outcome, sent, last, damaged=damaged)
        yield from _wrong_messages(outcome, sent, last)
    yield from _steering(outcome)
    for line in outcome.orphans:
        yield Finding("left a process", f"{command_of(outcome)}: {shape(line)}", line)
    if outcome.ran and not any(
        part in argument for argument in outcome.arguments for part in ("tripwire:", "runtime:")
    ):
        yield Finding(
            "ran code", f"{command_of(outcome)}: {outcome.ran.splitlines()[0]}", "the tripwire was imported"
        )


def typed_command(outcome: CommandOutcome) -> tuple[str, ...]:
    """Return the arguments without the mark that ends options, which may stand before a command's name."""
    return tuple(argument for argument in outcome.arguments if argument != "--")


def command_of(outcome: CommandOutcome) -> str:
    """Return the names of the command, without its arguments."""
    return " ".join(name for name in outcome.arguments[:2] if re.fullmatch("[a-z]+", name))


def shape(text: str) -> str:
    """Return a text without its numbers, paths and quoted words."""
    return re.sub(r"'[^']*'|\S*/\S*|[0-9a-f]{8,}|\d+", "~", text)[:80]


def _unexpected_code(
    outcome: CommandOutcome, sent: signal.Signals | None, last: str, *, damaged: bool
) -> Iterator[Finding]:
    """Yield a finding where the exit code breaks the rule of docs/cli.md."""
    allowed = {0, 2}
    if damaged or sent or _may_fail(outcome):
        allowed.add(1)
    if sent:
        allowed.add(-sent if sent == signal.SIGKILL else 128 + sent)
    if outcome.code not in allowed:
        ending = (
            f"exit code {outcome.code}"
            if outcome.code >= 0
            else f"ended by {signal.Signals(-outcome.code).name}"
        )
        yield Finding(ending, _frame(outcome.errors) or f"{command_of(outcome)}: {shape(last)}", last[:300])


def _wrong_messages(outcome: CommandOutcome, sent: signal.Signals | None, last: str) -> Iterator[Finding]:
    """Yield findings of errors that are not one line, the last."""
    command, errors = command_of(outcome), outcome.errors
    messages = [line for line in errors.splitlines() if line.startswith("error:")]
    for warning in _WARNING.finditer(errors):
        line = errors[warning.start() :].splitlines()[0]
        if sent == signal.SIGKILL and "resource_tracker" in line:
            continue  # Python's own process tidies up what the killed one cannot, and says so
        yield Finding("warning", shape(line), line[:300])
    if len(messages) > 1 or (messages and messages[-1] != last):
        yield Finding("more than one line of error", command, " | ".join(errors.splitlines()[-3:])[:300])
    reports = outcome.code == 1 and typed_command(outcome)[:2] == ("db", "check")
    if outcome.code in (1, 2) and not messages and not reports and not errors.lstrip().startswith("Usage:"):
        yield Finding(
            f"exit code {outcome.code} without a reason",
            shape(last),
            last[:300] or "nothing on standard error",
        )
    if outcome.code == 0 and messages:
        yield Finding("an error and exit code 0", command, last[:300])
    if messages and len(messages[-1]) > LONGEST_LINE:
        yield Finding(
            "an endless line", f"{command}: {shape(last)[:50]}", f"{last[:160]}... of {len(messages[-1])}"
        )


def _may_fail(outcome: CommandOutcome) -> bool:
    """Return whether a failure that is no mistake of the user's is to be expected."""
    typed = outcome.arguments
    return (
        typed[:1] in (("run",), ("profile",))
        or (typed[:1] == ("query",) and any("--timeout" in argument for argument in typed))
        or any("/dev/full" in argument or "postgresql:" in argument for argument in typed)
    )


def _steering(outcome: CommandOutcome) -> Iterator[Finding]:
    """Yield findings of terminal control characters. CSV is data, and so is a file written to standard output."""
    command = command_of(outcome)
    as_data = command.startswith("query") and any("csv" in argument for argument in outcome.arguments)
    as_data |= any("/dev/stdout" in argument for argument in outcome.arguments)
    for name, raw in (
        ("standard output", b"" if as_data else outcome.output),
        ("standard error", outcome.errors),
    ):
        text = raw if isinstance(raw, str) else raw.decode("utf-8", "surrogateescape")
        if match := _CONTROL.search(text):
            around = text[max(0, match.start() - 40) : match.end() + 20]
            yield Finding("raw control characters", f"{command}: {name}", repr(around))
        elif not text.isascii() and any("\udc80" <= letter <= "\udcff" for letter in text):
            yield Finding("output is not UTF-8", f"{command}: {name}", ascii(text[:200]))


def _frame(errors: str) -> str:
    """Return file and function of the project's last frame, and the kind of error."""
    frames = [(file, name) for file, name in _FRAME.findall(errors) if "/scripts/fuzzing/" not in file]
    if not frames:
        return ""
    ours = [pair for pair in frames if "site-packages" not in pair[0] and "/lib/python" not in pair[0]]
    # faulthandler says where a process is that does not end, the innermost frame first.
    file, name = (ours or frames)[0 if "most recent call first" in errors else -1]
    kind = next((match[1] for line in reversed(errors.splitlines()) if (match := _RAISED.match(line))), "")
    parts = Path(file).parts[-3:]
    return f"{'/'.join(parts)}:{name} {kind}"

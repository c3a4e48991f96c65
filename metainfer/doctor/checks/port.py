"""Port: whether the server that answers is the one that was just started."""

from __future__ import annotations

from collections.abc import Iterator

from metainfer.core.units import format_seconds
from metainfer.doctor.finding import Check, Finding, Level, Patient
from metainfer.hardware.facts import Unknown

_PORT = "owner of the port"


def port(patient: Patient) -> Iterator[Finding]:
    """Measurements of a server that was thought gone are the most expensive kind of mistake."""
    known = patient.port
    if known is None:
        return
    if isinstance(known, Unknown):
        yield Finding(_PORT, Level.UNKNOWN, "who listens on the port is not known", known.why)
        return
    owner, number = known.owner, known.number
    if owner is None:
        yield Finding(_PORT, Level.OK, f"nobody listens on port {number}", "/proc/net/tcp")
    elif isinstance(owner, Unknown):
        yield Finding(
            _PORT,
            Level.UNKNOWN,
            f"somebody listens on port {number}, and who is not known",
            owner.why,
            fix=f"sudo ss -ltnp 'sport = :{number}'",
        )
    elif known.later:
        newest = min(known.later, key=lambda program: program.age_s)
        yield Finding(
            _PORT,
            Level.FAIL,
            f"port {number} is served by an older process than the one that was started last",
            f"{owner.pid} ({owner.command}) listens, started {format_seconds(owner.age_s)} ago;"
            f" {newest.pid} ({newest.command}) was started {format_seconds(newest.age_s)} ago",
            "requests are answered, and measured, by the old set-up",
            f"kill {owner.pid} if it is left over, and start the new server again; or give it"
            " another --port",
            "github.com/vllm-project/vllm/issues/47266",
        )
    else:
        yield Finding(
            _PORT,
            Level.OK,
            f"port {number} is served by {owner.pid} ({owner.command})",
            f"started {format_seconds(owner.age_s)} ago, and nothing like it since",
        )


CHECKS = (Check(_PORT, "Is the port served by the process that was started last?", port),)

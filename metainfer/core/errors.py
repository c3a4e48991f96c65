"""The error tree. Everything a user can cause is a `UserError` with a sentence and a hint."""

from __future__ import annotations


class MetainferError(Exception):
    """Base of all errors raised on purpose by metainfer."""


class UserError(MetainferError):
    """Something the user can mend.

    Args:
        message: one sentence that names the thing that is wrong (no trailing full stop).
        hint: what to do about it, or None.
    """

    exit_code = 2

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class CheckpointError(UserError):
    """A checkpoint file is missing, truncated, inconsistent or of an unsupported kind."""


class RequestError(UserError):
    """One request is wrong or cannot be served; it never costs another request.

    Args:
        message: one sentence that names the field and what is wrong with it.
        param: name of the request field at fault, as the client spelled it.
        code: a stable machine-readable code, such as "context_length_exceeded".
        status: the HTTP status that a server answers with.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.param = param
        self.code = code
        self.status = status


def first_line(error: BaseException) -> str:
    """What an error of a library says in its first line, or its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]

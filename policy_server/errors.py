"""What can go wrong when a policy is served, each with its HTTP status and a code that programs can read.

::

    PolicyServerError
    ├── InvalidRequestError     400  a field is missing, of the wrong shape or type, or not finite
    ├── UnauthorizedError       401  no API key, or a wrong one
    ├── PolicyNotFoundError     404  no such policy or version
    ├── SupersededError         409  a newer observation of the same connection took its place (latest wins)
    ├── PayloadTooLargeError    413  a body or a batch above the limit
    ├── NonFiniteActionError    422  the policy gave NaN or infinity for this observation
    ├── LoadFailedError         422  a version could not be made live; the one before still is
    ├── EngineFailedError       500  the engine raised on this request alone
    ├── QueueFullError          503  too many rows wait already; comes with Retry-After
    ├── NotReadyError           503  still loading, or stopping; comes with Retry-After
    ├── DeadlineExceededError   504  the deadline passed before the engine was free
    └── HttpRefusedError        4xx  HTTP itself: no such path, or not this method or media type

    StartError                  the server cannot start; carries the command's exit code
"""

from __future__ import annotations

from typing import Any, ClassVar


class PolicyServerError(Exception):
    """A request that gets no action; what its client is told.

    Args:
        message: What is wrong, with the value, and what to do.
        field: The part of the request that is wrong, such as ``observation.desired_goal``.
        retry_after_s: After how long the same request is worth another try.
    """

    status: int = 500
    code: str = "internal_error"

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    def body(self, request_id: str) -> dict[str, Any]:
        """The answer's JSON, the one shape of every error."""
        error: dict[str, Any] = {"code": self.code, "message": self.message, "request_id": request_id}
        if self.field is not None:
            error["field"] = self.field
        return {"error": error}


class InvalidRequestError(PolicyServerError):
    """A part of the request is wrong; ``field`` says which."""

    status = 400
    code = "invalid_request"


class UnauthorizedError(PolicyServerError):
    """The request carries no API key that is let in."""

    status = 401
    code = "unauthorized"


class PolicyNotFoundError(PolicyServerError):
    """No policy or version of this name is live."""

    status = 404
    code = "policy_not_found"


class SupersededError(PolicyServerError):
    """A newer observation came over the same connection before this one was begun."""

    status = 409
    code = "superseded"


class PayloadTooLargeError(PolicyServerError):
    """The body or the batch is larger than the server takes."""

    status = 413
    code = "payload_too_large"


class NonFiniteActionError(PolicyServerError):
    """The policy's answer holds NaN or infinity, which no robot shall ever get."""

    status = 422
    code = "non_finite_action"


class LoadFailedError(PolicyServerError):
    """A version did not pass its checks; whatever was live before still is."""

    status = 422
    code = "load_failed"


class EngineFailedError(PolicyServerError):
    """The engine raised on this request, also when it was run alone."""

    status = 500
    code = "engine_failed"


class QueueFullError(PolicyServerError):
    """As many rows as the queue takes are waiting."""

    status = 503
    code = "queue_full"


class NotReadyError(PolicyServerError):
    """The policy is still being loaded, or the server is stopping."""

    status = 503
    code = "not_ready"


class DeadlineExceededError(PolicyServerError):
    """The deadline passed while the request waited; no compute was spent on it."""

    status = 504
    code = "deadline_exceeded"


class HttpRefusedError(PolicyServerError):
    """A path that is not there, or a method or media type that it does not take.

    Args:
        message: What is wrong, and what to do.
        status: The HTTP status.
    """

    _CODES: ClassVar = {
        404: "not_found",
        405: "method_not_allowed",
        406: "not_acceptable",
        415: "unsupported_media_type",
    }

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status
        self.code = self._CODES.get(status, "http_error")


class StartError(Exception):
    """The server cannot start.

    Args:
        message: What is missing or wrong, and what to do.
        exit_code: 1 no policy can be served, 2 a wrong option, 3 this machine lacks something.
    """

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code

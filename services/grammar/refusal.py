"""Why a constraint is not compiled: the client's mistake, or more than can be enforced."""


class Refusal(Exception):
    """The message names the keyword and where it stands; `param` the field of the request when it is not the constraint itself."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

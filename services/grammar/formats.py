"""String formats: asserted, not annotated. A format that is not known here is refused."""

from typing import Final

LIBRARY_FORMATS: Final = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Compiled by llguidance."""

_LEAP_YEAR: Final = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE: Final = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    rf"|{_LEAP_YEAR}-02-29)"
)
# RFC 3339 with two narrowings that only leave out what nobody writes: no leap seconds (:60), and a capital T and Z.
_TIME: Final = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"

PATTERN_FORMATS: Final = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""Formats as patterns of our own: llguidance's date takes 29 February in any year."""

"""Formats and patterns of strings that llguidance supports partly or not at all, in keywords that
it enforces.

If a regular expression cannot describe all values of a format, it describes a subset of them. It
allows no invalid one.
"""

from __future__ import annotations

import re
from typing import Any

YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
LONG_MONTH, SHORT_MONTH = (
    "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])",
    "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)",
)
DATE = rf"(?:{YEAR}-(?:{LONG_MONTH}|{SHORT_MONTH}|02-(?:0[1-9]|1[0-9]|2[0-8]))|{LEAP_YEAR}-02-29)"
CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
# no leap second: most parsers reject it
TIME = rf"{CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{CLOCK})"
N = "[0-9]{1,5}"
DAYS = f"(?:{N}Y(?:{N}M(?:{N}D)?)?|{N}M(?:{N}D)?|{N}D)"
HOURS = f"T(?:{N}H(?:{N}M(?:{N}S)?)?|{N}M(?:{N}S)?|{N}S)"
LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
HEX = "[0-9A-Fa-f]"
ENCODED = f"%{HEX}{{2}}"
SEGMENT = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{ENCODED})*"
# the first segment of a path: a colon would end a scheme
FIRST = rf"(?:[A-Za-z0-9._~!$&'()*+,;=@-]|{ENCODED})+"
PATH = rf"(?:{FIRST}(?:/{SEGMENT})*|/(?:{FIRST}(?:/{SEGMENT})*)?)?"
SITE = rf"[A-Za-z][A-Za-z0-9+.-]*://[A-Za-z0-9._~-]+(?::[0-9]{{1,4}})?(?:/{SEGMENT})*"
QUERY = rf"(?:{SEGMENT}[/?]?)*"
POINTER = "(?:/(?:[^~/]|~[01])*)*"
VARIABLE = r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*(?::[1-9][0-9]{0,3}|\*)?"
BASE64 = "(?:{0}{{4}})*(?:{0}{{2}}==|{0}{{3}}=)?"

# The schema that strings of each format satisfy.
FORMATS: dict[str, dict[str, Any]] = {
    **{name: {"format": name} for name in ("email", "ipv4", "ipv6", "uri")},
    "uuid": {"pattern": f"^{HEX}{{8}}-(?:{HEX}{{4}}-){{3}}{HEX}{{12}}$"},
    **{
        f"uuid{n}": {
            "pattern": f"^{HEX}{{8}}-{HEX}{{4}}-{n}{HEX}{{3}}-[89abAB]{HEX}{{3}}-{HEX}{{12}}$"
        }
        for n in range(1, 9)
    },
    "date": {"pattern": f"^{DATE}$"},
    "time": {"pattern": f"^{TIME}$"},
    "date-time": {"pattern": f"^{DATE}T{TIME}$"},
    "duration": {"pattern": f"^P(?:{DAYS}(?:{HOURS})?|{HOURS}|{N}W)$"},
    # Two hyphens in a row are excluded: they mark names in other scripts, which have their own
    # rules.
    "hostname": {
        "pattern": rf"^{LABEL}(?:\.{LABEL})*$",
        "allOf": [{"pattern": "^(?:[^-]|-[^-])*$"}],
        "maxLength": 253,
    },
    "uri-reference": {"pattern": rf"^(?:{SITE}|{PATH})(?:\?{QUERY})?(?:#{QUERY})?$"},
    "uri-template": {
        "pattern": rf"^(?:[A-Za-z0-9._~:/?#@!$&()*+,;=-]|{ENCODED}"
        rf"|\{{[+#./;?&]?{VARIABLE}(?:,{VARIABLE})*\}})*$"
    },
    "json-pointer": {"pattern": f"^{POINTER}$"},
    "relative-json-pointer": {"pattern": f"^(?:0|[1-9][0-9]{{0,5}})(?:#|{POINTER})$"},
    "base64": {"pattern": f"^{BASE64.format('[A-Za-z0-9+/]')}$"},
    "base64url": {"pattern": f"^{BASE64.format('[A-Za-z0-9_-]')}$"},
    **{name: {} for name in ("password", "binary", "path")},  # every string is valid
}
NARROWER = {
    "idn-email": "email",
    "idn-hostname": "hostname",
    "iri": "uri",
    "iri-reference": "uri-reference",
}
FORMATS |= {name: FORMATS[other] for name, other in {**NARROWER, "byte": "base64"}.items()}

CHARACTER = r"(\\[^A-Za-z0-9]|[^\\^$.|?*+()\[\]{}])"
CLASS = r"\[((?:[^\]\\^]|\\.)+)\]"
# Negative look-aheads at the beginning, and equivalent or slightly stricter patterns for the whole
# text.
LOOK_AHEADS = {
    rf"\^?{CLASS}\*\$": r"[^\1]",
    CHARACTER: r"^(?:[^\1]|$)",
    rf"\.\*{CHARACTER}\1": r"^(?:[^\1]|\1[^\1])*\1?$",
}


def split_lookaheads(pattern: str) -> list[str]:
    """Return ``pattern`` and its initial look-aheads as separate patterns, where possible.

    A text must match all.
    """
    lookaheads = []
    while look := re.match(r"\^\(\?([=!])", pattern):
        end = find_closing(pattern, 1)
        inside, rest = pattern[look.end() : end - 1], "^" + pattern[end:]
        if look[1] == "=":
            lookaheads.append(f"^(?:{inside})")
        else:
            same = [
                match.expand(other)
                for one, other in LOOK_AHEADS.items()
                if (match := re.fullmatch(one, inside))
            ]
            if not same:
                break
            lookaheads.append(same[0])
        pattern = rest
    return [pattern, *lookaheads]


def find_closing(pattern: str, begin: int) -> int:
    """Return the index after the parenthesis that closes the one at ``begin``, or the length of
    ``pattern``.
    """
    depth = 0
    for part in re.finditer(r"\\.|\[(?:\\.|[^\]\\])*\]|[()]", pattern[begin:], re.DOTALL):
        depth += {"(": 1, ")": -1}.get(part[0], 0)
        if depth == 0 and part[0] == ")":
            return begin + part.end()
    return len(pattern)

"""Names of authenticated connections, such as `User:alice`.

Rules:
- A connection without authentication is `User:ANONYMOUS`.
- After SASL, the principal is `User:` and the user name.
- With a client certificate, it is `User:` and the subject of the certificate as Java's
  X500Principal.getName() writes it (RFC 2253), changed by the mapping rules of
  `ssl.principal.mapping.rules`.

Users' regular expressions run in RE2, because a client chooses the subject.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs

from logcore.errors import InvalidConfigError

#: Attributes that Java writes by name. It writes all others as OID=#hex.
_SHORT_NAMES: Final = {
    "commonName": "CN",
    "organizationalUnitName": "OU",
    "organizationName": "O",
    "localityName": "L",
    "stateOrProvinceName": "ST",
    "countryName": "C",
    "streetAddress": "STREET",
    "domainComponent": "DC",
    "userId": "UID",
}
#: The same attributes by their OIDs.
_SHORT_OIDS: Final = {
    "2.5.4.3": "CN",
    "2.5.4.11": "OU",
    "2.5.4.10": "O",
    "2.5.4.7": "L",
    "2.5.4.8": "ST",
    "2.5.4.6": "C",
    "2.5.4.9": "STREET",
    "0.9.2342.19200300.100.1.25": "DC",
    "0.9.2342.19200300.100.1.1": "UID",
}
#: Characters that RFC 2253 escapes with a backslash.
_ESCAPED: Final = frozenset(',=+<>#;"\\')
#: Longest subject that is mapped. A longer one refuses the certificate.
_MAX_SUBJECT_CHARS: Final = 8_192


class CertificateError(Exception):
    """The client certificate has no usable subject. The text is the reason."""


def subject_of(certificate: Mapping[str, Any], der: Callable[[], bytes]) -> str:
    """Return the subject of a certificate in the form of RFC 2253.

    `certificate` is the result of SSLSocket.getpeercert(). `der` returns the same
    certificate in binary form; it is called only for subjects with unusual attributes.

    Raises:
        CertificateError: the subject is empty or too long, or has an attribute that is
            no text, or one that needs the package `cryptography`, which is not installed.
    """
    parts: Sequence[Sequence[tuple[str, str]]] = certificate.get("subject", ())
    if not parts:
        raise CertificateError("the certificate has no subject")
    # The ssl module has no bytes of unusual attributes, which Java writes as hex.
    if all(name in _SHORT_NAMES for part in parts for name, _ in part):
        written = [
            "+".join(f"{_SHORT_NAMES[name]}={_escaped(value)}" for name, value in part)
            # RFC 2253 writes the last part first.
            for part in reversed(parts)
        ]
        subject = ",".join(written)
    else:
        subject = _subject_of_der(der())
    if len(subject) > _MAX_SUBJECT_CHARS:
        raise CertificateError(f"the subject has {len(subject)} characters")
    return subject


def _escaped(value: object) -> str:
    """Return an attribute value with the escapes of RFC 2253, as Java writes them.

    Raises:
        CertificateError: the value is not text, such as a bit string.
    """
    if not isinstance(value, str):
        raise CertificateError("the subject has an attribute that is not text")
    text = "".join(
        "\\" + character
        if character in _ESCAPED
        else "\\00"
        if character == "\0"
        else character
        for character in value
    )
    # Only spaces at the ends are escaped.
    inner = text.strip(" ")
    if not inner:
        return "\\ " * len(text)
    start = len(text) - len(text.lstrip(" "))
    end = len(text) - len(text.rstrip(" "))
    return "\\ " * start + inner + "\\ " * end


def _subject_of_der(certificate: bytes) -> str:
    try:
        # Imported only for unusual attributes, because the package is optional.
        from cryptography import x509
    except ImportError:
        raise CertificateError(
            "the subject has an unusual attribute, which needs the package "
            "cryptography: pip install 'logcore-db[oauth]'"
        ) from None
    try:
        name = x509.load_der_x509_certificate(certificate).subject
        return ",".join(
            "+".join(_written(name_attribute, x509.Name) for name_attribute in part)
            for part in reversed(name.rdns)
        )
    except ValueError as error:
        raise CertificateError(f"the subject cannot be decoded: {error}") from None


def _written(attribute: Any, name_of: Callable[[list[Any]], Any]) -> str:
    """Return one attribute as Java writes it: by its name, or as OID=#hex of its DER."""
    oid = attribute.oid.dotted_string
    short = _SHORT_OIDS.get(oid)
    if short is not None:
        return f"{short}={_escaped(attribute.value)}"
    # A name of this one attribute: SEQUENCE { SET { SEQUENCE { OID, value } } }.
    der = name_of([attribute]).public_bytes()
    position = 0
    for _ in range(3):
        position, _ = _content(der, position)
    start, size = _content(der, position)
    return f"{oid}=#{der[start + size :].hex()}"


def _content(der: bytes, position: int) -> tuple[int, int]:
    """Return (position, size) of the content of the DER element at `position`."""
    size = der[position + 1]
    # DER: a size below 128 has one byte. Otherwise this byte is the number of size
    # bytes.
    if size < 0x80:
        return position + 2, size
    width = size & 0x7F
    start = position + 2 + width
    return start, int.from_bytes(der[position + 2 : start], "big")


# -- mapping rules ---------------------------------------------------------------------

_RULE: Final = re.compile(
    r"\s*(?:(DEFAULT)|RULE:((?:\\.|[^\\/])*)/((?:\\.|[^\\/])*)/([LU]?))\s*(?:,|$)",
    re.ASCII,
)


@attrs.frozen
class _Rule:
    """One rule: a pattern that must match the whole subject, and its replacement."""

    matches: Callable[[str], Any]
    #: The user name, in which $1 is the first group of the pattern.
    replacement: str
    #: "L" or "U" if the name becomes lower or upper case, or "".
    case: str


@attrs.frozen
class MappingRules:
    """The rules that turn the subject of a certificate into a user name.

    The first rule that matches wins. `DEFAULT`, and no rules at all, return the
    subject.
    """

    #: None means DEFAULT.
    rules: tuple[_Rule | None, ...] = (None,)

    @classmethod
    def parse(cls, text: str) -> MappingRules:
        """Read rules in the syntax of Kafka's `ssl.principal.mapping.rules`.

        Raises:
            InvalidConfigError: a rule is malformed, or its pattern is not valid in RE2.
        """
        rules: list[_Rule | None] = []
        position = 0
        while position < len(text):
            match = _RULE.match(text, position)
            if match is None:
                raise InvalidConfigError(
                    "ssl.principal.mapping.rules",
                    expected="DEFAULT or RULE:pattern/replacement/[LU], separated by commas",
                    found=repr(text[position:]),
                )
            if match[1]:
                rules.append(None)
            else:
                rules.append(_rule(match[2], match[3], match[4]))
            position = match.end()
        # As in Kafka, no rules mean DEFAULT.
        return cls(tuple(rules) or (None,))

    def user_of(self, subject: str) -> str | None:
        """Return the user name for a subject, or None if no rule matches."""
        for rule in self.rules:
            # DEFAULT.
            if rule is None:
                return subject
            match = rule.matches(subject)
            if match is not None:
                name = _substituted(rule.replacement, match)
                if rule.case == "L":
                    return name.lower()
                if rule.case == "U":
                    return name.upper()
                return name
        return None


def _substituted(replacement: str, match: Any) -> str:
    """Return a replacement with the groups of a match in place of $1, $2 and so on."""
    return re.sub(
        # A group that takes no part in the match is None. It becomes "", as in Java.
        r"\$(\d)",
        lambda group: match.group(int(group[1])) or "",
        replacement,
    )


def _rule(pattern: str, replacement: str, case: str) -> _Rule:
    try:
        # Imported only for rules, because the package is optional.
        import re2
    except ImportError:
        raise InvalidConfigError(
            "ssl.principal.mapping.rules needs the package google-re2",
            expected="pip install 'logcore-db[regex]'",
            found="no module re2",
        ) from None
    try:
        compiled = re2.compile(pattern)
    except re2.error as error:
        raise InvalidConfigError(
            "ssl.principal.mapping.rules",
            expected="a pattern of RE2",
            found=f"{pattern!r}: {error}",
        ) from None
    groups = max(
        (int(number) for number in re.findall(r"\$(\d)", replacement)), default=0
    )
    # Such a group would be an error at each login.
    if groups > compiled.groups:
        raise InvalidConfigError(
            "ssl.principal.mapping.rules",
            expected=f"at most ${compiled.groups} in the replacement",
            found=repr(replacement),
        )
    return _Rule(compiled.fullmatch, replacement, case)

"""When certificates end. Reads that much of a PEM file and no more; whether they are any good is OpenSSL's to say."""

import re
from base64 import b64decode
from datetime import UTC, datetime

_CERTIFICATE = re.compile(rb"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----([^-]+)-----END ")
_VERSION_TAG = 0xA0
_UTC_TIME_TAG = 0x17


def first_end(pem: bytes) -> float:
    """Unix time at which the first of a chain's certificates ends. Raises ValueError where there is none."""
    return min(_end(b64decode(encoded)) for encoded in _CERTIFICATE.findall(pem))


def _end(certificate: bytes) -> float:
    """`tbsCertificate.validity.notAfter` of RFC 5280, section 4.1."""
    _, start, _ = _value(certificate, 0)
    _, position, _ = _value(certificate, start)
    tag, _, end = _value(certificate, position)
    if tag == _VERSION_TAG:
        position = end
    for _ in ("serialNumber", "signature", "issuer"):
        _, _, position = _value(certificate, position)
    _, not_before, _ = _value(certificate, position)
    _, _, not_after = _value(certificate, not_before)
    tag, start, end = _value(certificate, not_after)
    text = certificate[start:end].decode("ascii")
    if tag == _UTC_TIME_TAG:
        text = f"{19 if text[0] >= '5' else 20}{text}"
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _value(der: bytes, at: int) -> tuple[int, int, int]:
    """Tag of the DER value at a place, and where its content begins and ends (X.690, section 8.1)."""
    length, start = der[at + 1], at + 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(der[at + 2 : start])
    return der[at], start, start + length

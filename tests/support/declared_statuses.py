"""What each rpc may answer, as the protos say it, and whether an answer is such.

Knows the proto files' comments, nothing of services.
"""

import re
from pathlib import Path

import grpc
from google.protobuf.descriptor import MethodDescriptor

PROTOS = Path(__file__).parents[2] / "protos" / "plexrl" / "v1"
ALWAYS = {"OK", "UNAVAILABLE", "UNAUTHENTICATED", "PERMISSION_DENIED"}
_CODES = "|".join(code.name for code in grpc.StatusCode)


def declared() -> dict[str, set[str]]:
    """The status codes that each rpc's comment and its service's comment name, by full name."""
    codes: dict[str, set[str]] = {}
    for file in PROTOS.glob("*.proto"):
        service, comment, of_service = "", "", ""
        for line in file.read_text().splitlines():
            text = line.strip()
            if text.startswith("//"):
                comment += text + "\n"
                continue
            if text.startswith("service "):
                service, of_service = text.split()[1], comment
            if (found := re.match(r"rpc (\w+)\(", text)) is not None:
                named = set(re.findall(rf"\b({_CODES})\b", comment + of_service))
                codes[f"plexrl.v1.{service}.{found[1]}"] = named | ALWAYS
            comment = ""
    return codes


DECLARED = declared()


def judge(method: MethodDescriptor, answer: tuple[str, str], *also: str) -> None:
    """Raises AssertionError for a status that nobody may be answered with. `also`: codes that have nothing to do with
    what the rpc does.
    """
    code, details = answer
    assert code not in ("INTERNAL", "UNKNOWN"), (method.full_name, code, details)
    wanted = DECLARED[method.full_name] | set(also)
    assert code in wanted, f"{method.full_name} answers {code} ({details}), which its proto does not list"
    assert code == "OK" or len(details) >= 8, (method.full_name, code, details)

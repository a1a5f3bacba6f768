"""How a client gets in: a certificate and a token made for one server, and the kubeconfig that names both.

Everything is written where only its owner reads it.
"""

import os
import secrets
import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme
import yaml

_NAME = "plexrl-waiting"
_FILE_MODE = 0o600
_DIRECTORY_MODE = 0o700


@dataclass(frozen=True)
class Access:
    """A token and TLS for a server, and the certificate authority that clients are to trust."""

    token: str
    tls: ssl.SSLContext
    authority_pem: bytes


def new_access(host: str) -> Access:
    """Fresh secrets for a server on this host name or address. They live as long as the process."""
    authority = trustme.CA(organization_name=_NAME)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(host, "localhost").configure_cert(tls)
    return Access(secrets.token_urlsafe(32), tls, authority.cert_pem.bytes())


def write_kubeconfig(directory: Path, url: str, access: Access) -> Path:
    """Writes token, certificate authority and kubeconfig; returns the kubeconfig. Raises OSError."""
    directory.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
    token = _write(directory / "token", access.token.encode())
    authority = _write(directory / "ca.pem", access.authority_pem)
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": _NAME, "cluster": {"server": url, "certificate-authority": str(authority)}}],
        "users": [{"name": _NAME, "user": {"tokenFile": str(token)}}],
        "contexts": [{"name": _NAME, "context": {"cluster": _NAME, "user": _NAME, "namespace": "default"}}],
        "current-context": _NAME,
    }
    return _write(directory / "kubeconfig", yaml.safe_dump(config, sort_keys=False).encode())


def _write(path: Path, content: bytes) -> Path:
    """Writes a file that nobody else can read, not even for a moment."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE), "wb") as file:
        file.write(content)
    return path.absolute()

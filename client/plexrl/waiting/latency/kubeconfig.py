"""Credentials of a cluster from a kubeconfig, for the latency engine's own connections."""

import base64
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.core.exceptions import ConfigError


@dataclass(frozen=True)
class Credentials:
    """Where a cluster is and how to get in. `tls` is None for plain HTTP."""

    url: str
    token: str
    tls: ssl.SSLContext | None


def read_credentials(path: Path) -> Credentials:
    """Those of the current context. Raises OSError, and ValueError for a way to log in that is not offered here."""
    try:
        config = KubeConfig.from_file(path).get()
    except ConfigError as error:
        raise ValueError(f"{path}: {error}") from error
    if config is None:
        raise ValueError(f"{path}: want a current context")
    user = config.user
    if user is not None and (user.exec or user.auth_provider or user.username):
        raise ValueError(f"{path}: want a token or a client certificate to log in with, not a plugin or a password")
    token = ""
    if user is not None:
        token = user.token or (Path(config.abs_file(user.token_file)).read_text().strip() if user.token_file else "")
    if not config.cluster.server.startswith("https://"):
        return Credentials(config.cluster.server, token, None)
    if config.cluster.insecure:
        raise ValueError(f"{path}: insecure-skip-tls-verify is not offered here: name the certificate authority")
    return Credentials(config.cluster.server, token, _tls(config))


def _tls(config: SingleConfig) -> ssl.SSLContext:
    cluster, user = config.cluster, config.user
    tls = ssl.create_default_context()
    if cluster.certificate_auth_data:
        tls.load_verify_locations(cadata=base64.b64decode(cluster.certificate_auth_data).decode())
    elif cluster.certificate_auth:
        tls.load_verify_locations(config.abs_file(cluster.certificate_auth))
    if user is not None and user.client_cert_data and user.client_key_data:
        # The ssl module takes certificates from files alone.
        with tempfile.TemporaryDirectory() as directory:
            certificate, key = Path(directory, "certificate"), Path(directory, "key")
            certificate.write_bytes(base64.b64decode(user.client_cert_data))
            key.touch(mode=0o600)
            key.write_bytes(base64.b64decode(user.client_key_data))
            tls.load_cert_chain(certificate, key)
    elif user is not None and user.client_cert and user.client_key:
        tls.load_cert_chain(config.abs_file(user.client_cert), config.abs_file(user.client_key))
    return tls

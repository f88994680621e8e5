"""TLS of the gRPC listener."""

import grpc

from service.tls import Certificate, Certificates


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Credentials that ask for the newest certificate at each new connection."""
    used = certificates.newest

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        newest = certificates.newest
        if newest is used:
            return None
        used = newest
        return _configuration(newest)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used),
        changed,  # type: ignore[arg-type] # None, for "no change", is missing in the stubs
        require_client_authentication=used.client_ca is not None,
    )


def _configuration(certificate: Certificate) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(certificate.key, certificate.chain)], root_certificates=certificate.client_ca
    )

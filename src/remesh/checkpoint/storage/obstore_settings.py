"""Settings of object stores: where obstore finds endpoint, region and credentials, and what is refused.

obstore reads the environment (``AWS_*``, ``GOOGLE_*``, ``AZURE_*``) and the metadata services of machines and pods. The
files of the AWS tools are read by botocore. What only fsspec's packages read is refused with the name of what to set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from remesh.foundation.errors import ConfigError

SETTINGS = ("AWS_", "GOOGLE_", "AZURE_", "FSSPEC_", *("HOME", "STORAGE_EMULATOR_HOST", "REQUESTS_CA_BUNDLE"))
"""What the names of variables begin with that say how a store is reached."""
_FAMILIES = (("s3", "s3a"), ("gs", "gcs"), ("az", "abfs", "abfss"))
SCHEMES = frozenset(scheme for family in _FAMILIES for scheme in family)
"""What is reached by obstore."""
_OF_FSSPEC: Mapping[tuple[str, str], str] = {
    ("s3", "key"): "AWS_ACCESS_KEY_ID",
    ("s3", "secret"): "AWS_SECRET_ACCESS_KEY",
    ("s3", "token"): "AWS_SESSION_TOKEN",
    ("s3", "profile"): "AWS_PROFILE",
    ("s3", "endpoint_url"): "AWS_ENDPOINT_URL",
    ("s3", "client_kwargs"): "AWS_ENDPOINT_URL and AWS_REGION",
    ("s3", "config_kwargs"): "AWS_VIRTUAL_HOSTED_STYLE_REQUEST=true for addresses with the bucket in front",
    ("s3", "s3_additional_kwargs"): "AWS_SERVER_SIDE_ENCRYPTION and AWS_SSE_KMS_KEY_ID",
    ("s3", "requester_pays"): "AWS_REQUEST_PAYER=true",
    ("s3", "anon"): "AWS_SKIP_SIGNATURE=true",
    ("gs", "token"): "GOOGLE_APPLICATION_CREDENTIALS",
    ("gs", "endpoint_url"): "GOOGLE_BASE_URL",
    ("az", "account_name"): "AZURE_STORAGE_ACCOUNT_NAME",
    ("az", "account_key"): "AZURE_STORAGE_ACCOUNT_KEY",
    ("az", "sas_token"): "AZURE_STORAGE_SAS_TOKEN",
    ("az", "connection_string"): "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    ("az", "anon"): "AZURE_SKIP_SIGNATURE=true",
}
"""Options of fsspec's packages, by family, and the variables that say the same."""
_OF_PACKAGES = {
    "STORAGE_EMULATOR_HOST": ("gs", "GOOGLE_BASE_URL and GOOGLE_SKIP_SIGNATURE=true"),
    "AZURE_STORAGE_CONNECTION_STRING": ("az", "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"),
    "AZURE_STORAGE_ANON": ("az", "AZURE_SKIP_SIGNATURE=true"),
}
"""Variables that only fsspec's packages read, the family, and the variables that say the same."""
_FILES_OF_AWS = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
_LENT_FOR = timedelta(minutes=5)
"""After so long botocore is asked again, which renews credentials in time."""


def open_bucket(scheme: str, bucket: str, timeout_s: float) -> Any:
    """obstore's store of one bucket or container, in which each request ends within the timeout."""
    from obstore.store import AzureStore, GCSStore, S3Store  # noqa: PLC0415 - only programs that use stores wait for it

    family = next(family for family in _FAMILIES if scheme in family)
    _refuse_options_of_fsspec(family)
    options: dict[str, Any] = {
        "client_options": {"timeout": timedelta(seconds=timeout_s / 3), "allow_http": True},
        "retry_config": {"retry_timeout": timedelta(seconds=timeout_s * 2 / 3)},
    }
    if family[0] == "gs":
        return GCSStore(bucket, **options)
    if family[0] == "az":
        return AzureStore(bucket, **options)
    profile = _profile_of_aws()
    certificates = profile.pop("ca_bundle", None)
    if certificates := os.environ.get("AWS_CA_BUNDLE", os.environ.get("REQUESTS_CA_BUNDLE", certificates)):
        options["client_options"]["root_certificate"] = Path(certificates).read_bytes()
    return S3Store(bucket, **options, **profile)


def _refuse_options_of_fsspec(family: tuple[str, ...]) -> None:
    from fsspec.config import conf  # noqa: PLC0415 - as above

    found = {option: f"the option {option!r} of fsspec for {name}" for name in family for option in conf.get(name, {})}
    instead = {option: _OF_FSSPEC.get((family[0], option)) for option in found}
    for variable, (of_family, wanted) in _OF_PACKAGES.items():
        if of_family == family[0] and variable in os.environ:
            found[variable], instead[variable] = f"the variable {variable}", wanted
    for option, words in found.items():
        write = f"set {instead[option]} in its place" if instead[option] else "remove it, for it has no counterpart"
        raise ConfigError(
            f"opening a store of {family[0]}://: found {words}, which obstore does not read, expected what it reads "
            f"from the environment; {write}"
        )


def _profile_of_aws() -> dict[str, Any]:
    """What the files of the AWS tools say beside the environment, of the profile that ``AWS_PROFILE`` names."""
    known = os.environ
    files = [known.get(name, default) for name, default in _FILES_OF_AWS.items()]
    if "AWS_PROFILE" not in known and not any(Path(file).expanduser().exists() for file in files):
        return {}
    try:
        from botocore.session import Session  # noqa: PLC0415 - as above
    except ImportError as missing:
        raise ConfigError(
            f"opening a store of s3://: the package 'botocore' is not installed, which reads {' and '.join(files)}; "
            "pip install 'remesh[s3]', or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY and unset AWS_PROFILE"
        ) from missing
    session = Session()
    profile = session.get_scoped_config()
    if "services" in profile:
        raise ConfigError(
            f"opening a store of s3://: {files[1]} has services = {profile['services']}, which is not followed, "
            "expected endpoint_url; write that, or set AWS_ENDPOINT_URL_S3"
        )
    options: dict[str, Any] = {"ca_bundle": profile["ca_bundle"]} if "ca_bundle" in profile else {}
    if "region" in profile and not known.keys() & {"AWS_REGION", "AWS_DEFAULT_REGION"}:
        options["region"] = profile["region"]
    if "endpoint_url" in profile and not known.keys() & {"AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"}:
        options["endpoint"] = profile["endpoint_url"]
    credentials = None if "AWS_ACCESS_KEY_ID" in known else session.get_credentials()
    if credentials is not None:
        options["credential_provider"] = lambda: _lent(credentials)
    return options


def _lent(credentials: Any) -> dict[str, Any]:
    frozen = credentials.get_frozen_credentials()
    return {
        "access_key_id": frozen.access_key,
        "secret_access_key": frozen.secret_key,
        "token": frozen.token,
        "expires_at": datetime.now(UTC) + _LENT_FOR,
    }

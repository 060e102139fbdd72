"""What users tell fsspec's packages and the AWS tools of their stores goes on to work, or is refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import certifi
import fsspec.config
import pytest

from remesh.checkpoint.storage import location_of, obstore_settings, store_of
from remesh.checkpoint.storage.obstore_client import ObstoreClient
from remesh.checkpoint.storage.obstore_settings import _OF_FSSPEC, _OF_PACKAGES, SCHEMES
from remesh.foundation.errors import ConfigError


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(fsspec.config, "conf", {})
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_the_stores_of_three_clouds_are_reached_by_obstore(scheme, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    assert isinstance(store_of(location_of(f"{scheme}://bucket/run")).client, ObstoreClient)
    obstore_settings.open_bucket(scheme, "bucket", 300.0)


@pytest.mark.parametrize(("family", "option"), sorted(_OF_FSSPEC))
def test_an_option_of_fsspec_is_refused_with_what_to_set(monkeypatch, family, option):
    monkeypatch.setattr(fsspec.config, "conf", {family: {option: "secret-value"}})
    with pytest.raises(ConfigError, match=f"the option '{option}' of fsspec for {family}") as raised:
        store_of(location_of(f"{family}://bucket/run")).size_of(location_of(f"{family}://bucket/run"))
    assert f"set {_OF_FSSPEC[family, option]} in its place" in str(raised.value)
    assert "secret-value" not in str(raised.value)


def test_an_option_of_fsspec_that_has_no_counterpart_is_refused_too(monkeypatch):
    monkeypatch.setattr(fsspec.config, "conf", {"s3a": {"default_fill_cache": True}})
    with pytest.raises(ConfigError, match="'default_fill_cache' of fsspec for s3a.*no counterpart"):
        obstore_settings.open_bucket("s3", "bucket", 300.0)


@pytest.mark.parametrize("variable", sorted(_OF_PACKAGES))
def test_a_variable_that_only_fsspecs_packages_read_is_refused_with_what_to_set(monkeypatch, variable):
    monkeypatch.setenv(variable, "secret-value")
    family, instead = _OF_PACKAGES[variable]
    with pytest.raises(ConfigError, match=f"the variable {variable}.*set {instead}") as raised:
        obstore_settings.open_bucket(family, "bucket", 300.0)
    assert "secret-value" not in str(raised.value)


def _write_files(folder: Path) -> None:
    (folder / "credentials").write_text(
        "[default]\naws_access_key_id = first\naws_secret_access_key = one\n"
        "[team]\naws_access_key_id = second\naws_secret_access_key = two\naws_session_token = lent\n"
    )
    (folder / "config").write_text(
        f"[default]\nregion = eu-west-1\nca_bundle = {certifi.where()}\n"
        "[profile team]\nregion = eu-north-1\nendpoint_url = http://storage.example:9000\n"
        "[profile indirect]\nservices = ours\n"
    )


@pytest.mark.parametrize(
    ("profile", "key", "region", "endpoint"),
    [(None, "first", "eu-west-1", None), ("team", "second", "eu-north-1", "http://storage.example:9000")],
)
def test_the_files_of_the_aws_tools_give_credentials_region_and_endpoint(
    monkeypatch, tmp_path, profile, key, region, endpoint
):
    _write_files(tmp_path)
    if profile is not None:
        monkeypatch.setenv("AWS_PROFILE", profile)
    options = obstore_settings._profile_of_aws()
    lent = options["credential_provider"]()
    assert (lent["access_key_id"], options["region"], options.get("endpoint")) == (key, region, endpoint)
    assert lent["token"] == (None if profile is None else "lent")
    obstore_settings.open_bucket("s3", "bucket", 300.0)


def test_certificates_of_the_environment_come_before_those_of_the_files(monkeypatch, tmp_path):
    _write_files(tmp_path)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "none.pem"))
    with pytest.raises(FileNotFoundError, match=r"none\.pem"):
        obstore_settings.open_bucket("s3", "bucket", 300.0)


def test_the_environment_comes_before_the_files(monkeypatch, tmp_path):
    _write_files(tmp_path)
    for name, value in {"PROFILE": "team", "ACCESS_KEY_ID": "mine", "REGION": "us-west-2", "ENDPOINT_URL": "x"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    assert obstore_settings._profile_of_aws() == {}


def test_a_profile_that_says_its_endpoint_elsewhere_is_refused(monkeypatch, tmp_path):
    _write_files(tmp_path)
    monkeypatch.setenv("AWS_PROFILE", "indirect")
    with pytest.raises(ConfigError, match="services = ours.*AWS_ENDPOINT_URL_S3"):
        obstore_settings.open_bucket("s3", "bucket", 300.0)


def test_without_files_of_the_aws_tools_obstore_looks_for_credentials_by_itself():
    assert obstore_settings._profile_of_aws() == {}

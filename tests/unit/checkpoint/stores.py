"""Places to keep files in: a folder, memory, and a store of objects that a server on loopback keeps."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

BUCKET = "checkpoints"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing-key", "AWS_SECRET_ACCESS_KEY": "testing-secret", "AWS_REGION": "us-east-1"}


@contextmanager
def object_store() -> Iterator[dict[str, str]]:
    """A server of S3 with one empty bucket; yields the environment by which clients find it."""
    boto3 = pytest.importorskip("boto3")
    pytest.importorskip("obstore")
    moto_server = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each of thousands of requests
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    try:
        environment = {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
        client = boto3.client(
            "s3",
            endpoint_url=environment["AWS_ENDPOINT_URL"],
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            region_name=CREDENTIALS["AWS_REGION"],
        )
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield environment
    finally:
        server.stop()

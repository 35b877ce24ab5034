"""An S3-compatible store of the tests' own: moto's server, a process on a free port of this machine, in memory."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import urllib.request
from contextlib import suppress
from functools import cached_property
from typing import Any

SERVE = """
import sys
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class MotoProcess:
    """`url` is its endpoint. It ends when its standard input closes, so also when the tests are killed."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SERVE],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "COV_"))},
        )  # fmt: skip
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def environment(self) -> dict[str, str]:
        """What AWS's tools need to find it, and nothing of this machine's own settings."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "the-tests",
            "AWS_SECRET_ACCESS_KEY": "the tests' secret",
            "AWS_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @cached_property
    def client(self) -> Any:
        """boto3's, which the server does not use."""
        import boto3  # type: ignore[import-untyped]

        return boto3.client(
            "s3", endpoint_url=self.url, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
        )

    def demand_credentials(self) -> None:
        """From now on only known keys with the right policies may do anything."""
        address, plain = f"{self.url}/moto-api/reset-auth", {"Content-Type": "text/plain"}
        urllib.request.urlopen(urllib.request.Request(address, b"0", plain, method="POST")).read()


class TestBucket:
    """A bucket of its own, looked at and changed from outside. `url` is what the setting `blobs` says."""

    __test__ = False

    def __init__(self, moto: MotoProcess, prefix: str = "some/prefix") -> None:
        self.moto = moto
        self.name = f"bucket-{secrets.token_hex(6)}"
        self.prefix = prefix
        self.url = f"s3://{self.name}/{prefix}"
        self.client = moto.client
        self.client.create_bucket(Bucket=self.name)

    def objects(self) -> dict[str, bytes]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name)
        keys = [each["Key"] for page in pages for each in page.get("Contents", ())]
        assert all(key.startswith(self.prefix) for key in keys)
        found = {}
        for key in keys:
            with suppress(self.client.exceptions.NoSuchKey):  # deleted since it was listed
                answer = self.client.get_object(Bucket=self.name, Key=key)
                found[key.removeprefix(f"{self.prefix}/")] = answer["Body"].read()
        return found

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=f"{self.prefix}/{key}", Body=data)

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=f"{self.prefix}/{key}")

    def uploads(self) -> list[str]:
        """Keys of files in parts that are not complete."""
        found = self.client.list_multipart_uploads(Bucket=self.name)
        return [each["Key"].removeprefix(f"{self.prefix}/") for each in found.get("Uploads", ())]

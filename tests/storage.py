"""Shared storage for tests: a server on this machine that speaks the language of S3."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import fsspec
from moto.server import ThreadedMotoServer


@contextmanager
def s3_bucket() -> Iterator[tuple[str, fsspec.AbstractFileSystem]]:
    """(the address of an empty bucket, its file system). This process and those it starts have access."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    access = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    access |= {"AWS_ACCESS_KEY_ID": "anyone", "AWS_SECRET_ACCESS_KEY": "anything"}
    try:
        with mock.patch.dict(os.environ, access):
            fsspec.get_filesystem_class("s3").clear_instance_cache()
            fs = fsspec.filesystem("s3", use_listings_cache=False)
            if fs.exists("shared"):  # of an earlier server of this process
                fs.rm("shared", recursive=True)
            fs.mkdir("shared")
            yield "s3://shared", fs
    finally:
        server.stop()

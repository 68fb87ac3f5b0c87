"""A real S3 server on the loopback interface: moto's."""

import logging
import os
from contextlib import contextmanager
from urllib.request import Request, urlopen

import pytest


@contextmanager
def s3_server():
    """Within this context s3:// is a server that this process has started, with one bucket, `bkt`: its file system. The
    test is skipped, with the reason, where moto or s3fs is absent."""
    reason = "pip install s3fs 'moto[s3]' flask flask-cors"
    s3fs = pytest.importorskip("s3fs", reason=reason)
    moto = pytest.importorskip("moto.server", reason=reason)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in environment(address).items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        files = s3fs.S3FileSystem(use_listings_cache=False)
        files.mkdir("bkt")
        yield files
    s3fs.S3FileSystem.clear_instance_cache()
    urlopen(
        Request(f"{address}/moto-api/reset", method="POST")
    ).close()  # all servers of a process have the same buckets
    server.stop()


def environment(address):
    """What makes a process use a server."""
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_EC2_METADATA_DISABLED": "true"}
    return {**keys, "AWS_ENDPOINT_URL": address, "AWS_DEFAULT_REGION": "us-east-1"}

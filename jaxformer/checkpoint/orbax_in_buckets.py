"""Orbax in buckets: how it commits where nothing can be renamed, and s3:// beside gs://."""

import json
import os
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from jaxformer.storage import is_in_bucket


def make_writer(folder: Path) -> ocp.AsyncCheckpointer:
    """Orbax's writer of checkpoints, which marks the end of one where nothing can be renamed."""
    way = ocp.path.atomicity.CommitFileTemporaryPath if is_in_bucket(folder) else None
    options = ocp.CompositeOptions(temporary_path_class=way)
    handler = ocp.CompositeCheckpointHandler(composite_options=options)
    return ocp.AsyncCheckpointer(handler, temporary_path_class=way)


def use_s3() -> None:
    """Orbax leads tensorstore to s3:// as it does to gs://; orbax 0.12 knows only the latter."""
    from orbax.checkpoint._src.serialization import tensorstore_utils

    build = tensorstore_utils.build_kvstore_tspec
    if build.__name__ == "build_kvstore_of_s3":
        return

    def build_kvstore_of_s3(directory: str, *args: Any, **named: Any) -> Any:
        if not directory.startswith("s3://"):
            return build(directory, *args, **named)
        spec = build(f"gs{directory[2:]}", *args, **named)
        return json.loads(json.dumps(spec), object_hook=_of_s3)

    tensorstore_utils.build_kvstore_tspec = build_kvstore_of_s3


def _of_s3(spec: dict[str, Any]) -> dict[str, Any]:
    """A part of tensorstore's JSON with the driver of Amazon's buckets in place of Google's."""
    if spec.get("driver") not in ("gcs", "gcs_grpc"):
        return spec
    spec = spec | {"driver": "s3"}
    if "AWS_ACCESS_KEY_ID" in os.environ:  # otherwise it reports each other kind of credentials
        spec |= {"aws_credentials": {"type": "environment"}}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:  # a storage that is not Amazon's; tensorstore asks for its region
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    return spec

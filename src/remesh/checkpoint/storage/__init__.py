"""Storage of checkpoints: one small interface over the file system, object stores, and every URL that fsspec knows.

location_of("s3://bucket/run")   text to a `Location`, which joins like a path
store_of(location)               what can be done there: read, put, create, list, remove
"""

from remesh.checkpoint.storage.location import Directory, Location, is_location, location_of, store_of
from remesh.checkpoint.storage.remote_path import RemotePath
from remesh.checkpoint.storage.store import Entry, NewFile, RangedFile, Store

__all__ = [
    "Directory",
    "Entry",
    "Location",
    "NewFile",
    "RangedFile",
    "RemotePath",
    "Store",
    "is_location",
    "location_of",
    "store_of",
]

"""Storage of checkpoints: one small interface over the file system, object stores, and every URL that fsspec knows.

location_of("s3://bucket/run")   text to a `Location`, which joins like a path
store_of(location)               what can be done there: read, put, create, list, remove
"""

from remesh.checkpoint.storage.location import (
    Directory as Directory,
    Location as Location,
    is_location as is_location,
    location_of as location_of,
    store_of as store_of,
)
from remesh.checkpoint.storage.remote_path import RemotePath as RemotePath
from remesh.checkpoint.storage.store import Entry as Entry, NewFile as NewFile, RangedFile as RangedFile, Store as Store

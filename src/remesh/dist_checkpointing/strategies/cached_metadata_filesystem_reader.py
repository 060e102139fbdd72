"""Storage reader for native torch that reads a checkpoint's index once, and unpickles nothing that others wrote."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, Metadata

from remesh.checkpoint.formats.index_files import encode_index
from remesh.checkpoint.formats.torch_format import read_manifest


class CachedMetadataFileSystemReader(FileSystemReader):
    """A `FileSystemReader` whose index goes through the restricted reader of this package.

    With ``cache_metadata`` all readers of a directory share it until `clear_metadata_cache`.
    """

    _shared: dict[Path, Metadata] = {}  # noqa: RUF012 - shared by all readers on purpose

    def __init__(self, path: str | os.PathLike[str], cache_metadata: bool = True) -> None:
        super().__init__(path)
        self._directory = Path(path).absolute()
        self._cache_metadata = cache_metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found = self._shared.get(self._directory) if self._cache_metadata else None
        if found is None:
            index = encode_index(read_manifest(self._directory).to_index())
            found = pickle.loads(index.pickled(str(self._directory), ""))  # bytes that were made one line above
            assert isinstance(found, Metadata)
            if self._cache_metadata:
                self._shared[self._directory] = found
        if found.storage_meta is not None:
            found.storage_meta.load_id = self.load_id
        return found

    @classmethod
    def clear_metadata_cache(cls) -> None:
        """Forget every index."""
        cls._shared.clear()

"""Info objects: strings under keys, in order. All in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

from remesh.mpi.upper.exceptions import failure
from remesh.mpi.upper.handles import Handle


class Info(Handle):
    """Hints: strings under keys."""

    __slots__ = ()

    @property
    def _items(self) -> dict[str, str]:
        if self._h is None:
            raise failure("ERR_INFO", "the info object is null or has been freed")
        content: dict[str, str] = self._h
        return content

    @classmethod
    def Create(cls, items: Any = None) -> Self:
        info = cls._wrap({})
        if items is not None:
            info.update(items)
        return info

    @classmethod
    def Create_env(cls, args: Any = None) -> Self:
        return cls._wrap(dict(_ENVIRONMENT))

    def _reduce(self) -> tuple[Any, ...]:
        return type(self).Create, (dict(self._items),)

    def Free(self) -> None:
        _ = self._items
        self._h = None

    def Dup(self) -> Self:
        return type(self)._wrap(dict(self._items))

    def Get(self, key: str) -> str | None:
        return self._items.get(key)

    def Set(self, key: str, value: str) -> None:
        self._items[key] = value

    def Delete(self, key: str) -> None:
        if key not in self._items:
            raise failure("ERR_INFO_NOKEY", f"there is no key {key!r}")
        del self._items[key]

    def Get_nkeys(self) -> int:
        return len(self._items)

    def Get_nthkey(self, n: int) -> str:
        if not 0 <= n < len(self._items):
            raise failure("ERR_ARG", f"key number {n} of {len(self._items)}")
        return list(self._items)[n]

    def __len__(self) -> int:
        return 0 if self._h is None else len(self._items)

    def __contains__(self, key: str) -> bool:
        return self._h is not None and key in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __getitem__(self, key: str) -> str:
        if key not in self:
            raise KeyError(key)
        return self._items[key]

    def __setitem__(self, key: str, value: str) -> None:
        if self._h is None:
            raise KeyError(key)
        self.Set(key, value)

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        self.Delete(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self._items[key] if key in self else default

    def keys(self) -> list[str]:
        return [] if self._h is None else list(self._items)

    def values(self) -> list[str]:
        return [] if self._h is None else list(self._items.values())

    def items(self) -> list[tuple[str, str]]:
        return [] if self._h is None else list(self._items.items())

    def update(self, items: Any = (), **kwds: str) -> None:
        if self._h is None:
            raise KeyError("the info object is null")
        pairs = items.items() if isinstance(items, (Mapping, Info)) else items
        for key, value in pairs:
            self[key] = value
        for key, value in kwds.items():
            self[key] = value

    def pop(self, key: str, *default: Any) -> Any:
        if key in self:
            value = self._items[key]
            self.Delete(key)
            return value
        if default:
            return default[0]
        raise KeyError(key)

    def popitem(self) -> tuple[str, str]:
        if not len(self):
            raise KeyError("popitem(): info is empty")
        key = list(self._items)[-1]
        return key, self.pop(key)

    def copy(self) -> Self:
        return self.Dup() if self._h is not None else type(self)()

    def clear(self) -> None:
        if self._h is not None:
            self._items.clear()


class WithInfo:
    """Mixin for handles whose content has hints, as ``info``: they are kept and handed back, and change nothing."""

    __slots__ = ()
    _content: Any

    def Get_info(self) -> Info:
        return Info.Create(self._content.info)

    def Set_info(self, info: Info) -> None:
        self._content.info = dict(info.items())

    info = property(Get_info, Set_info)


_ENVIRONMENT = {"thread_level": "MPI_THREAD_MULTIPLE"}
INFO_NULL = Info()
INFO_ENV = Info._wrap(dict(_ENVIRONMENT))
